"""Build docs/live.html, the network that learns while one watches: `make live`.

The learner is emitted as C (`net.export_c`), compiled to WebAssembly by clang with wasi-libc, and
written into one page. Needs Debian's clang, lld, wasi-libc and libclang-rt-dev-wasm32.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

HERE = Path(__file__).parent
UNITS, INPUTS, OUTPUTS = 32, 3, 2
OPTIMIZER = optax.adam(0.005)


def step(p, h, x):
    """A minimal GRU with a linear read-out."""
    z = jax.nn.sigmoid(x @ p["z"] + p["b"])
    h = (1 - z) * h + z * (x @ p["w"])
    return h, h @ p["o"]


def parameters():
    rng = np.random.default_rng(0)
    draw = lambda scale, *shape: jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)
    return {
        "z": draw(0.3, INPUTS, UNITS),
        "b": jnp.full(UNITS, -1.0, jnp.float32),  # half of a state is gone after two steps
        "w": draw(0.5, INPUTS, UNITS),
        "o": draw(0.3 / UNITS**0.5, UNITS, OUTPUTS),
    }


def loss(out, target):
    return jnp.mean((out - target) ** 2)


def start(rule):
    """The learner of a rule, its parameters, and its carry before the first step."""
    net, params = braintrace.online(step, rule), parameters()
    return (
        net,
        params,
        net.init(params, jnp.zeros(UNITS, jnp.float32), jnp.zeros(INPUTS, jnp.float32)),
    )


def compiled(folder: Path) -> tuple[bytes, int]:
    """The WebAssembly of the learner, and how many numbers its traces are."""
    net, params, carry = start("d_rtrl")
    x, y = jnp.zeros(INPUTS, jnp.float32), jnp.zeros(OUTPUTS, jnp.float32)
    done = net.export_c(params, carry, x, y, loss=loss, optimizer=OPTIMIZER, path=folder)
    traces = [s for s in done.code.kept if s.name.startswith("trace")]
    assert [s.name for s in done.code.kept][-len(traces) :] == [s.name for s in traces]
    count = sum(s.value.size for s in traces)
    defined = [f"-DINPUTS={INPUTS}", f"-DOUTPUTS={OUTPUTS}"]
    defined.append(f"-DFIRST_TRACE={traces[0].name}")
    cleared = " ".join(f"memset(l->{s.name}, 0, sizeof l->{s.name});" for s in traces)
    (folder / "forget.h").write_text(f"static void forget(learner *l) {{ {cleared} }}\n")
    flags = "--target=wasm32-wasi -O2 -std=c99 -nostartfiles -Wl,--no-entry -Wl,--strip-all".split()
    files = [HERE / "page.c", folder / "learner.c"]
    command = ["clang", *flags, *defined, "-I", folder, "-o", folder / "p.wasm", *files, "-lm"]
    subprocess.run(command, check=True)
    return (folder / "p.wasm").read_bytes(), count


def sources() -> str:
    """A number of what the page is made of, which it carries."""
    texts = [(HERE / name).read_bytes() for name in ("build.py", "page.c", "page.html")]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        wasm, count = compiled(Path(folder))
    text = (HERE / "page.html").read_text("utf-8")
    filled = {"UNITS": UNITS, "ROWS": count // UNITS, "SOURCES": sources()}
    filled["WASM"] = base64.b64encode(wasm).decode()
    for name, value in filled.items():
        text = text.replace(f"%{name}%", str(value))
    return text


if __name__ == "__main__":
    (HERE.parent / "live.html").write_text(page(), "utf-8")
