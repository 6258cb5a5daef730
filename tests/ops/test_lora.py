import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace.ops import lora_matmul

X, B, A = jnp.ones((2, 3)), jnp.ones((3, 2)), jnp.ones((2, 4))


@pytest.mark.parametrize(
    "args, options, text",
    [
        ((jnp.ones((1, 2, 3)), B, A), {}, r"x \(1, 2, 3\) has 3 axes"),
        ((X, A, A), {}, r"x \(2, 3\) does not fit B \(2, 4\)"),
        ((X, B, B), {}, r"B \(3, 2\) does not fit A \(3, 2\)"),
        ((X, B, A), {"bias": jnp.ones(3)}, r"bias \(3,\) does not have the shape \(4,\)"),
        ((X, B, A), {"b_fn": jnp.transpose}, r"does not fit b_fn\(B\) \(2, 3\)"),
        ((X, B, A), {"a_fn": jnp.transpose}, r"does not fit a_fn\(A\) \(4, 2\)"),
    ],
)
def test_lora_matmul_refuses_shapes_that_do_not_fit(args, options, text):
    with pytest.raises(ValueError, match="lora_matmul: .*" + text):
        lora_matmul(*args, **options)


def test_lora_matmul_takes_any_scale():
    for alpha in (2, np.float64(2.0), jnp.asarray(2.0)):
        out = lora_matmul(X, B, A, alpha=alpha, b_fn=jnp.square)
        np.testing.assert_allclose(out, 2.0 * X @ B**2 @ A)
    out = jax.jit(lambda alpha: lora_matmul(X, B, A, alpha=alpha))(0.5)
    np.testing.assert_allclose(out, 0.5 * X @ B @ A)
    assert u.get_unit(lora_matmul(X, B, A, alpha=2.0 * u.mV)) == u.mV


def test_lora_matmul_multiplies_three_units():
    y = lora_matmul(X * u.mV, B * u.siemens, A * u.ms, bias=jnp.ones(4) * u.coulomb)
    expected = (X @ B @ A) * (u.mV * u.siemens * u.ms) + 1.0 * u.coulomb
    assert u.math.allclose(y, expected)
