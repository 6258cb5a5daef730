"""Trace slots: the state elements whose dependence on an operator output is followed.

The destinations of an output element are the state elements it reaches directly and, from there,
along the kept Jacobian. They fall into *lanes* that never exchange anything (the rows of a batch
that share one element, say), each with a fixed number of slots. Numbers move between states and
slots through `Pick`s: static index arrays that are recognised where they are a whole component.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from ._influence import NONE
from ._pattern import Pattern, TapPattern

Array = jax.Array


@dataclass(frozen=True, eq=False, slots=True)
class Pick:
    """Where each slot's number comes from: components' arrays to an array of `shape`.

    `component` is set when the slots are exactly that component in order; otherwise `index` are
    element numbers through all components, NONE reads zero.
    """

    shape: tuple[int, ...]
    component: int | None
    index: np.ndarray | None
    sizes: tuple[int, ...]

    def __call__(self, arrays: Sequence[Array | None], dtype) -> Array:
        """Read from one array per component (None is zero)."""
        if self.component is not None:
            found = arrays[self.component]
            if found is None:
                return jnp.zeros(self.shape, dtype)
            return found.reshape(self.shape).astype(dtype)
        return self._take(arrays, dtype)

    def _take(self, arrays: Sequence[Array | None], dtype) -> Array:
        assert self.index is not None
        if all(a is None for a in arrays):
            return jnp.zeros(self.shape, dtype)
        flat = [
            jnp.zeros(n, dtype) if a is None else a.reshape(-1).astype(dtype)
            for a, n in zip(arrays, self.sizes, strict=True)
        ]
        values = jnp.concatenate(flat)[np.maximum(self.index, 0)]
        return jnp.where(self.index == NONE, jnp.zeros((), dtype), values)


def pick(index: np.ndarray, offsets: np.ndarray) -> Pick:
    """The Pick of an array of element numbers."""
    flat = index.reshape(-1)
    sizes = tuple(int(n) for n in np.diff(offsets))
    for c, n in enumerate(sizes):
        if n == len(flat) and n and np.array_equal(flat, np.arange(offsets[c], offsets[c + 1])):
            return Pick(index.shape, c, None, sizes)
    return Pick(index.shape, None, index, sizes)


@dataclass(frozen=True, eq=False, slots=True)
class Slots:
    """The slots of one operator: (*lanes, *y) positions with `width` slots each.

    `lanes` is () for one lane and (M,) for several; `dtype` is the real type of D and f. Per slot
    k, `at[k]` reads state-shaped numbers. `transition[k][j]` is (colour, Pick) pairs whose sum over
    colours is D from slot j to slot k; `arrival[k]` the same per part of y and colour for f.
    """

    lanes: tuple[int, ...]
    y_shape: tuple[int, ...]
    width: int
    destination: np.ndarray
    dtype: Any
    at: tuple[Pick, ...]
    transition: tuple[tuple[tuple[tuple[int, Pick], ...], ...], ...]
    arrival: tuple[tuple[tuple[int, int, Pick], ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lanes + self.y_shape


def slots(
    tap: TapPattern, pattern: Pattern, offsets: np.ndarray, y_shape: tuple[int, ...], dtype: Any
) -> Slots | None:
    """Find the slots of an operator; None when no output element reaches a state."""
    if not len(tap.edges):
        return None
    n = int(offsets[-1])
    n_y = int(np.prod(y_shape, dtype=np.int64))
    step = _matrix(pattern.kept, (n, n))
    reached = _matrix(tap.edges, (n, n_y))
    while True:
        more = ((step @ reached) + reached).astype(bool)
        if more.nnz == reached.nnz:
            break
        reached = more
    _, label = csgraph.connected_components(step, directed=False)

    element, y = reached.nonzero()
    order = np.lexsort((element, label[element], y))
    element, y = element[order], y[order]
    lane, slot = _lanes(y, label[element])
    n_lanes, width = int(lane.max()) + 1, int(slot.max()) + 1
    destination = np.full((n_lanes, n_y, width), NONE)
    destination[lane, y, slot] = element

    lanes = () if n_lanes == 1 else (n_lanes,)
    shape = lanes + y_shape
    at = tuple(pick(destination[..., k].reshape(shape), offsets) for k in range(width))
    transition = tuple(
        tuple(
            _transition(destination[..., k], destination[..., j], step, pattern, offsets, shape)
            for j in range(width)
        )
        for k in range(width)
    )
    arrival = tuple(_arrival(destination[..., k], tap, offsets, shape) for k in range(width))
    return Slots(lanes, y_shape, width, destination, dtype, at, transition, arrival)


def _matrix(pairs: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    ones = np.ones(len(pairs), bool)
    return sparse.csr_matrix((ones, (pairs[:, 0], pairs[:, 1])), shape=shape, dtype=bool)


def _lanes(y: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lane and slot of each (y, label)-sorted entry."""
    new_y = np.r_[True, y[1:] != y[:-1]]
    new_lane = new_y | np.r_[True, label[1:] != label[:-1]]
    group = np.cumsum(new_lane) - 1
    first_of_lane = np.flatnonzero(new_lane)
    first_group = group[np.flatnonzero(new_y)][np.cumsum(new_y) - 1]
    return group - first_group, np.arange(len(y)) - first_of_lane[group]


def _transition(to, source, step, pattern: Pattern, offsets, shape) -> tuple[tuple[int, Pick], ...]:
    present = (to != NONE) & (source != NONE)
    edge = np.zeros(to.shape, bool)
    edge[present] = np.asarray(step[to[present], source[present]]).reshape(-1)
    colours = pattern.colours[np.maximum(source, 0)]
    out = []
    for c in np.unique(colours[edge]):
        index = np.where(edge & (colours == c), to, NONE)
        out.append((int(c), pick(index.reshape(shape), offsets)))
    return tuple(out)


def _arrival(to, tap: TapPattern, offsets, shape) -> tuple[tuple[int, int, Pick], ...]:
    out = []
    y = np.broadcast_to(np.arange(to.shape[-1]), to.shape)
    for part, (colours, count) in enumerate(zip(tap.colours, tap.n_colours, strict=True)):
        pairs = tap.edges[tap.parts == part]
        edges = _matrix(pairs, (int(offsets[-1]), to.shape[-1]))
        edge = (to != NONE) & np.asarray(edges[np.maximum(to, 0).ravel(), y.ravel()]).reshape(
            to.shape
        )
        for c in range(count):
            here = edge & (colours[y] == c)
            if here.any():
                index = np.where(here, to, NONE)
                out.append((part, c, pick(index.reshape(shape), offsets)))
    return tuple(out)
