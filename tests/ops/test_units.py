import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import ops

X, W, B = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4)


def test_product_has_the_product_of_the_units():
    y = ops.matmul(X * u.mV, W * u.siemens, B * u.mA)
    assert u.math.allclose(y, (X @ W + 1) * u.mA)


def test_bias_is_converted_to_the_product_unit():
    y = ops.matmul(X * u.mV, W, B * u.volt)
    np.testing.assert_allclose(y.to_decimal(u.mV), X @ W + 1000)
    hook = ops.matmul(X * u.mV, W, B * u.volt, bias_fn=lambda b: b / 1000)
    np.testing.assert_allclose(hook.to_decimal(u.mV), X @ W + 1)


def test_dimensionless_result_is_a_bare_array():
    y = ops.matmul(X * u.mV, W / u.volt, B)
    assert isinstance(y, jax.Array)
    np.testing.assert_allclose(y, X @ W / 1000 + 1)
    assert isinstance(ops.matmul(X, W), jax.Array)


@pytest.mark.parametrize("bias", [B, B * u.ms])
def test_bias_of_another_dimension_is_refused(bias):
    with pytest.raises(u.UnitMismatchError, match=r"bias.*unit"):
        ops.matmul(X * u.mV, W, bias)


def test_every_operator_carries_units():
    assert u.get_unit(ops.grouped_matmul(jnp.ones((2, 3)) * u.mV, jnp.ones((2, 3, 4)))) == u.mV
    assert u.get_unit(ops.embedding(0, W * u.mV)) == u.mV
    assert u.get_unit(ops.element_wise(W * u.mV, jnp.exp)) == u.mV
    assert u.get_unit(ops.einsum("bi,io->bo", X * u.mV, W)) == u.mV
    assert u.get_unit(ops.conv(jnp.ones((1, 1, 3)), jnp.ones((1, 1, 3)) * u.mV)) == u.mV
    structure = u.sparse.CSR.fromdense(jnp.eye(3))
    assert u.get_unit(ops.sparse_matmul(X, jnp.ones(3) * u.mV, sparse_mat=structure)) == u.mV


def test_gradient_passes_the_door():
    def loss(w):
        return u.get_mantissa(ops.matmul(X * u.mV, w * u.siemens)).sum()

    np.testing.assert_allclose(jax.grad(loss)(W), jnp.full((3, 4), 2.0))


@pytest.mark.parametrize(
    "weight, text",
    [
        ([[1.0]], r"weight has type list, not an array(.|\n)*do: .*asarray\(weight\)"),
        (brainstate.ParamState(W), r"weight has type ParamState(.|\n)*do: .*weight\.value"),
        (None, "weight has type NoneType"),
    ],
)
def test_operand_that_is_no_array_is_refused(weight, text):
    with pytest.raises(TypeError, match=text):
        ops.matmul(X, weight)
