"""Dense layers: `y = x @ W + b`."""

from __future__ import annotations

from .._errors import value_error
from ._einsum_form import EinsumForm, biased_pair
from ._units import (
    AnyArray,
    Hook,
    Operand,
    UnitArray,
    bias_operand,
    bind,
    expect_axes,
    hooked,
    operand,
)

etp_mm, etp_mv = biased_pair("etp_mm", "etp_mv", EinsumForm.parse("i,io->o"))


def matmul(
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray | None = None,
    *,
    weight_fn: Hook = None,
    bias_fn: Hook = None,
) -> UnitArray:
    """Multiply by a trained matrix: `x @ weight_fn(weight) + bias_fn(bias)`.

    Args:
        x: input of shape (in,) or (batch, in).
        weight: matrix of shape (in, out).
        bias: optional vector of shape (out,), in the unit of the product.
        weight_fn: differentiable function of the weight without its unit, e.g. a mask.
        bias_fn: the same for the bias.

    Returns:
        The product, of shape (out,) or (batch, out).

    Raises:
        ValueError: if the shapes do not fit.
        saiunit.UnitMismatchError: if the bias has another unit than the product.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.zeros(4)).shape
        (2, 4)
    """
    op = "matmul"
    x_, w = operand(op, "x", x), hooked(op, "weight", weight, "weight_fn", weight_fn)
    check_product(op, x_, w)
    unit = x_.unit * w.unit
    b = bias_operand(op, bias, unit, bias_fn, w.shape[1:])
    return bind(etp_mv if x_.ndim == 1 else etp_mm, x_, w, bias=b, unit=unit)


def check_product(op: str, x: Operand, weight: Operand) -> None:
    """Refuse shapes that are not (in,) or (batch, in) times (in, out)."""
    why = "the input is (in,) or (batch, in), so that every trace has its batch."
    do = "reshape the leading axes into one, or use braintrace.nn.Linear, which does."
    expect_axes(op, x, (1, 2), why=why, do=do)
    do = "reshape it to two axes, or use braintrace.einsum."
    expect_axes(op, weight, (2,), why="the weight is a matrix (in, out).", do=do)
    if x.shape[-1] != weight.shape[0]:
        raise value_error(
            f"{op}: {x} does not fit {weight}.",
            why=f"the last axis of x, {x.shape[-1]}, meets the first axis of the weight, "
            f"{weight.shape[0]}.",
            do="make these two sizes equal.",
        )
