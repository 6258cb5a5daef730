"""A learner in C beside the jitted call in JAX: time of one update, 64 units, one sample.

    python benchmarks/export.py
    python benchmarks/export.py --units 128 --updates 3000
    python benchmarks/export.py --record docs/results/export.json
    python benchmarks/export.py --check --minutes 8   # goes on with benchmarks/results/export.jsonl
    python benchmarks/export.py --check --record docs/results/export_check.json

Both do the same 16 inputs, forward step, trace, gradient and SGD update in float32. Updates of the
two alternate in one process, so that what else the machine does falls on both. Needs gcc. RAM and
flash on a Cortex-M4 are those of the linker's map, where `make arm` installed its compiler.

`--check` judges every cell of `braintrace.nn` under every rule: compiled by gcc and clang with
sanitizers, 200 updates in double and 20 single steps in float. Exit status 1: something is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

HERE = Path(__file__).parent
INPUTS, OUTPUTS = 16, 4
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    (v,), (dv,) = primals, tangents
    return spike(v), dv * jnp.maximum(0.0, 1 - jnp.abs(v)) * 0.3


def lif(p, state, x):
    v, z = state
    v = 0.9 * v * (1 - z) + x @ p["w"] + z @ p["u"]
    z = spike(v - 1.0)
    return (v, z), z @ p["o"]


def mingru(p, h, x):
    z = jax.nn.sigmoid(x @ p["z"])
    h = (1 - z) * h + z * (x @ p["w"])
    return h, h @ p["o"]


def rtu(p, state, x):
    a, b = state
    r = jnp.exp(-jnp.exp(p["nu"]))
    c, d, n = r * jnp.cos(p["th"]), r * jnp.sin(p["th"]), jnp.sqrt(1 - r * r)
    a, b = c * a - d * b + n * (x @ p["w"]), d * a + c * b + n * (x @ p["u"])
    return (a, b), jnp.tanh(jnp.concatenate([a, b])) @ p["o"]


def networks(n):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)
    zero = jnp.zeros(n)
    return {
        "LIF": (lif, dict(w=draw(INPUTS, n), u=draw(n, n) * 0.2, o=draw(n, OUTPUTS)), (zero, zero)),
        "minGRU": (mingru, dict(z=draw(INPUTS, n), w=draw(INPUTS, n), o=draw(n, OUTPUTS)), zero),
        "RTU": (
            rtu,
            dict(
                nu=zero - 1,
                th=draw(n),
                w=draw(INPUTS, n),
                u=draw(INPUTS, n),
                o=draw(2 * n, OUTPUTS),
            ),
            (zero, zero),
        ),
    }


def loss(out, y):
    return jnp.mean((out - y) ** 2)


def in_c(done, folder):
    """`init`, and a function that takes one update."""
    files = [folder / "learner.c"]
    library = folder / "learner.so"
    subprocess.run(
        ["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, *files, "-lm"],
        check=True,
    )
    lib = ctypes.CDLL(str(library))
    lib.learner_learn.restype = ctypes.c_float
    memory = ctypes.create_string_buffer(done.sizes.total + 4096)
    out = np.zeros(OUTPUTS, np.float32)
    lib.learner_init(memory)
    at = lambda a: a.ctypes.data_as(ctypes.c_void_p)

    def update(x, y):
        lib.learner_step(memory, at(x), at(out))
        return lib.learner_learn(memory, at(y))

    return update


def in_jax(net, params, carry, optimizer):
    """The same: one compiled call that takes and returns everything."""
    opt = optimizer.init(params)

    @jax.jit
    def call(params, opt, carry, x, y):
        def total(params):
            after, out = net(params, carry, x)
            return loss(out, y), after

        (value, after), grads = jax.value_and_grad(total, has_aux=True)(params)
        changes, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, changes), opt, after, value

    kept = [params, opt, carry]

    def update(x, y):
        *kept[:], value = call(*kept, x, y)
        return value.block_until_ready()

    return update


def measure(name, network, updates):
    step, params, state = network
    net, optimizer = braintrace.online(step, "d_rtrl"), optax.sgd(0.01)
    rng = np.random.default_rng(1)
    xs = rng.normal(size=(updates, INPUTS)).astype(np.float32)
    ys = rng.normal(size=(updates, OUTPUTS)).astype(np.float32)
    carry = net.init(params, state, xs[0])
    with tempfile.TemporaryDirectory() as folder:
        how = dict(loss=loss, optimizer=optimizer, path=folder)
        done = net.export_c(params, carry, xs[0], ys[0], **how)
        both = {"C": in_c(done, Path(folder)), "JAX": in_jax(net, params, carry, optimizer)}
        ram, flash = on_board(Path(folder), xs[:1], ys[:1])
        for update in both.values():
            for _ in range(20):
                update(xs[0], ys[0])
        times = {which: [] for which in both}
        for x, y in zip(xs, ys, strict=True):
            for which, update in both.items():
                start = time.perf_counter()
                update(x, y)
                times[which].append(time.perf_counter() - start)
    row = {"network": name, "ram": ram, "flash": flash, "scratch": done.sizes.scratch}
    for which, of_one in times.items():
        for q in (50, 99):
            row[f"{which} p{q}"] = round(1e6 * np.percentile(of_one, q), 2)
    row["ratio"] = round(row["C p50"] / row["JAX p50"], 3)
    print("   ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    return row


def on_board(folder, xs, ys):
    """Bytes of RAM and flash on a Cortex-M4; None without its compiler."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "export"))
    from boards import MISSING, built, weight

    return (None, None) if MISSING else weight(built(folder, "m4", xs, ys)[1])


def table(rows):
    """The rows as docs/how-to/export.md has them."""
    heads = ["64 units, 16 inputs, 4 outputs", "RAM", "of it scratch", "flash"]
    heads += ["C: median, p99", "jitted call: median, p99", "ratio of medians"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["network"], *(f"{row[k] / 1000:.0f} kB" for k in ("ram", "scratch", "flash"))]
        cells += [f"{row[f'{w} p50']:.1f}, {row[f'{w} p99']:.0f} µs" for w in ("C", "JAX")]
        lines.append(f"| {' | '.join(cells)} | {row['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--record", type=Path, help="write the rows, or what --check found")
    parser.add_argument("--check", action="store_true", help="every cell under every rule")
    parser.add_argument("--minutes", type=float, default=600, help="of --check")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "export.jsonl")
    options = parser.parse_args()
    if options.check:
        os.environ["XLA_FLAGS"] = QUICK  # programs run once
        from _export_check import check

        sys.exit(check(options.out, options.minutes, options.record))
    rows = [measure(n, network, options.updates) for n, network in networks(options.units).items()]
    if options.record:
        options.record.write_text(
            json.dumps({"units": options.units, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
