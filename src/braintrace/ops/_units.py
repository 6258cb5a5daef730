"""The door of the operators: units are split off here, and bare numbers reach the primitives.

Hooks are applied here too, to the mantissa, so that a primitive only ever sees the operand it is
linear in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._errors import message, type_error, value_error
from .._jaxpr import is_inexact
from ._operator import ETPPrimitive

Array = jax.Array
Hook = Callable[[Array], Array] | None

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


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
    """Split an argument into its numbers and its unit."""
    unit = u.UNITLESS
    if type(value).__module__.split(".")[0] == "brainevent" and hasattr(value, "value"):
        value = value.value  # an array with a promise about its entries
    if isinstance(value, u.Quantity):
        value, unit = u.split_mantissa_unit(value)
    return Operand(label, _array(op, label, value), unit)


def _array(op: str, label: str, value: Any) -> Array:
    if isinstance(value, _NUMBERS):
        return jnp.asarray(value)
    do = f"pass {label}.value" if hasattr(value, "value") else f"pass jax.numpy.asarray({label})"
    raise type_error(
        f"{op}: {label} is a {type(value).__name__}, not an array.",
        why="an operator takes JAX or NumPy arrays, with or without a unit.",
        do=f"{do}.",
    )


def hooked(op: str, label: str, value: Any, hook: str, fn: Hook) -> Operand:
    """Split an argument and apply the user's hook to its numbers."""
    raw = operand(op, label, value)
    return raw if fn is None else _apply(op, raw, hook, fn)


def _apply(op: str, raw: Operand, hook: str, fn: Callable[[Array], Array]) -> Operand:
    label = f"{hook}({raw.label})"
    return Operand(label, _array(op, label, fn(raw.value)), raw.unit)


def bias_operand(op: str, bias: Any, unit: u.Unit, fn: Hook) -> Operand | None:
    """Bring a bias to the unit of the product, then apply its hook; None stays None."""
    if bias is None:
        return None
    raw = operand(op, "bias", bias)
    if not raw.unit.has_same_dim(unit):
        text = message(
            f"{op}: bias cannot be added to the product, their units differ:",
            why="the bias is converted to the unit of x times the weights before it is added.",
            do="give the bias that unit.",
        )
        raise u.UnitMismatchError(text, raw.unit, unit)
    if raw.unit != unit:
        raw = Operand("bias", u.Quantity(raw.value, unit=raw.unit).in_unit(unit).mantissa, unit)
    return raw if fn is None else _apply(op, raw, "bias_fn", fn)


def expect_shape(op: str, bias: Operand | None, shape: tuple[int, ...]) -> None:
    """Refuse a bias of another shape."""
    if bias is not None and bias.shape != shape:
        raise value_error(
            f"{op}: {bias} does not have the shape {shape}.",
            why="the bias has one number for every output unit.",
            do=f"give it the shape {shape}.",
        )


def bind(
    primitive: ETPPrimitive,
    x: Operand,
    *weights: Operand,
    bias: Operand | None,
    unit: u.Unit,
    **static: Any,
) -> Any:
    """Apply a primitive with an optional bias to bare numbers; the result carries `unit`."""
    values = [floating(x, weights[0]), *(w.value for w in weights)]
    if bias is not None:
        values.append(bias.value)
    return attach(primitive.bind(*values, has_bias=bias is not None, **static), unit)


def floating(x: Operand, weight: Operand) -> Array:
    """The numbers of the input; spikes given as integers or booleans take the weight's type."""
    return x.value if is_inexact(x.value.dtype) else x.value.astype(weight.value.dtype)


def attach(y: Array, unit: u.Unit) -> Any:
    """Give the result its unit; a dimensionless result is a bare array."""
    return y if unit == u.UNITLESS else u.maybe_decimal(u.Quantity(y, unit=unit))
