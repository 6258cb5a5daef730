"""What all layers share: sizes, initial values of a shape, axes before those of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from brainstate.nn import init

from .._errors import value_error
from ..ops._units import UnitArray as UnitArray

Size = int | Sequence[int]
Init = Callable[..., Any] | Any  # an initialiser, or a value

T = TypeVar("T")

ZERO = init.ZeroInit()
KAIMING = init.KaimingNormal()
XAVIER = init.XavierNormal()


def check_size(layer: Any, name: str, size: Any, one: bool = False) -> None:
    """Refuse what is no size, or not `one`; this is an argument of a layer."""
    numbers = size if isinstance(size, tuple | list) and not one else [size]
    if not (numbers and all(map(_is_size, numbers))) or (one and size < 1):
        size_is = "a positive integer" if one else "an integer, not negative, or a tuple of them"
        raise value_error(
            f"{type(layer).__name__}: {name} is {size!r}.",
            why=f"it is {size_is}.",
            do="pass integers: int(n), or n // 2 where a size is computed.",
        )


def _is_size(n: Any) -> bool:
    if isinstance(n, np.ndarray | jax.Array) and n.ndim == 0:
        n = n.dtype.type(n)
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and bool(n >= 0)


def _checked(name: str) -> Any:
    """The property of a brainstate module, with a check."""
    of_module: Any = getattr(brainstate.nn.Module, name)

    def assign(layer: Any, size: Any) -> None:
        check_size(layer, name, size)
        of_module.fset(layer, size)

    return of_module.setter(assign)


class Layer(brainstate.nn.Module):
    """A module with sizes; brainstate makes tuples of them."""

    in_size: Any = _checked("in_size")
    out_size: Any = _checked("out_size")

    @property
    def _kind(self) -> str:
        """What messages call it."""
        return type(self).__name__


def one_of(what: str, name: str, table: Mapping[str, T], do: str = "use one of these names.") -> T:
    """What a name stands for."""
    if name not in table:
        raise value_error(
            f"There is no {what} {name!r}.", why=f"the names are {', '.join(table)}.", do=do
        )
    return table[name]


def initial(value: Init, shape: tuple[int, ...], label: str = "the initial value") -> UnitArray:
    """An initialiser's array of this shape, or a value broadcast to it.

    Python numbers and integers get the precision of the environment, and a strong type: a weak one
    becomes strong by an update, and is compiled a second time.
    """
    array = constant(value, shape, label)
    weak = jnp.asarray(u.get_mantissa(array)).weak_type
    loose = weak or not jnp.issubdtype(array.dtype, jnp.inexact)
    if loose and not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(brainstate.environ.dftype())
    return array.astype(array.dtype)


def constant(value: Init, shape: tuple[int, ...], label: str) -> UnitArray:
    """The same, of whatever type it is: masks and signs may be boolean."""
    if isinstance(value, brainstate.State):
        value = value.value
    if value is None:
        raise value_error(
            f"{label} is None.",
            why="the layer has no form without it.",
            do=f"pass an initialiser such as brainstate.nn.init.KaimingNormal(), or an array "
            f"that broadcasts to {shape}.",
        )
    array = u.math.asarray(value(shape) if callable(value) else value)
    pairs = zip(array.shape[::-1], shape[::-1], strict=False)
    if array.ndim > len(shape) or any(a not in (1, b) for a, b in pairs):
        raise value_error(
            f"{label} has the shape {tuple(array.shape)}.",
            why=f"it must broadcast to {shape}.",
            do=f"give it the shape {shape}, or pass an initialiser.",
        )
    return u.math.broadcast_to(array, shape)


def batched(value: Init, shape: tuple[int, ...], batch_size: int | None) -> UnitArray:
    """The initial value of a state, with a leading batch axis if there is one."""
    return initial(value, shape if batch_size is None else (batch_size, *shape))


def over_leading(operator: Callable[[UnitArray], UnitArray], x: UnitArray, axes: int) -> UnitArray:
    """Apply an operator for one sample or a batch to x; all axes before its last `axes` are batch.

    Operators know one batch axis, so more of them are folded into one and unfolded again.
    """
    lead = tuple(x.shape[: max(x.ndim - axes, 0)])
    if len(lead) < 2:
        return operator(x)
    y = operator(x.reshape((prod(lead), *x.shape[len(lead) :])))
    return y.reshape((*lead, *y.shape[1:]))
