import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.ops import conv

X, K = jnp.ones((2, 3, 6)), jnp.ones((4, 3, 3))


@pytest.mark.parametrize(
    "args, options, text",
    [
        ((X[0], K), {}, r"x \(3, 6\) does not fit kernel \(4, 3, 3\)"),
        ((X, K[:, :2]), {}, "the input has 3 channels, the kernel reads 2"),
        ((X, K, jnp.ones(3)), {}, r"bias \(3,\) does not fit the output \(2, 4, 6\)"),
        ((X, K, jnp.ones((3, 1))), {}, r"bias \(3, 1\) does not fit the output"),
        ((X, K), {"strides": (1, 2)}, r"strides is \(1, 2\)"),
        ((X, K), {"kernel_fn": lambda k: k[0]}, r"does not fit kernel_fn\(kernel\) \(3, 3\)"),
    ],
)
def test_conv_refuses_shapes_that_do_not_fit(args, options, text):
    with pytest.raises(ValueError, match=rf"conv: (.|\n)*{text}"):
        conv(*args, **options)


def test_conv_takes_one_number_for_all_axes():
    x, k = jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 2, 2))
    np.testing.assert_allclose(conv(x, k, strides=2), conv(x, k, strides=(2, 2)))
    assert conv(x, k).shape == (1, 1, 4, 4)
