"""Places in arrays as affine functions of the variables of loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ._nodes import Axis, Shape


@dataclass(frozen=True, slots=True)
class Index:
    """`start` + the sum of step × loop variable; `terms` are pairs (variable, step), sorted."""

    start: int = 0
    terms: tuple[tuple[int, int], ...] = ()

    def step(self, variable: int) -> int:
        return dict(self.terms).get(variable, 0)


Place = tuple[Index, ...]  # one for each axis of an array


def combined(start: int, parts: Sequence[tuple[int, Index]]) -> Index:
    """`start` + the sum of factor × index."""
    steps: dict[int, int] = {}
    for factor, index in parts:
        start += factor * index.start
        for variable, step in index.terms:
            steps[variable] = steps.get(variable, 0) + factor * step
    return Index(start, tuple(sorted((v, s) for v, s in steps.items() if s)))


def strides(shape: Shape) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def offset(place: Place, shape: Shape) -> Index:
    """Where the element at a place lies in memory."""
    return combined(0, list(zip(strides(shape), place, strict=True)))


def viewed(axes: Sequence[Axis], place: Place) -> Place:
    """The place in the operand of a view."""
    return tuple(combined(a.start, list(zip(a.steps, place, strict=True))) for a in axes)


def own_place(shape: Shape, first: int = 0) -> tuple[Place, tuple[int, ...]]:
    """A place that runs over all elements, a loop for each axis of more than one; their extents."""
    place: list[Index] = []
    extents: list[int] = []
    for n in shape:
        if n == 1:
            place.append(Index())
        else:
            place.append(Index(0, ((first + len(extents), 1),)))
            extents.append(n)
    return tuple(place), tuple(extents)


def runs_once(index: Index, extents: Sequence[int], count: int) -> bool:
    """Whether an offset takes every value below `count` once while the loops run."""
    size = 1
    if index.start or len(index.terms) != len(extents):
        return False
    for variable, step in sorted(index.terms, key=lambda term: term[1]):
        if step != size:
            return False
        size *= extents[variable]
    return size == count


def place_of(index: Index, shape: Shape, extents: Sequence[int]) -> Place | None:
    """The place of an offset, if each loop variable runs along one axis; 4 i + j is (i, j).

    None if an axis would have to be found by division.
    """
    parts: list[list[tuple[int, Index]]] = [[] for _ in shape]
    starts, rest = [0] * len(shape), index.start
    for axis, stride in enumerate(strides(shape)):
        starts[axis], rest = divmod(rest, stride)
    room = [n - 1 - start for n, start in zip(shape, starts, strict=True)]
    for variable, step in index.terms:
        for axis, stride in enumerate(strides(shape)):
            if 0 < stride <= step and step % stride == 0 and step // stride < shape[axis]:
                break
        else:
            return None
        factor = step // stride
        room[axis] -= factor * (extents[variable] - 1)
        parts[axis].append((factor, Index(0, ((variable, 1),))))
    if any(left < 0 for left in room):
        return None
    return tuple(combined(s, p) for s, p in zip(starts, parts, strict=True))
