import jax.numpy as jnp
import pytest

from braintrace.ops import matmul

X, W = jnp.ones((2, 3)), jnp.ones((3, 4))


@pytest.mark.parametrize(
    "args, text",
    [
        ((jnp.ones((2, 2, 3)), W), r"matmul: x \(2, 2, 3\) has 3 axes"),
        ((jnp.ones(()), W), r"matmul: x \(\) has 0 axes"),
        ((X, jnp.ones(3)), r"matmul: weight \(3,\) has 1 axes"),
        ((X, jnp.ones((4, 3))), r"matmul: x \(2, 3\) does not fit weight \(4, 3\)"),
        ((X, W, jnp.ones(3)), r"matmul: bias \(3,\) does not have the shape \(4,\)"),
        ((X, W, jnp.ones((1, 4))), r"matmul: bias \(1, 4\) does not have the shape \(4,\)"),
    ],
)
def test_matmul_refuses_shapes_that_do_not_fit(args, text):
    with pytest.raises(ValueError, match=text + r"(.|\n)*why: (.|\n)*do: "):
        matmul(*args)


def test_matmul_names_the_hook_that_changed_the_shape():
    with pytest.raises(ValueError, match=r"weight_fn\(weight\).*\(4, 3\)"):
        matmul(X, W, weight_fn=jnp.transpose)
    with pytest.raises(ValueError, match=r"bias_fn\(bias\)"):
        matmul(X, W, jnp.ones(4), bias_fn=jnp.sum)
    with pytest.raises(TypeError, match=r"weight_fn\(weight\).*tuple"):
        matmul(X, W, weight_fn=lambda w: (w,))


def test_matmul_takes_a_hook_that_makes_the_shape_fit():
    assert matmul(X, W.T, weight_fn=jnp.transpose).shape == (2, 4)
