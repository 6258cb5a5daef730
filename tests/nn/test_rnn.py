import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.nn import GRUCell, LSTMCell, ValinaRNNCell
from braintrace.program import flatten

CELLS = [ValinaRNNCell, GRUCell, LSTMCell]
RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.normal(size=(3, 2, 3)))
NORMAL = brainstate.nn.init.Normal(0.5)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def affine(layer, *parts):
    p = layer.weight.value
    return np.concatenate(parts, -1) @ np.asarray(p["weight"]) + np.asarray(p["bias"])


def valina(cell, x, s):
    return {"h": np.maximum(affine(cell.W, x, s["h"]), 0)}


def gru(cell, x, s):
    z, r = sigmoid(affine(cell.Wz, x, s["h"])), sigmoid(affine(cell.Wr, x, s["h"]))
    return {"h": (1 - z) * s["h"] + z * np.tanh(affine(cell.Wh, x, r * s["h"]))}


def lstm(cell, x, s):
    i, g, f, o = (affine(w, x, s["h"]) for w in (cell.Wi, cell.Wg, cell.Wf, cell.Wo))
    c = sigmoid(f + 1) * s["c"] + sigmoid(i) * np.tanh(g)
    return {"c": c, "h": sigmoid(o) * np.tanh(c)}


@pytest.mark.parametrize(("kind", "step"), zip(CELLS, (valina, gru, lstm), strict=True))
@pytest.mark.parametrize("batch_size", [None, 2])
def test_cell_follows_its_equations(kind, step, batch_size):
    cell = kind(3, 4, w_init=NORMAL, b_init=NORMAL, state_init=NORMAL)
    cell.init_state(batch_size)
    states = {k: np.asarray(getattr(cell, k).value) for k in cell.state_names}
    for x in INPUTS if batch_size else INPUTS[:, 0]:
        out = cell(x)
        states = step(cell, np.asarray(x), states)
        np.testing.assert_allclose(out, states["h"], rtol=1e-6)
        for k, v in states.items():
            np.testing.assert_allclose(getattr(cell, k).value, v, rtol=1e-6)


@pytest.mark.parametrize("kind", CELLS)
def test_cell_makes_and_resets_hidden_states(kind):
    cell = kind(3, 4, b_init=5.0, name="cell")  # no unit of a relu is silent
    assert cell.name == "cell" and cell.in_size == (3,) and cell.out_size == (4,)
    brainstate.nn.init_all_states(cell, batch_size=2)
    assert {k[-1] for k in cell.states(brainstate.HiddenState)} == set(cell.state_names)
    cell(INPUTS[0])
    assert jnp.abs(cell.h.value).sum() > 0
    cell.reset_state(batch_size=5)
    for name in cell.state_names:
        assert getattr(cell, name).value.shape == (5, 4)
        assert not getattr(cell, name).value.any()


@pytest.mark.parametrize(("kind", "count"), zip(CELLS, (1, 3, 4), strict=True))
def test_every_weight_goes_through_an_operator(kind, count):
    cell = kind(3, 4)
    cell.init_state()
    closed, _ = brainstate.transform.make_jaxpr(cell)(INPUTS[0, 0])
    program, _ = flatten(closed)
    assert [e.name for e in program.equations].count("etp_mv") == count
    assert len(cell.states(brainstate.ParamState)) == count


def test_activation_is_a_name_or_a_function():
    cell = ValinaRNNCell(3, 4, activation=lambda a: 0 * a + 7)
    cell.init_state()
    np.testing.assert_allclose(cell(INPUTS[0, 0]), 7)
    assert GRUCell(3, 4, activation="relu").activation(jnp.asarray(-1.0)) == 0
    assert LSTMCell(3, 4, activation=jax.nn.relu).activation is jax.nn.relu


@pytest.mark.parametrize("kind", CELLS)
def test_unknown_activation_is_refused_with_the_choices(kind):
    with pytest.raises(ValueError, match=r"'rleu'(.|\n)*relu(.|\n)*tanh"):
        kind(3, 4, activation="rleu")
