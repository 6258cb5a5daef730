import jax.numpy as jnp
import pytest

from braintrace.ops import grouped_matmul

X, W = jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4))


@pytest.mark.parametrize(
    "args, text",
    [
        ((jnp.ones(3), W), r"x \(3,\) has 1 axes"),
        ((jnp.ones((1, 5, 2, 3)), W), r"x \(1, 5, 2, 3\) has 4 axes"),
        ((X, jnp.ones((3, 4))), r"weight \(3, 4\) has 2 axes"),
        ((X, jnp.ones((3, 2, 4))), r"x \(5, 2, 3\) does not fit weight \(3, 2, 4\)"),
        ((X, W, jnp.ones(4)), r"bias \(4,\) does not have the shape \(2, 4\)"),
    ],
)
def test_grouped_matmul_refuses_shapes_that_do_not_fit(args, text):
    with pytest.raises(ValueError, match="grouped_matmul: " + text):
        grouped_matmul(*args)
