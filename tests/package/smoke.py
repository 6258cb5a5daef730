"""What a new user does first, with the installed package alone: `python -I smoke.py` anywhere.

`make package` runs it in an environment that holds the wheel and what the wheel requires.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import files, metadata, version
from importlib.util import find_spec
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp

import braintrace

NETWORK = """
import brainstate
import braintrace

class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(3, 4)
    def update(self, x):
        return self.cell(x)
"""


class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(4, 16)
        self.readout = braintrace.nn.Linear(16, 4)

    def update(self, x):
        return self.readout(self.cell(x))


def installed() -> None:
    """It is the installed package, whole, and nothing else was needed."""
    home = Path(braintrace.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), home
    assert version("braintrace-online") == braintrace.__version__
    names = {str(f) for f in files("braintrace-online") or ()}
    assert {"braintrace/py.typed", "braintrace/__init__.pyi"} <= names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not any(n.startswith(("tests", "src", "docs")) for n in names), names
    about = metadata("braintrace-online")
    assert about["License-Expression"] == "Apache-2.0"
    urls = about.get_all("Project-URL") or []
    assert urls == [] or "](docs/" not in about.get_payload(), "links of PyPI's page lead nowhere"
    for extra in ("matplotlib", "pytest", "optax", "sklearn", "nir"):
        assert find_spec(extra) is None, f"{extra} is installed: the environment is not bare"


def module_trains() -> float:
    """Name a symbol for nine steps after it was shown, by gradient descent."""
    brainstate.random.seed(0)
    symbols = jnp.arange(16) % 4
    xs = jnp.zeros((10, 16, 4)).at[0].set(jax.nn.one_hot(symbols, 4))
    model = Network()
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=16)
    step_fn = lambda x: -jnp.mean(jax.nn.log_softmax(learner(x))[jnp.arange(16), symbols])
    params = model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def update():
        learner.reset()
        grads, losses = learner.etrace_grad(xs, step_fn=step_fn, return_value=True)
        for path, param in params.items():
            param.value = jax.tree.map(lambda w, g: w - g, param.value, grads[path])
        return losses[-1]

    first = update()
    for _ in range(150):
        last = update()
    assert last < 0.1 < first, (first, last)
    return float(last)


def function_is_exact() -> float:
    """A plain function: D-RTRL of separate units is the gradient of BPTT, up to rounding."""
    xs = jax.random.normal(jax.random.key(0), (20, 3))
    w = jax.random.normal(jax.random.key(1), (3, 5))

    def step(w, h, x):
        h = jnp.tanh(0.9 * h + x @ w)
        return h, h

    loss = lambda out: jnp.sum(out**2)
    net = braintrace.online(step, "d_rtrl")
    grads, _ = net.grad(loss)(w, net.init(w, jnp.zeros(5), xs[0]), xs)
    total = lambda w: loss(jax.lax.scan(lambda h, x: step(w, h, x), jnp.zeros(5), xs)[1])
    want = jax.grad(total)(w)
    error = float(jnp.abs(grads - want).max() / jnp.abs(want).max())
    assert error < 1e-5, error
    return error


def commands(folder: Path) -> None:
    """The command and the module are the same program; a missing extra is named."""
    script = str(Path(sys.executable).with_name("braintrace"))
    (folder / "net.py").write_text(NETWORK)

    def run(*words: str, fails: bool = False) -> str:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    assert braintrace.__version__ in run(script, "--version")
    assert "explain" in run(script, "--help")
    module = (sys.executable, "-m", "braintrace")
    assert "cell.Wz" in run(*module, "explain", "net.py:Network", "--input", "3")
    told = run(*module, "demo", "--quick", fails=True)
    assert re.search(r"pip install 'braintrace-online\[\w+", told), told


if __name__ == "__main__":
    installed()
    loss = module_trains()
    error = function_is_exact()
    with tempfile.TemporaryDirectory() as folder:
        commands(Path(folder))
    print(
        f"braintrace {braintrace.__version__}, Python {sys.version.split()[0]}, "
        f"JAX {jax.__version__}, brainstate {version('brainstate')}: "
        f"a module trains (loss {loss:.3f}), a function has the gradient of BPTT (to {error:.0e}), "
        "the commands answer."
    )
