"""Products with a trained weight: `y = x @ W + b`, the same per group, and any contraction."""

from __future__ import annotations

from .._errors import value_error
from ._contraction import Contraction, etp_einsum, etp_gmm, etp_gmv, etp_mm, etp_mv
from ._operator import ETPPrimitive
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


def _product(
    primitive: ETPPrimitive,
    equation: str,
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
) -> UnitArray:
    if bias is None:
        equation = str(Contraction.parse(equation).without_bias())
    return bind(primitive, x, weight, bias=bias, unit=x.unit * weight.unit, equation=equation)


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
    b = bias_operand(op, bias, x_.unit * w.unit, bias_fn, w.shape[1:])
    if x_.ndim == 1:
        return _product(etp_mv, "i,io,o->o", x_, w, b)
    return _product(etp_mm, "bi,io,o->bo", x_, w, b)


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
    b = bias_operand(op, bias, x_.unit * w.unit, bias_fn, (w.shape[0], w.shape[2]))
    if x_.ndim == 2:
        return _product(etp_gmv, "gk,gkn,gn->gn", x_, w, b)
    return _product(etp_gmm, "bgk,gkn,gn->bgn", x_, w, b)


def einsum(equation: str, x: AnyArray, weight: AnyArray, *, weight_fn: Hook = None) -> UnitArray:
    """Contract a batched input with a trained weight of any rank.

    Args:
        equation: `'x,w->y'` in lowercase letters; the first letter of x and of y is the batch,
            which the weight does not have.
        x: batched input.
        weight: array with the axes that the equation gives it.
        weight_fn: differentiable function of the weight without its unit.

    Returns:
        The contraction, in the product of the two units.

    Raises:
        ValueError: if the equation is not of this form or does not fit the shapes.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.einsum('bti,tio->bto', jnp.ones((2, 3, 4)), jnp.ones((3, 4, 5))).shape
        (2, 3, 5)
    """
    op = "einsum"
    x_, w = operand(op, "x", x), hooked(op, "weight", weight, "weight_fn", weight_fn)
    form = _parse(equation)
    _check_sizes(equation, form, x_, w)
    return _product(etp_einsum, str(form), x_, w)


def _refuse(equation: str, why: str, do: str) -> ValueError:
    return value_error(f"einsum: cannot use the equation {equation!r}.", why=why, do=do)


def _parse(equation: str) -> Contraction:
    text = equation.replace(" ", "")
    if text.count("->") != 1:
        raise _refuse(equation, "it has no output.", "write the output: 'bi,io->bo'.")
    operands, y = text.split("->")
    if operands.count(",") != 1:
        raise _refuse(equation, "it must have two operands.", "write 'x,w->y'.")
    x, w = operands.split(",")
    for spec in (x, w, y):
        if not all("a" <= l <= "z" for l in spec):
            raise _refuse(equation, f"{spec!r} is not made of a to z.", "name every axis.")
        if len(set(spec)) != len(spec):
            raise _refuse(
                equation, f"a letter repeats in {spec!r}.", "give axes their own letters."
            )
    if not x or not y or x[0] != y[0] or x[0] in w:
        raise _refuse(
            equation,
            "x and y must begin with the same batch letter, which the weight does not have.",
            "put the batch axis first: 'bi,io->bo'.",
        )
    if lost := [l for l in y if l not in x and l not in w]:
        raise _refuse(equation, f"{lost} is in no input.", "use letters of x and w in the output.")
    if lost := [l for l in w if l not in x and l not in y]:
        raise _refuse(
            equation, f"{lost} is in the weight alone.", "sum the weight over it beforehand."
        )
    return Contraction(x, w, y)


def _check_sizes(equation: str, form: Contraction, x: Operand, w: Operand) -> None:
    for spec, o in ((form.x, x), (form.w, w)):
        if len(spec) != o.ndim:
            raise _refuse(equation, f"{o} has {o.ndim} axes, not {spec!r}.", "name every axis.")
    sizes = dict(zip(form.x, x.shape, strict=True))
    if bad := [l for l, n in zip(form.w, w.shape, strict=True) if sizes.get(l, n) != n]:
        raise _refuse(equation, f"{x} and {w} disagree on {bad}.", "make these sizes equal.")
