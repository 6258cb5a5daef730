"""Sets of source indices, one per element of a value: an integer array with one more axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from ..program import Var, is_inexact, is_traced, pattern

NONE = -1
MOST_SOURCES = 1 << 24  # of the sets of one variable; larger ones count as mixing,
NARROW = 16  # unless it is the elements that are many, not the sources of one
TOO_MANY = "joins too many elements"

Sources = np.ndarray | None
Result = list[np.ndarray] | str


@dataclass(frozen=True, eq=False, slots=True)
class Nonzero:
    """A fact about a floating value without a tangent: where it can be other than zero."""

    where: np.ndarray


Fact = np.ndarray | Nonzero | None  # of an integer its value, or where a floating one is not zero
Facts = list[Fact]


def nonzero(fact: Fact) -> np.ndarray | None:
    """Where a value can be other than zero, by a fact about it; None: everywhere."""
    if fact is None:
        return None
    return fact.where if isinstance(fact, Nonzero) else np.asarray(fact) != 0


def facts_of(variables: Sequence[Var], values: Sequence[Any]) -> dict[Var, Fact]:
    """What an analysis may know of constants: integers, and where floating ones are not zero."""
    out: dict[Var, Fact] = {}
    for var, value in zip(variables, values, strict=False):
        if is_inexact(var.dtype):
            if (where := pattern(value)) is not None:
                out[var] = Nonzero(where)
        elif not is_traced(value) and not jax.dtypes.issubdtype(var.dtype, jax.dtypes.extended):
            out[var] = np.asarray(value)
    return out


class NotAlike(Exception):
    """Samples of a batch are not alike, or not apart: all of them have to be analysed."""


def few_of(fact: Fact, axis: int, few: int) -> Fact:
    """What is known of a few samples of a value; it must be the same of all."""
    if fact is None:
        return None
    array = fact.where if isinstance(fact, Nonzero) else np.asarray(fact)
    one = array.take([0], axis)
    if (array != one).any():
        raise NotAlike
    part = np.repeat(one, few, axis)
    return Nonzero(part) if isinstance(fact, Nonzero) else part


def empty(shape: Sequence[int]) -> np.ndarray:
    """Empty sets."""
    return np.full((*shape, 0), NONE)


def too_many(shape: Sequence[int], width: int) -> bool:
    """Whether sets of so many sources for every element are too large to follow."""
    return width > NARROW and prod(shape) * width > MOST_SOURCES


def distinct(numbers: np.ndarray, end: int) -> np.ndarray:
    """The numbers that occur, in order; all are below `end`. Sorting them takes longer."""
    if end > 64 * numbers.size:
        return np.unique(numbers)
    seen = np.zeros(end, bool)
    seen[numbers] = True
    return np.flatnonzero(seen)


def varies(group: np.ndarray, value: np.ndarray, n_groups: int) -> np.ndarray:
    """Per group, whether its entries have different values."""
    one = np.zeros(n_groups, value.dtype)
    one[group] = value
    out = np.zeros(n_groups, bool)
    out[group[one[group] != value]] = True
    return out


def union(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Sets of sources per element: sorted, without doubles, as narrow as possible."""
    first = arrays[0]
    if all(a is first or (a.shape == first.shape and np.array_equal(a, first)) for a in arrays):
        if first.shape[-1] <= 1:
            return first
    both = np.sort(np.concatenate(arrays, axis=-1), axis=-1)[..., ::-1]
    if both.shape[-1] > 1:
        double = np.concatenate(
            [np.zeros((*both.shape[:-1], 1), bool), both[..., 1:] == both[..., :-1]], axis=-1
        )
        if double.any():
            both = np.sort(np.where(double, NONE, both), axis=-1)[..., ::-1]
    width = int((both != NONE).sum(-1).max(initial=0))
    return both[..., :width]


def joined(array: np.ndarray, axes: Sequence[int], keep: bool = False) -> np.ndarray:
    """One set for all elements along the axes; `keep` leaves them with size one."""
    axes = sorted(a % (array.ndim - 1) for a in axes)
    rest = [a for a in range(array.ndim - 1) if a not in axes]
    moved = array.transpose([*rest, *axes, array.ndim - 1])
    head = moved.shape[: len(rest)]
    width = prod(moved.shape[len(rest) :])
    out = union([moved.reshape((*head, width))])
    if keep:
        out = out.reshape(
            (*(1 if a in axes else array.shape[a] for a in range(array.ndim - 1)), out.shape[-1])
        )
    return out


def padded(a: np.ndarray, config: Any) -> np.ndarray:
    """An array of indices with NONE before, after and between its elements."""
    for axis, (low, high, inner) in enumerate(config):
        n = a.shape[axis]
        shape = list(a.shape)
        shape[axis] = max(n + (n - 1) * inner, 0) if n else 0
        wide = np.full(shape, NONE)
        wide[(slice(None),) * axis + (slice(None, None, inner + 1),)] = a
        widths = [(0, 0)] * a.ndim
        widths[axis] = (max(low, 0), max(high, 0))
        wide = np.pad(wide, widths, constant_values=NONE)
        stop = wide.shape[axis] - max(-high, 0)
        a = wide[(slice(None),) * axis + (slice(max(-low, 0), stop),)]
    return a


def rearranged(array: np.ndarray, move: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Sets moved as `move` moves the numbers of their elements; NONE is the empty set."""
    return combined([array], [array.shape[:-1]], move)


def combined(
    arrays: Sequence[Sources], shapes: Sequence[tuple[int, ...]], move: Callable[..., np.ndarray]
) -> np.ndarray:
    """Sets of several values of these shapes, moved as `move` moves the numbers of elements."""
    width = max(a.shape[-1] for a in arrays if a is not None)
    ends = np.cumsum([prod(shape) for shape in shapes])
    rows = np.full((int(ends[-1]) + 1, width), NONE)  # the last is what NONE stands for
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    for array, own in zip(arrays, numbers, strict=True):
        if array is not None:
            rows[own, : array.shape[-1]] = array.reshape(len(own), array.shape[-1])
    return rows[move(*(own.reshape(s) for own, s in zip(numbers, shapes, strict=True)))]


def windows(
    offsets: Iterable[Sequence[int]], dilation: Sequence[int], strides: Sequence[int], shape: Any
) -> Iterator[tuple[slice, ...]]:
    """Per offset in a window, the places where the windows of all results have it."""
    for offset in offsets:
        sizes = zip(offset, dilation, shape, strides, strict=True)
        yield tuple(slice(o * d, o * d + (k - 1) * s + 1, s) for o, d, k, s in sizes)
