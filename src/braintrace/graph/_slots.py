"""Trace slots: the state elements whose dependence on an operator output is followed.

The destinations of an output element are the state elements it reaches directly and, from there,
along the kept Jacobian. They fall into *lanes* that never exchange anything (the rows of a batch
that share one element, say), each with a fixed number of slots. Values move between states and
slots through `Pick`s: static index arrays that are recognised where they are a whole component.

Two units with a delay, `h' = y` and `d' = h`; h is state elements 0 and 1, d elements 2 and 3:

    kept Jacobian   (2, 0) (3, 1)          d reads h at its own position
    destination     [[0, 2], [1, 3]]       of y0: h0 directly, d0 a step later; of y1: h1, d1
    at              Pick(h), Pick(d)       slot 0 of all y is the whole of h, slot 1 that of d
    D per y         [[0, 0], [∂d'/∂h, 0]]  from slot 0 to slot 1
    f per y         [∂h'/∂y, 0]            arrives in slot 0

If y has one element that both units of a batch read, its destinations 0 and 1 never meet: two lanes
of one slot each, destination [[[0]], [[1]]].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import sparse
from scipy.sparse import csgraph

from .._errors import NotSupportedError, message
from ._memory import taken
from ._pattern import Colouring, Pattern, Places, TapPattern, matrix
from ._sets import NONE, distinct

Array = jax.Array


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of a component along an axis, or as many zeros."""

    component: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Slices of components that are joined along an axis, of which they agree in all others."""

    axis: int
    slices: tuple[Part, ...]

    def __call__(self, arrays: Sequence[Array | None], shape: tuple[int, ...], dtype: Any) -> Array:
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        out = []
        for part in self.slices:
            array = None if part.component is None else arrays[part.component]
            if array is None:
                out.append(jnp.zeros((*before, part.stop - part.start, *after), dtype))
                continue
            array = array.reshape((*before, -1, *after)).astype(dtype)
            out.append(lax.slice_in_dim(array, part.start, part.stop, axis=self.axis))
        return jnp.concatenate(out, self.axis)


@dataclass(frozen=True, eq=False, slots=True)
class Pick:
    """Where each slot's value comes from: components' arrays to an array of `shape`.

    `component` is set when the slots are exactly that component in order; otherwise `index` counts
    elements through all components, and NONE reads zero. `parts` is set when it is slices of
    components, one after another: three gates of one product are three times the same state.
    """

    shape: tuple[int, ...]
    component: int | None
    index: np.ndarray | None
    sizes: tuple[int, ...]
    parts: Parts | None = None

    @property
    def elements(self) -> np.ndarray:
        """The elements that are read, counted through all components."""
        if self.component is None:
            assert self.index is not None
            return self.index
        first = sum(self.sizes[: self.component])
        return np.arange(first, first + self.sizes[self.component]).reshape(self.shape)

    def __call__(self, arrays: Sequence[Array | None], dtype) -> Array:
        """Read from one array per component (None is zero)."""
        if self.component is not None:
            array = arrays[self.component]
            if array is None:
                return jnp.zeros(self.shape, dtype)
            return array.reshape(self.shape).astype(dtype)
        if self.index is None or all(a is None for a in arrays):
            return jnp.zeros(self.shape, dtype)
        if self.parts is not None:
            return self.parts(arrays, self.shape, dtype)
        return looked_up(arrays, self.sizes, self.index, dtype)


def looked_up(
    arrays: Sequence[Array | None], sizes: Sequence[int], index: np.ndarray, dtype: Any
) -> Array:
    """Elements, counted through all arrays in order; zero for NONE, and of an array that is None.

    Arrays of which nothing is read are not touched.
    """
    # Arrays a of 2, None of 3 and c of 2 elements, index [6, 0, 3, NONE]: a and c are read, joined
    # as [a0, a1, c0, c1], at [3, 0, NONE, NONE].
    ends = np.cumsum(sizes)
    block = np.searchsorted(ends, index, side="right")
    read = [k for k in distinct(block[index != NONE], len(ends)).tolist() if arrays[k] is not None]
    if not read:
        return jnp.zeros(index.shape, dtype)
    shift, here, start = np.zeros(len(ends), np.int64), np.zeros(len(ends), bool), 0
    for k in read:
        shift[k], here[k] = start - (ends[k] - sizes[k]), True
        start += sizes[k]
    moved = np.where((index != NONE) & here[block], index + shift[block], NONE)
    flat: list[Any] = [arrays[k] for k in read]
    flat = [a.reshape(-1).astype(dtype) for a in flat]
    return _elements(flat[0] if len(flat) == 1 else jnp.concatenate(flat), moved)


def _elements(values: Array, index: np.ndarray) -> Array:
    """`values[index]`, zero for NONE."""
    view = _view(index)
    if view is not None:
        start, shape, order, once = view
        part = lax.slice_in_dim(values, start, start + prod(shape))
        return jnp.broadcast_to(part.reshape(shape).transpose(order).reshape(once), index.shape)
    missing = index == NONE
    if not missing.any():
        return values[index]
    # A zero is appended, since a mask would be a constant more.
    values = jnp.concatenate([values, jnp.zeros(1, values.dtype)])
    return values[np.where(missing, len(values) - 1, index)]


_View = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _view(index: np.ndarray) -> _View | None:
    """How to read neighbours in another order, without a table of indices.

    The first of them, the shape that they have in memory, the order of its axes, and the shape
    before axes along which all is the same are repeated; None if that is not what is read.
    """
    # [[3, 5, 7], [4, 6, 8]] goes on by 1 and 2 along its axes: 3, shape (3, 2), order (1, 0).
    # [0, 1, 4, 5, 2, 3, 6, 7] does so as (2, 2, 2), by 2, 4 and 1.
    if not index.size or (index == NONE).any():
        return None
    first, sizes, steps = int(index.flat[0]), list[int](), list[int]()
    for k in range(index.ndim):
        along = np.moveaxis(index, k, 0).reshape(index.shape[k], -1)[:, 0]
        for n, step in _even(along):
            sizes.append(n)
            steps.append(step)
    inner = tuple(n if step else 1 for n, step in zip(sizes, steps, strict=True))
    axes = sorted(range(len(sizes)), key=lambda k: -steps[k])
    shape, order = tuple(inner[k] for k in axes), tuple(axes.index(k) for k in range(len(axes)))
    read = np.arange(first, first + prod(shape)).reshape(shape).transpose(order)
    once = tuple(index.shape[k] if _moves(index, k) else 1 for k in range(index.ndim))
    same = read.size == prod(once) and np.array_equal(
        np.broadcast_to(read.reshape(once), index.shape), index
    )
    return (first, shape, order, once) if same else None


def _moves(index: np.ndarray, axis: int) -> bool:
    """Whether anything changes along an axis."""
    return not np.array_equal(index.take([0], axis), index.take([-1], axis))


def _even(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Loops that count these numbers from the first on, the outermost first: (turns, step)."""
    out, n = [], len(numbers)
    while n > 1:
        step = int(numbers[1] - numbers[0])
        uneven = np.flatnonzero(np.diff(numbers) != step)
        turns = int(uneven[0]) + 1 if len(uneven) else n
        if n % turns:
            return [(n, step)]  # of no loops
        out.append((turns, step))
        numbers, n = numbers[::turns], n // turns
    return out[::-1]


def pick(index: np.ndarray, offsets: np.ndarray) -> Pick:
    """The Pick of an array of element indices."""
    flat = index.reshape(-1)
    sizes = tuple(int(n) for n in np.diff(offsets))
    for c, n in enumerate(sizes):
        if n == len(flat) and n and np.array_equal(flat, np.arange(offsets[c], offsets[c + 1])):
            return Pick(index.shape, c, None, sizes)
    return Pick(index.shape, None, index, sizes, _parts(index, offsets))


_MOST_PARTS = 16


def _parts(index: np.ndarray, offsets: np.ndarray) -> Parts | None:
    """The slices along an axis that an array of indices is made of, if they are few."""
    for axis in reversed(range(index.ndim)):
        n, inner = index.shape[axis], prod(index.shape[axis + 1 :])
        rows = np.moveaxis(index, axis, 0).reshape(n, -1)
        # A slice goes on where all elements are the next ones, or none are.
        on = ((np.diff(rows, axis=0) == inner) & (rows[1:] != NONE)) | (
            (rows[1:] == NONE) & (rows[:-1] == NONE)
        )
        cuts = [0, *(np.flatnonzero(~on.all(1)) + 1).tolist(), n]
        if len(cuts) - 1 > _MOST_PARTS:
            continue
        pieces = [index.take(range(a, b), axis) for a, b in pairwise(cuts)]
        slices = [_slice(piece, axis, offsets) for piece in pieces]
        if all(s is not None for s in slices):
            return Parts(axis, tuple(s for s in slices if s is not None))
    return None


def _slice(piece: np.ndarray, axis: int, offsets: np.ndarray) -> Part | None:
    """The slice of a component that these elements are; None if they are not one."""
    n = piece.shape[axis]
    if (piece == NONE).all():
        return Part(None, 0, n)
    first = int(piece.min())
    if first == NONE:
        return None
    c = int(np.searchsorted(offsets, first, side="right")) - 1
    size = int(offsets[c + 1] - offsets[c])
    others = piece.size // n
    if size % others:
        return None
    shape = (*piece.shape[:axis], size // others, *piece.shape[axis + 1 :])
    start = (first - int(offsets[c])) // prod(piece.shape[axis + 1 :])
    if start + n > shape[axis]:
        return None
    whole = np.arange(offsets[c], offsets[c + 1]).reshape(shape)
    same = np.array_equal(whole.take(range(start, start + n), axis), piece)
    return Part(c, start, start + n) if same else None


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Many Picks at once: indices of elements, counted through one derivative after another."""

    index: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Tails:
    """f at many slots: what is read of tangents at the exits, and of cotangents at the output."""

    ahead: Table | None
    back: Table | None


Cell = tuple[tuple[int, Pick], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Slots:
    """The slots of one operator: (*lanes, *y) positions with `width` slots each.

    `lanes` is () for one lane and (M,) for several; `dtype` is the real type of D and f. `analysed`
    are the destinations, (lanes, y, slots), of those samples of a batch that were analysed. Per
    slot k, `at[k]` reads state-shaped arrays. `transition[k][j]` is (derivative, Pick) pairs whose
    sum is D from slot j to slot k, `arrival[k]` (part, derivative, backward, Pick) the same for f:
    a derivative is one tangent at all exits, or one cotangent at all sources.

    With many slots these are tables instead, and `at` is one Pick with the slots as its last axis.
    `table` holds all of D, and `tails` f for each real part of the output. `table` and `at` may
    have size one along axes of y where all is the same.

    `runs` are (start, stop) along each axis of y: destinations repeat those of that part, or are
    some of them. Three gates in one product of 192 units reach the 64 units of the state three
    times, so one D of 64 places is enough.
    """

    lanes: tuple[int, ...]
    y_shape: tuple[int, ...]
    width: int
    analysed: np.ndarray
    dtype: Any
    at: tuple[Pick, ...]
    transition: tuple[tuple[Cell, ...], ...]
    arrival: tuple[tuple[tuple[int, int, bool, Pick], ...], ...]
    table: Table | None
    tails: tuple[Tails, ...]
    runs: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lanes + self.y_shape

    def components(self, offsets: np.ndarray) -> list[int]:
        """The state components with a slot, of those whose analysed elements begin there."""
        elements = distinct(self.analysed[self.analysed >= 0], int(offsets[-1]))
        return np.unique(np.searchsorted(offsets, elements, side="right") - 1).tolist()

    @property
    def run(self) -> tuple[tuple[int, ...], bytes]:
        """The shape of the positions that others repeat, and what tells them apart."""
        y = self.y_shape
        if y:  # of a batch, some samples are analysed
            y = (self.analysed.shape[1] // prod(y[1:]), *y[1:])
        destination = self.analysed.reshape((len(self.analysed), *y, self.width))
        part = destination[(slice(None), *(slice(*run) for run in self.runs))]
        return (*self.lanes, *(b - a for a, b in self.runs)), part.tobytes()

    @property
    def destination(self) -> np.ndarray:
        """The state element of each slot, or NONE: (lanes, y, slots)."""
        if self.table is None:
            elements = np.stack([p.elements for p in self.at], -1)
        else:
            elements = np.broadcast_to(self.at[0].elements, (*self.shape, self.width))
        return elements.reshape((-1, prod(self.y_shape), self.width))

    def values(self, arrays: Sequence[Array | None], dtype: Any) -> Array:
        """State-shaped arrays (None is zero) at the slots; of size one along axes that repeat."""
        if self.table is None:
            return jnp.stack([pick(arrays, dtype) for pick in self.at], -1)
        return self.at[0](arrays, dtype)


MOST_ENTRIES = 1 << 28  # of the D of one relation
TAKE_WINDOWS = "online(..., window=K) or compile(..., vjp_method='multi-step')"
_ARRAYS = 5  # of the size of D while its entries are looked up
FEW_SLOTS = 4  # with more of them, D and f are tables


def slots(
    tap: TapPattern,
    reached: sparse.csr_matrix,
    pattern: Pattern,
    places: Places,
    y_shape: tuple[int, ...],
    same_axes: bool,
    dtype: Any,
    most_entries: int = MOST_ENTRIES,
    copies: int = 1,
) -> Slots | None:
    """The slots of an operator; None when no output element reaches a state.

    Args:
        tap: direct edges from the output to the states.
        reached: (state element, output element), which state elements have a slot.
        pattern: the edges of D, and how D is read.
        places: the state elements.
        y_shape: the shape of the output.
        same_axes: whether D may be stored once along axes of the output on which it is the same.
        dtype: real type of D and f.
        most_entries: how many entries D may have.
        copies: how many of these slots there will be.

    Raises:
        NotSupportedError: D would be larger than that.
    """
    element, y = reached.nonzero()
    if not len(element):
        return None
    n, n_y = places.n, prod(y_shape)
    edges = matrix(pattern.kept, (n, n))
    _, label = csgraph.connected_components(edges, directed=False)
    order = np.lexsort((element, label[element], y))
    element, y = element[order], y[order]
    lane, slot = _lanes(y, label[element])
    n_lanes, width = int(lane.max()) + 1, int(slot.max()) + 1
    destination = np.full((n_lanes, n_y, width), NONE)
    destination[lane, y, slot] = element

    lanes = () if n_lanes == 1 else (n_lanes,)
    shape = lanes + y_shape
    offsets = places.offsets
    read = _Reader(edges, pattern.colouring, places)
    wide = _narrowed(destination.reshape((*shape, width)), len(lanes), same_axes)
    if (entries := wide.size * width * copies) > most_entries:
        raise NotSupportedError(_too_large(entries, width, most_entries))
    taken(_ARRAYS * 8 * wide.size * width)
    runs = _runs(destination.reshape((*shape, width)), len(lanes))
    column = [destination[..., k] for k in range(width)]
    if width > FEW_SLOTS:
        at: tuple[Pick, ...] = (pick(wide, offsets),)
        tails = _tails(destination, tap, places, (*shape, width))
        table, none = Table(read.table(wide)), ()
        return Slots(lanes, y_shape, width, destination, dtype, at, none, none, table, tails, runs)
    at = tuple(pick(c.reshape(shape), offsets) for c in column)
    transition = tuple(
        tuple(read.cell(column[k], column[j], shape) for j in range(width)) for k in range(width)
    )
    arrival = tuple(_arrival(c, tap, places, shape) for c in column)
    return Slots(lanes, y_shape, width, destination, dtype, at, transition, arrival, None, (), runs)


# For y0 that reaches the state elements 0, 4 and 2, where 0 and 4 meet in the kept Jacobian and 2
# meets neither, and y1 that reaches 1, with labels of what meets (0, 4: a; 1: b; 2: c):
#
#     y              0 0 0 1
#     label          a a c b
#     new_lane       1 0 1 1     another y, or another label
#     group          0 0 1 2     entries of one lane of one y
#     first_group    0 0 0 2     the first group of the own y
#     lane           0 0 1 0     group - first_group
#     slot           0 1 0 0     the place within the group
#
# so destination[lane, y, slot] is [[0, 4], [1, NONE]] in lane 0 and [[2, NONE], [NONE, NONE]] in 1.
def _lanes(y: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lane and slot of each (y, label)-sorted entry."""
    new_y = np.r_[True, y[1:] != y[:-1]]
    new_lane = new_y | np.r_[True, label[1:] != label[:-1]]
    group = np.cumsum(new_lane) - 1
    first_of_lane = np.flatnonzero(new_lane)
    first_group = group[np.flatnonzero(new_y)][np.cumsum(new_y) - 1]
    return group - first_group, np.arange(len(y)) - first_of_lane[group]


def _narrowed(destination: np.ndarray, lead: int, same_axes: bool) -> np.ndarray:
    """The slots, once for all places along axes where they do not differ."""
    for axis in range(lead, destination.ndim - 1) if same_axes else ():
        first = destination.take([0], axis)
        if np.array_equal(destination, np.broadcast_to(first, destination.shape)):
            destination = first
    return destination


def _runs(destination: np.ndarray, lead: int) -> tuple[tuple[int, int], ...]:
    """Along each axis of y, the part whose destinations all other parts repeat, or some of them."""
    out = []
    for axis in range(lead, destination.ndim - 1):
        # y (6,) with destinations [4, 5, NONE, 5, 4, 5]: period 2 fits, as NONE agrees with
        # everything, and the part that is `_complete` is the first one, (0, 2).
        n = destination.shape[axis]
        rows = np.moveaxis(destination, axis, 0).reshape(n, -1)
        alike = (rows == rows[0]) | (rows == NONE) | (rows[0] == NONE)
        lengths = (int(p) for p in np.flatnonzero(alike.all(1))[1:] if n % p == 0)
        found = (start for p in lengths if (start := _complete(rows, p)) is not None)
        out.append(next(found, (0, n)))
    return tuple(out)


def _complete(rows: np.ndarray, length: int) -> tuple[int, int] | None:
    parts = rows.reshape((-1, length, rows.shape[1]))
    union = parts.max(0)
    if ((parts != union) & (parts != NONE)).any():
        return None
    whole = np.flatnonzero((parts == union).all((1, 2)))
    return None if not len(whole) else (int(whole[0]) * length, (int(whole[0]) + 1) * length)


def _too_large(entries: int, width: int, most: int) -> str:
    return message(
        f"the Jacobian between the state elements that one weight reaches has {entries:,} entries.",
        why=f"an output element of its operator is followed to {width} state elements, and the "
        f"limit is {most:,} entries",
        do="follow fewer crossings (snap with a smaller n, or d_rtrl), take windows "
        f"({TAKE_WINDOWS}), use rtrl, or raise the limit (most_entries of rules.snap, "
        "snap_max_jacobian_elements of SnAp)",
    )


class _Reader:
    """Where to read the entry of D from one state element to another."""

    def __init__(self, edges: sparse.csr_matrix, colouring: Colouring, places: Places):
        self.edges, self.colouring, self.places = edges, colouring, places
        n = int(places.component.max(initial=0)) + 1
        self.backward = np.zeros((n, n), bool)
        for c, s in colouring.backward:
            self.backward[c, s] = True

    def places_of(self, to: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Index of the derivative (NONE for no edge) and the element to read in it."""
        # The entry d'_1 / h_1 of a delay line: with h and d a block each, the tangent of ones on h
        # (derivative 0, say) holds it at element d_1, `to`. An entry that is read backward is in
        # a cotangent, which are counted after the tangents, at element `source`.
        present = (to != NONE) & (source != NONE)
        edge = np.zeros(to.shape, bool)
        edge[present] = np.asarray(self.edges[to[present], source[present]]).reshape(-1)
        to, source = np.maximum(to, 0), np.maximum(source, 0)
        c, component = self.colouring, self.places.component
        back = self.backward[component[to], component[source]]
        derivative = np.where(back, c.n_sources + c.exits[to], c.sources[source])
        return np.where(edge, derivative, NONE), np.where(back, source, to)

    def cell(self, to: np.ndarray, source: np.ndarray, shape: tuple[int, ...]) -> Cell:
        derivative, element = self.places_of(to, source)
        out = []
        n = self.colouring.n_sources + self.colouring.n_exits
        for c in distinct(derivative[derivative != NONE], n):
            index = np.where(derivative == c, element, NONE)
            out.append((int(c), pick(index.reshape(shape), self.places.offsets)))
        return tuple(out)

    def table(self, destination: np.ndarray) -> np.ndarray:
        to = np.broadcast_to(destination[..., :, None], (*destination.shape, destination.shape[-1]))
        source = np.broadcast_to(destination[..., None, :], to.shape)
        derivative, element = self.places_of(to, source)
        return np.where(derivative == NONE, NONE, derivative * self.places.n + element)


def _arrival(to, tap: TapPattern, places: Places, shape) -> tuple[tuple[int, int, bool, Pick], ...]:
    out = []
    n_y = to.shape[-1]
    y = np.broadcast_to(np.arange(n_y), to.shape)
    at_y = np.array([0, n_y])
    for part, (pairs, c) in enumerate(zip(tap.edges, tap.colourings, strict=True)):
        edges = matrix(pairs, (places.n, n_y))
        entries = edges[np.maximum(to, 0).ravel(), y.ravel()]
        edge = (to != NONE) & np.asarray(entries).reshape(to.shape)
        blocks = np.array([b for b, _ in c.backward], int)
        back = edge & np.isin(places.component[np.maximum(to, 0)], blocks)
        for derivative in range(c.n_sources):
            here = edge & ~back & (c.sources[y] == derivative)
            if here.any():
                index = np.where(here, to, NONE)
                out.append((part, derivative, False, pick(index.reshape(shape), places.offsets)))
        for derivative in range(c.n_exits):
            here = back & (c.exits[np.maximum(to, 0)] == derivative)
            if here.any():
                index = np.where(here, y, NONE)
                out.append((part, derivative, True, pick(index.reshape(shape), at_y)))
    return tuple(out)


def _tails(to, tap: TapPattern, places: Places, shape: tuple[int, ...]) -> tuple[Tails, ...]:
    out = []
    n_y = to.shape[1]
    y = np.broadcast_to(np.arange(n_y)[:, None], to.shape)
    for pairs, c in zip(tap.edges, tap.colourings, strict=True):
        edges = matrix(pairs, (places.n, n_y))
        entries = edges[np.maximum(to, 0).ravel(), y.ravel()]
        edge = (to != NONE) & np.asarray(entries).reshape(to.shape)
        blocks = np.array([b for b, _ in c.backward], int)
        back = edge & np.isin(places.component[np.maximum(to, 0)], blocks)
        ahead = np.where(edge & ~back, c.sources[y] * places.n + to, NONE).reshape(shape)
        behind = np.where(back, c.exits[np.maximum(to, 0)] * n_y + y, NONE).reshape(shape)
        tables = (Table(i) if (i != NONE).any() else None for i in (ahead, behind))
        out.append(Tails(*tables))
    return tuple(out)
