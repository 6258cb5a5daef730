"""`vmap` over the input alone is a batch: the same operator with one more, or a longer, batch axis.

So a weight that all mapped calls share stays one weight of one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax.numpy as jnp
from jax import Array

from ..program import DerivedPrimitive, Params

Primitive = TypeVar("Primitive", bound=DerivedPrimitive)
Twin = Callable[[Sequence[Array], tuple[int | None, ...], Params], Array | None]

_parts: ContextVar[int] = ContextVar("parts that units are in, on a mesh", default=0)


@contextmanager
def on_mesh(parts: int) -> Iterator[None]:
    """Write programs for a mesh, units in so many parts; for none, if that is 0.

    Mapped axes then stay apart from a batch axis: joined to one that is split over devices, they
    would have to be collected from all of them. Loops over synapses take some of every part.
    """
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)


def unit_parts() -> int:
    """How many parts units and synapses are in; 0 where there is no mesh."""
    return _parts.get()


def _input_only(axes: tuple[int | None, ...]) -> bool:
    return axes[0] is not None and all(a is None for a in axes[1:])


def twins(batched: Primitive, single: Primitive) -> tuple[Primitive, Primitive]:
    """Set the twins of an operator with a batch axis and of the same one without."""
    batched.twin, single.twin = folds(batched), becomes(batched)
    return batched, single


def becomes(batched: DerivedPrimitive) -> Twin:
    """For an operator without batch: the mapped axis is the batch axis of `batched`."""

    def twin(operands, axes, params):
        if not _input_only(axes):
            return None
        x, *weights = operands
        return batched.bind(jnp.moveaxis(x, axes[0], 0), *weights, **params)

    return twin


def folds(
    primitive: DerivedPrimitive,
    batch_axes: Callable[[Sequence[Array], Params], tuple[int, int] | None] | None = None,
) -> Twin:
    """For an operator with batch: the mapped axis joins the batch axis and leaves it again.

    `batch_axes(operands, params)` gives the batch axis of x and of y (default 0, 0), or None
    where the batch may not grow.
    """

    def twin(operands, axes, params):
        places = (0, 0) if batch_axes is None else batch_axes(operands, params)
        if not _input_only(axes) or places is None or unit_parts():
            return None
        at_x, at_y = places
        x, *weights = operands
        x = jnp.moveaxis(x, axes[0], at_x)
        sizes = x.shape[at_x : at_x + 2]
        x = x.reshape((*x.shape[:at_x], sizes[0] * sizes[1], *x.shape[at_x + 2 :]))
        y = primitive.bind(x, *weights, **params)
        y = y.reshape((*y.shape[:at_y], *sizes, *y.shape[at_y + 1 :]))
        return jnp.moveaxis(y, at_y, 0)

    return twin
