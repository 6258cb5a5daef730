import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace.nn import Linear

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)))


def test_linear_is_an_affine_map():
    layer = Linear(3, 4, b_init=brainstate.nn.init.Normal(1.0))
    w, b = layer.weight.value["weight"], layer.weight.value["bias"]
    assert layer.in_size == (3,) and layer.out_size == (4,)
    np.testing.assert_allclose(layer(X), X @ w + b)
    np.testing.assert_allclose(layer(X[0]), X[0] @ w + b)


def test_linear_folds_leading_axes():
    layer = Linear((5, 3), (5, 4))
    x = jnp.ones((2, 5, 3))
    np.testing.assert_allclose(layer(x), x @ layer.weight.value["weight"])
    y = Linear((5, 3), (5, 4), b_init=None)(x * u.mV)
    assert u.get_unit(y) == u.mV and y.shape == (2, 5, 4)


def test_linear_without_bias_and_with_mask():
    mask = jnp.asarray(np.arange(12).reshape(3, 4) % 2)
    layer = Linear(3, 4, w_init=2.0, b_init=None, w_mask=mask)
    assert set(layer.weight.value) == {"weight"} and layer.weight.value["weight"].shape == (3, 4)
    np.testing.assert_allclose(layer(X), X @ (2.0 * mask))
    again = Linear(3, 4, w_init=2.0, w_mask=lambda shape: jnp.zeros(shape))
    np.testing.assert_allclose(again(X), jnp.zeros((2, 4)))


def test_linear_is_a_module_with_one_parameter():
    layer = Linear(3, 4, name="dense")
    assert layer.name == "dense" and Linear.__module__ == "braintrace.nn"
    assert list(layer.states(brainstate.ParamState)) == [("weight",)]


def test_linear_uses_its_param_type():
    class Frozen(brainstate.ParamState):
        pass

    assert isinstance(Linear(3, 4, param_type=Frozen).weight, Frozen)


def test_linear_refuses_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"in_size \(2, 3\).*out_size \(4,\)"):
        Linear((2, 3), 4)


@pytest.mark.parametrize("value", [0.5, 0.5 * u.mV])
def test_parameter_of_a_number_has_a_strong_dtype(value):
    bias = Linear(3, 4, b_init=value).weight.value["bias"]
    assert not u.get_mantissa(bias).weak_type and u.get_mantissa(bias).dtype == jnp.float64
