"""The derivative of a spike, against formulas written out here."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from braintrace.nn import surrogate

V = np.linspace(-3.0, 3.0, 25)  # 0 is among them


def sides(a):
    return norm.pdf(a, 1, 6) + norm.pdf(a, -1, 6)


SHAPES = {
    "arctan": lambda a: 1 / (1 + a * a),
    "fast_sigmoid": lambda a: (1 + np.abs(a)) ** -2.0,
    "gaussian": lambda a: norm.pdf(a) / norm.pdf(0),
    "multi_gaussian": lambda a: (
        (1.15 * norm.pdf(a) - 0.15 * sides(a)) / (1.15 * norm.pdf(0) - 0.15 * sides(0))
    ),
    "sigmoid": lambda a: np.cosh(a / 2) ** -2.0,
    "triangle": lambda a: np.clip(1 - np.abs(a), 0, None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_surrogate_is_a_step_with_the_derivative_of_its_name(name):
    for numbers in ({}, {"width": 0.4, "height": 2.0}):
        spike = surrogate(name, **numbers)
        width, height = numbers.get("width", 1.0), numbers.get("height", 0.3)
        values, slopes = jax.vmap(jax.value_and_grad(spike))(jnp.asarray(V))
        np.testing.assert_array_equal(values, V > 0)
        np.testing.assert_allclose(slopes, height * SHAPES[name](V / width), rtol=1e-9, atol=1e-15)
        tangents = jax.jvp(spike, (jnp.asarray(V),), (jnp.full(V.shape, 2.0),))[1]
        np.testing.assert_allclose(tangents, 2 * slopes)


def test_surrogate_keeps_the_dtype_and_can_be_pickled():
    spike = pickle.loads(pickle.dumps(surrogate("triangle", width=2.0)))
    assert spike == surrogate("triangle", width=2.0)
    v = jnp.ones(3, jnp.bfloat16)
    assert spike(v).dtype == jax.grad(lambda v: spike(v).sum())(v).dtype == jnp.bfloat16


def test_surrogate_passes_a_function_through():
    assert surrogate(jax.nn.sigmoid) is jax.nn.sigmoid


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"name": "square"}, "no surrogate 'square'(.|\n)*arctan, fast_sigmoid"),
        ({"name": "arctan", "width": 0}, "width is 0(.|\n)*positive"),
        ({"name": "arctan", "height": -1.0}, "height is -1.0(.|\n)*positive"),
    ],
)
def test_surrogate_refuses_bad_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        surrogate(**arguments)


@pytest.mark.parametrize("step", [lambda v: v > 0, lambda v: (v > 0).astype(v.dtype)])
def test_plain_step_is_refused(step):
    with pytest.raises(ValueError, match=r"<lambda>.*zero") as error:
        surrogate(step)
    assert "why:" in str(error.value) and "jax.custom_jvp" in str(error.value)
