"""The entry point of the operators: units are split off, primitives get plain arrays.

Hooks are applied here too, to the mantissa, so that a primitive only ever sees the operand it is
linear in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from jax import Array
from jax.typing import ArrayLike

from .._errors import message, type_error, value_error
from ..program import is_inexact
from ._operator import ETPPrimitive

UnitArray: TypeAlias = jax.Array | u.Quantity  # an array, with or without a unit
AnyArray: TypeAlias = ArrayLike | u.Quantity  # of JAX, NumPy or Python
Hook = Callable[[Array], Array] | None

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument of an operator; `label` is how messages call it."""

    label: str
    value: Array
    unit: u.Unit = u.UNITLESS

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        return len(self.value.shape)

    def __str__(self) -> str:
        return f"{self.label} {self.shape}"


def operand(op: str, label: str, value: Any) -> Operand:
    """Split an argument into an array and its unit."""
    unit = u.UNITLESS
    if type(value).__module__.split(".")[0] == "brainevent" and hasattr(value, "value"):
        value = value.value  # an array with a promise about its entries
    if isinstance(value, u.Quantity):
        value, unit = u.split_mantissa_unit(value)
    return Operand(label, _array(op, label, value), unit)


def _array(op: str, label: str, value: object) -> Array:
    if isinstance(value, _ARRAYS):
        return jnp.asarray(value)
    do = f"pass {label}.value" if hasattr(value, "value") else f"pass jax.numpy.asarray({label})"
    raise type_error(
        f"{op}: {label} has type {type(value).__name__}, not an array.",
        why="an operator takes JAX or NumPy arrays, with or without a unit.",
        do=f"{do}.",
    )


def hooked(op: str, label: str, value: AnyArray, hook: str, fn: Hook) -> Operand:
    """Split an argument and apply the user's hook to its array."""
    raw = operand(op, label, value)
    return raw if fn is None else _apply(op, raw, hook, fn)


def _apply(op: str, raw: Operand, hook: str, fn: Callable[[Array], Array]) -> Operand:
    label = f"{hook}({raw.label})"
    return Operand(label, _array(op, label, fn(raw.value)), raw.unit)


def expect_axes(op: str, operand: Operand, ranks: tuple[int, ...], *, why: str, do: str) -> None:
    """Refuse an operand with another number of axes."""
    if operand.ndim not in ranks:
        raise value_error(f"{op}: {operand} has {operand.ndim} axes.", why=why, do=do)


def bias_operand(
    op: str,
    bias: AnyArray | None,
    unit: u.Unit,
    fn: Hook,
    shape: tuple[int, ...] | None = None,
) -> Operand | None:
    """Bring a bias to the unit of the product, then apply its hook; refuse another shape.

    None stays None.
    """
    if bias is None:
        return None
    raw = operand(op, "bias", bias)
    if not raw.unit.has_same_dim(unit):
        text = message(
            f"{op}: the bias has another unit than the product.",
            why="the bias is converted to the unit of x times the weights before it is added",
            do="give the bias that unit, or leave it out",
        )
        raise u.UnitMismatchError(text, raw.unit, unit)
    if raw.unit != unit:
        raw = Operand("bias", u.Quantity(raw.value, unit=raw.unit).in_unit(unit).mantissa, unit)
    out = raw if fn is None else _apply(op, raw, "bias_fn", fn)
    if shape is not None and out.shape != shape:
        raise value_error(
            f"{op}: {out} does not have the shape {shape}.",
            why="the bias has one number for every output unit.",
            do=f"give it the shape {shape}.",
        )
    return out


def bind(
    primitive: ETPPrimitive,
    x: Operand,
    *weights: Operand,
    bias: Operand | None,
    unit: u.Unit,
    **static: object,
) -> UnitArray:
    """Apply a primitive with an optional bias to plain arrays; the result has `unit`."""
    values = [floating(x, weights[0]), *(w.value for w in weights)]
    if bias is not None:
        values.append(bias.value)
    return attach(primitive.call(*values, **static), unit)


def floating(x: Operand, weight: Operand) -> Array:
    """The array of the input; spikes as integers or booleans take the weight's type."""
    return x.value if is_inexact(x.value.dtype) else x.value.astype(weight.value.dtype)


def attach(y: Array, unit: u.Unit) -> UnitArray:
    """Give the result its unit; a dimensionless result is a plain array."""
    return y if unit == u.UNITLESS else u.maybe_decimal(u.Quantity(y, unit=unit))
