import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.ops import einsum

X, W = jnp.ones((2, 3)), jnp.ones((3, 4))


@pytest.mark.parametrize(
    "equation, text",
    [
        ("bi,io", "no output"),
        ("bi,io,oj->bj", "two operands"),
        ("bi->b", "two operands"),
        ("...i,io->...o", "not made of a to z"),
        ("Bi,io->Bo", "not made of a to z"),
        ("bii,io->bo", "repeats in 'bii'"),
        ("bi,io->ob", "same batch letter"),
        ("bi,bo->bo", "same batch letter"),
        ("bi,io->boz", r"\['z'\] is in no input"),
        ("bi,ik->b", r"\['k'\] is in the weight alone"),
        ("bti,io->bto", r"x \(2, 3\) has 2 axes, not 'bti'"),
        ("bi,oi->bo", r"disagree on \['i'\]"),
    ],
)
def test_einsum_refuses_equations_it_cannot_trace(equation, text):
    with pytest.raises(ValueError, match=rf"cannot use the equation (.|\n)*{text}"):
        einsum(equation, X, W)


def test_einsum_ignores_spaces():
    np.testing.assert_allclose(einsum(" b i, i o -> b o ", X, W), X @ W)
