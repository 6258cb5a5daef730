"""Grouped dense layers: one matrix per group of units, `y[g] = x[g] @ W[g] + b[g]`."""

from __future__ import annotations

from .._errors import value_error
from ._einsum_form import EinsumForm, biased_pair
from ._units import AnyArray, Hook, UnitArray, bias_operand, bind, expect_axes, hooked, operand

etp_gmm, etp_gmv = biased_pair("etp_gmm", "etp_gmv", EinsumForm.parse("gk,gkn->gn"))


def grouped_matmul(
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray | None = None,
    *,
    weight_fn: Hook = None,
    bias_fn: Hook = None,
) -> UnitArray:
    """Multiply every group of units by its own trained matrix.

    Args:
        x: input of shape (groups, in) or (batch, groups, in).
        weight: matrices of shape (groups, in, out).
        bias: optional, of shape (groups, out), in the unit of the product.
        weight_fn: differentiable function of the weight without its unit.
        bias_fn: the same for the bias.

    Returns:
        The products, of shape (groups, out) or (batch, groups, out).

    Raises:
        ValueError: if the shapes do not fit.
        saiunit.UnitMismatchError: if the bias has another unit than the product.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.grouped_matmul(jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4))).shape
        (5, 2, 4)
    """
    op = "grouped_matmul"
    x_, w = operand(op, "x", x), hooked(op, "weight", weight, "weight_fn", weight_fn)
    why = "the input is (groups, in) or (batch, groups, in)."
    expect_axes(op, x_, (2, 3), why=why, do="reshape the leading axes into one.")
    why = "the weight is one matrix per group, (groups, in, out)."
    do = "reshape it to three axes, or use braintrace.matmul for one matrix."
    expect_axes(op, w, (3,), why=why, do=do)
    if x_.shape[-2:] != w.shape[:2]:
        raise value_error(
            f"{op}: {x_} does not fit {w}.",
            why=f"the last two axes of x, {x_.shape[-2:]}, meet the first two of the weight, "
            f"{w.shape[:2]}.",
            do="make groups and inputs agree.",
        )
    unit = x_.unit * w.unit
    b = bias_operand(op, bias, unit, bias_fn, (w.shape[0], w.shape[2]))
    return bind(etp_gmv if x_.ndim == 2 else etp_gmm, x_, w, bias=b, unit=unit)
