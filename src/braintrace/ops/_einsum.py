"""Any contraction of a batched input with one weight."""

from __future__ import annotations

from jax import Array

from .._errors import value_error
from ._einsum_form import EinsumForm
from ._operator import Rules, Shapes, Weights, register_primitive
from ._twin import folds
from ._units import AnyArray, Hook, Operand, UnitArray, attach, floating, hooked, operand


def _contract(x: Array, weight: Array, *, equation: str) -> Array:
    return EinsumForm.parse(equation).apply(x, weight)


def _features(x: Array, shapes: Shapes, *, equation: str) -> Weights:
    return {"weight": EinsumForm.parse(equation).features(x)}


etp_einsum = register_primitive(
    "etp_einsum", _contract, batched=True, rules=Rules(features=_features)
)
etp_einsum.twin = folds(etp_einsum)


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
    y = etp_einsum.bind(floating(x_, w), w.value, equation=f"{form.x},{form.w}->{form.y}")
    return attach(y, x_.unit * w.unit)


def _refuse(equation: str, why: str, do: str) -> ValueError:
    return value_error(f"einsum: cannot use the equation {equation!r}.", why=why, do=do)


def _parse(equation: str) -> EinsumForm:
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
    return EinsumForm(x, w, y)


def _check_sizes(equation: str, form: EinsumForm, x: Operand, w: Operand) -> None:
    for spec, o in ((form.x, x), (form.w, w)):
        if len(spec) != o.ndim:
            raise _refuse(equation, f"{o} has {o.ndim} axes, not {spec!r}.", "name every axis.")
    sizes = dict(zip(form.x, x.shape, strict=True))
    if bad := [l for l, n in zip(form.w, w.shape, strict=True) if sizes.get(l, n) != n]:
        raise _refuse(equation, f"{x} and {w} disagree on {bad}.", "make these sizes equal.")
