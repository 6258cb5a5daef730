import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace.nn import GroupedLinear, Linear, ScaledWSLinear, SignedWLinear

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)))


def test_integers_become_trainable():
    assert Linear(3, 4, w_init=2, b_init=1).weight.value["bias"].dtype == jnp.float64


def test_state_or_list_may_be_the_initial_value():
    layer = Linear(2, 2, w_init=brainstate.ParamState(jnp.eye(2)), b_init=[1.0, 2.0])
    np.testing.assert_array_equal(layer(jnp.array([3.0, 5.0])), [4.0, 7.0])


def test_grouped_weights_have_the_scale_of_one_group():
    brainstate.random.seed(0)
    layer = GroupedLinear(4, 200, 100)
    assert layer.in_size == (4, 200) and layer.out_size == (4, 100)
    np.testing.assert_allclose(layer.weight.value["weight"].var(), 2 / 200, rtol=0.05)
    assert GroupedLinear(2, 3, 4, w_init=1, b_init=None).weight.value["weight"].shape == (2, 3, 4)


def test_units_pass_through():
    grouped = GroupedLinear(2, 3, 4, w_init=lambda s: jnp.ones(s) * u.mV, b_init=0 * u.mV)
    assert u.get_unit(grouped(jnp.ones((2, 3)))) == u.mV
    signed = SignedWLinear(3, 4, w_init=-2 * u.mV, w_sign=-1)
    np.testing.assert_allclose(signed(X).mantissa, -2 * np.tile(X.sum(1)[:, None], 4))
    scaled = ScaledWSLinear(3, 4, b_init=1 * u.mV)
    scaled.weight.value = {**scaled.weight.value, "weight": jnp.eye(3, 4) * u.mV}
    bare = ScaledWSLinear(3, 4, w_init=jnp.eye(3, 4), b_init=1.0)
    np.testing.assert_allclose(scaled(X).to_decimal(u.mV), bare(X))


def test_signs_are_positive_by_default():
    np.testing.assert_allclose(SignedWLinear(3, 4, w_init=-2.0)(X)[:, 0], 2 * X.sum(1))


def test_standard_weights_have_mean_zero_and_norm_one():
    layer = ScaledWSLinear(3, 4, b_init=None, ws_gain=False)
    assert set(layer.weight.value) == {"weight"}
    weight = layer(jnp.eye(3))
    np.testing.assert_allclose(weight.sum(0), 0, atol=1e-12)
    np.testing.assert_allclose((weight**2).sum(0), 1)
    constant = ScaledWSLinear(3, 4, w_init=2.0)
    np.testing.assert_array_equal(constant(X), jnp.zeros((2, 4)))


@pytest.mark.parametrize("kind", [Linear, SignedWLinear, ScaledWSLinear])
def test_layer_refuses_sizes_and_values_that_do_not_fit(kind):
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"{name}.*in_size \(2, 3\).*out_size \(4,\)"):
        kind((2, 3), 4)
    with pytest.raises(ValueError, match=rf"{name}.*w_init.*\(4, 3\)") as info:
        kind(3, 4, w_init=jnp.ones((4, 3)))
    assert "why:" in str(info.value) and "do:" in str(info.value)
    with pytest.raises(ValueError, match=rf"{name}.*w_init.*None(.|\n)*initialiser"):
        kind(3, 4, w_init=None)
    other = {"w_sign" if kind is SignedWLinear else "w_mask": jnp.ones((1, 3, 4))}
    with pytest.raises(ValueError, match=r"\(1, 3, 4\)"):
        kind(3, 4, **other)
