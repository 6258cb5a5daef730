"""Every cell of `braintrace.nn` under every rule, as a compiled learner: 200 updates."""

import sys
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from compiled import build, difference, run
from test_c import RULES

import braintrace

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from registry import BATCH, ENTRIES

STEPS = 200
CASES = [(name, rule) for name in ENTRIES for rule in RULES if rule != "three_factor"]


class Leaky(brainstate.nn.Module):
    """Units that integrate what a layer returns."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer, self.shape = layer, shape

    def init_state(self, batch_size=None, **kwargs):
        self.leaky = brainstate.HiddenState(jnp.zeros(self.shape))

    def update(self, x):
        self.leaky.value = 0.9 * self.leaky.value + self.layer(x)
        return self.leaky.value


def outputs(model, x):
    run = brainstate.transform.StatefulFunction(lambda x: model(x))
    return jax.tree.leaves(run.make_jaxpr(x).get_out_shapes(x)[0])


def made(name):
    """A cell with its states, an example of its input, and sequences of inputs and targets."""
    rng = np.random.default_rng(0)
    model, x = ENTRIES[name].make()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    if not model.states(brainstate.HiddenState):
        model = Leaky(model, outputs(model, x)[0].shape)
        brainstate.nn.init_all_states(model, batch_size=BATCH)
    if jnp.issubdtype(x.dtype, jnp.integer):
        xs = jnp.asarray(rng.integers(0, int(x.max()) + 1, (STEPS, *x.shape)), x.dtype)
    else:
        xs = x * jnp.asarray(rng.normal(size=(STEPS, *x.shape)))
    return model, xs, jnp.asarray(rng.normal(size=(STEPS, *outputs(model, x)[0].shape)))


def loss(out, y):
    return sum(jnp.mean((o - y) ** 2) for o in jax.tree.leaves(out))


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_cell_in_c_is_the_cell_in_jax(name, rule, tmp_path):
    with brainstate.environ.context(dt=1.0 * u.ms):
        brainstate.random.seed(0)
        model, xs, ys = made(name)
        learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH, **RULES[rule])
        how = dict(loss=loss, optimizer=optax.adam(1e-3))
        done = learner.export_c(xs[0], ys[0], path=tmp_path, **how)
        found = run(done, build(done), {"x": xs, "target": ys})
        losses = learner.train(loss, how["optimizer"])(xs, ys)
    assert difference(found.losses, losses) < 1e-10
    assert np.ptp(losses) > 0
    saved = done.unpack(found.saved[0])
    weights = jax.tree.leaves([s.value for s in learner.param_states.values()])
    trained = [s.name for s in done.code.kept if s.role.value == "parameters"]
    assert trained
    for key in trained:
        same = [difference(saved[key], w) for w in weights if w.shape == saved[key].shape]
        assert min(same) < 1e-10
    assert done.sizes.scratch <= 1.5 * done.sizes.live
