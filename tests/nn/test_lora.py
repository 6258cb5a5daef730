import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace as bt
from braintrace.nn import Linear, LoRA, ValinaRNNCell
from braintrace.verify._compare import comparison
from gradients import bptt_grad, online_grad

XS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)))
NORMAL = brainstate.nn.init.Normal(0.5)


def step(net, x):
    return jnp.sum(net(x) ** 2)


def leaves(state):
    return jax.tree.map(np.asarray, state.value)


def test_lora_adds_its_base():
    base = Linear(3, 4, b_init=NORMAL)
    layer = LoRA(3, 2, 4, base_module=base)
    p, x = layer.weight.value, XS[0]
    assert p["lora_a"].shape == (3, 2) and p["lora_b"].shape == (2, 4)
    want = x @ p["lora_a"] @ p["lora_b"] / 2 + x @ base.weight.value["weight"]
    np.testing.assert_allclose(layer(x), want + base.weight.value["bias"], rtol=1e-12)
    assert set(layer.states(brainstate.ParamState)) == {("weight",), ("base_module", "weight")}
    again = LoRA(3, 2, 3, base_module=jnp.sin, kernel_init=0)
    np.testing.assert_allclose(again(x), jnp.sin(x))


def test_lora_of_zeros_is_its_base():
    base = Linear(3, 4)
    layer = LoRA(3, 2, 4, base_module=base, lora_b_init=0.0)
    assert layer.weight.value["lora_a"].any() and not layer.weight.value["lora_b"].any()
    np.testing.assert_array_equal(layer(XS[0]), base(XS[0]))


def test_lora_keeps_units_and_leading_sizes():
    layer = LoRA(3, 2, 4, kernel_init=lambda shape: jnp.ones(shape) * u.mV**0.5, in_size=(5, 3))
    assert layer.in_size == (5, 3) and layer.out_size == (5, 4)
    y = layer(jnp.ones((2, 5, 3)))
    assert u.get_unit(y) == u.mV and y.shape == (2, 5, 4)
    np.testing.assert_allclose(y.mantissa, 3.0)


def frozen_cell():
    """The idiom of the documentation: a trained cell, frozen, with a layer of low rank beside."""
    brainstate.random.seed(0)
    cell = ValinaRNNCell(3, 4, w_init=NORMAL, b_init=NORMAL, activation="tanh")
    base = cell.W
    base.weight = brainstate.LongTermState(base.weight.value)
    cell.W = LoRA(7, 2, 4, base_module=base)
    return cell


def test_lora_beside_a_frozen_cell_is_learned_alone():
    cell = frozen_cell()
    learner = bt.compile(cell, "rtrl", XS[0], batch_size=2)
    truth = bptt_grad(cell, step, XS)
    assert set(truth) == {("W", "weight")}
    assert all(np.abs(a).max() > 1e-3 for a in jax.tree.leaves(truth))
    assert comparison(online_grad(learner, step, XS), truth).max_error < 1e-9

    mapped = bt.compile(cell, "rtrl", XS[0], batch_size=2, vmap=True)
    found = mapped.etrace_grad(XS, step_fn=lambda x: step(mapped, x), reduction="sum")
    assert comparison(dict(found), truth).max_error < 1e-9

    before, base = leaves(cell.W.weight), leaves(cell.W.base_module.weight)
    for path, state in cell.states(brainstate.ParamState).items():
        state.value = jax.tree.map(lambda w, g: w - 0.1 * g, state.value, truth[path])
    jax.tree.map(np.testing.assert_array_equal, leaves(cell.W.base_module.weight), base)
    assert not np.allclose(leaves(cell.W.weight)["lora_a"], before["lora_a"])


@pytest.mark.parametrize(
    "error, match, arguments",
    [
        (ValueError, "lora_rank is 0", dict(lora_rank=0)),
        (ValueError, r"in_size \(2, 5\) does not end in in_features 3", dict(in_size=(2, 5))),
        (TypeError, "base_module has type float", dict(base_module=1.0)),
        (ValueError, r"lora_b_init has the shape \(5,\)", dict(lora_b_init=jnp.ones(5))),
    ],
)
def test_lora_refuses(error, match, arguments):
    with pytest.raises(error, match=match) as info:
        LoRA(**{"in_features": 3, "lora_rank": 2, "out_features": 4, **arguments})
    assert "why:" in str(info.value) and "do:" in str(info.value)
