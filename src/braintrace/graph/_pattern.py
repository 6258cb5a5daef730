"""The sparse Jacobian that is kept: its edges, and the few derivatives that give all its entries.

Of an exit element's sources among the states of one shape, the own position is kept; where it is
not read, a single other one (a *move*, as in a delay line), or several that no other unit reads (a
*tree*: the synapses of a neuron, the places of a ring buffer). Neighbours that are added to the own
position are dropped and recorded. All edges, kept or dropped, get a colour such that one tangent
(or one cotangent) per colour yields every entry exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from scipy import sparse

from ._influence import Influence
from ._sets import distinct, varies
from ._step import MOST_COUPLED, Component


@dataclass(frozen=True, eq=False, slots=True)
class Colouring:
    """How to read the entries of a sparse matrix from a few products with it.

    A tangent of ones on the sources of one colour gives an entry per exit element; a cotangent of
    ones on the exits of one colour gives one per source. `sources[s]` and `exits[e]` are colours;
    `backward` are pairs (exit block, source block) read from cotangents, all others from tangents.
    """

    sources: np.ndarray
    n_sources: int
    exits: np.ndarray
    n_exits: int
    backward: frozenset[tuple[int, int]]


@dataclass(frozen=True, eq=False, slots=True)
class Pattern:
    """Edges of the kept Jacobian between state elements, counted through all components.

    `kept` are (exit element, entry element) pairs, `edges` all of them. `dropped` are (exit
    component, entry component, axis) where neighbours were lost: along this axis alone, or None.
    """

    kept: np.ndarray
    edges: np.ndarray
    colouring: Colouring
    dropped: tuple[tuple[int, int, int | None], ...]


def rows_of(rows: Sequence[np.ndarray], low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """All (exit element, source element) pairs with low <= source < high."""
    exits: list[np.ndarray] = [np.zeros(0, int)]
    sources: list[np.ndarray] = [np.zeros(0, int)]
    start = 0
    for row in rows:
        element, slot = np.nonzero((row >= low) & (row < high))
        exits.append(element + start)
        sources.append(row[element, slot])
        start += len(row)
    return np.concatenate(exits), np.concatenate(sources)


class Places:
    """Where each state element is: its component, its kind (of shape) and its position.

    Elements along a coupled axis share the position of the first.
    """

    def __init__(self, components: Sequence[Component], offsets: np.ndarray):
        self.offsets = offsets[: len(components) + 1]
        shapes = [c.shape for c in components]
        self.kinds = np.array([shapes.index(s) for s in shapes], dtype=int)
        self.n = int(self.offsets[-1])
        self.component = np.repeat(np.arange(len(shapes)), np.diff(self.offsets))
        self.kind = self.kinds[self.component]
        parts = [np.zeros(0, int), *(_positions(c) for c in components)]
        self.position = np.concatenate(parts)
        # One index per (shape, position).
        self.unit = self.offsets[self.kind] + self.position


def _positions(component: Component) -> np.ndarray:
    at = np.arange(prod(component.shape)).reshape(component.shape)
    if component.coupled is not None:
        at = np.broadcast_to(at.take([0], component.coupled), component.shape)
    return at.reshape(-1)


def kept_edges(places: Places, exits: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Which of the edges a rule without crossings keeps."""
    # Units 0 and 1 with h (2,) and two synapses each, g (2, 2); edges (exit <- sources), a cell for
    # each exit element and each shape of its sources:
    #
    #     h0 <- h0 h1        cell (h0, shape of h): reads its own place, h1 is dropped
    #     h0 <- g00 g01      cell (h0, shape of g): no own place there, and two of them; g00 and g01
    #                        are read by h0 alone, so they are a tree, kept
    #     g00 <- h1          one other place: a move, kept
    own = places.unit[exits] == places.unit[sources]
    # Per exit element and shape of the source: how many positions it reads, and is one its own?
    n_kinds = int(places.kinds.max(initial=0)) + 1
    cell = exits * n_kinds + places.kind[sources]
    n_cells, unit = places.n * n_kinds, places.unit
    has_own = np.zeros(n_cells, bool)
    has_own[cell[own]] = True
    single = ~varies(cell, unit[sources], n_cells)
    # A tree: positions that are read by one position of the exit's shape only.
    key = unit[sources] * n_kinds + places.kind[exits]
    tree = np.ones(n_cells, bool)
    tree[cell[varies(key, unit[exits], n_cells)[key]]] = False
    return np.where(has_own[cell], own, single[cell] | tree[cell])


def state_pattern(influence: Influence, components: Sequence[Component], crossing: bool) -> Pattern:
    """Edges from state entries to state exits; all are kept if `crossing`."""
    places = Places(components, influence.offsets)
    exits, sources = rows_of(influence.rows, 0, places.n)
    keep = np.ones(len(exits), bool) if crossing else kept_edges(places, exits, sources)
    left, right = exits[~keep], sources[~keep]
    lost = []
    for pair in _pairs(places.component[left], places.component[right]):
        here = (places.component[left] == pair[0]) & (places.component[right] == pair[1])
        lost.append((*pair, short_axis(components, places.offsets, left[here], right[here])))
    edges = np.stack([exits, sources], axis=1)
    blocks = (places.component, places.component)
    return Pattern(edges[keep], edges, colour(edges, *blocks), tuple(lost))


def short_axis(
    components: Sequence[Component], offsets: np.ndarray, a: np.ndarray, b: np.ndarray
) -> int | None:
    """The axis, from the end, along which alone pairs of elements of one shape differ, if short."""
    of_a, of_b = (np.searchsorted(offsets, x, side="right") - 1 for x in (a, b))
    shapes = {components[c].shape for c in {*of_a.tolist(), *of_b.tolist()}}
    if len(shapes) != 1 or len(shape := shapes.pop()) < 2:
        return None
    at = [np.array(np.unravel_index(x - offsets[c], shape)) for x, c in ((a, of_a), (b, of_b))]
    axes = np.flatnonzero((at[0] != at[1]).any(1))
    if len(axes) != 1 or shape[axes[0]] > MOST_COUPLED:
        return None
    return int(axes[0]) - len(shape)


def _pairs(first: np.ndarray, second: np.ndarray) -> list[tuple[int, int]]:
    """The distinct pairs, in order."""
    n = int(second.max(initial=0)) + 1
    keys = distinct(first * n + second, (int(first.max(initial=0)) + 1) * n)
    return [divmod(key, n) for key in keys.tolist()]


def mixing_probes(
    components: Sequence[Component], rows: Sequence[np.ndarray], offsets: np.ndarray, last: int
) -> np.ndarray:
    """For every source index below `last`: does it end in several positions of one shape?"""
    places = Places(components, offsets)
    exits, sources = rows_of(rows, 0, places.n)
    keep = kept_edges(places, exits, sources)
    step = matrix(np.stack([exits[keep], sources[keep]], 1), (places.n, places.n))
    first = int(offsets[-1])
    ends, probe = rows_of(rows, first, last)
    probes = matrix(np.stack([ends, probe - first], 1), (places.n, last - first))
    reached = close(step, probes)
    element, probe = reached.nonzero()
    n_kinds = int(places.kinds.max(initial=0)) + 1
    key = probe * n_kinds + places.kind[element]
    several = varies(key, places.position[element], (last - first) * n_kinds)
    bad = np.zeros(last, bool)
    bad[first:] = several.reshape(-1, n_kinds).any(1)
    return bad


def matrix(pairs: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """A sparse boolean matrix."""
    ones = np.ones(len(pairs), bool)
    return sparse.csr_matrix((ones, (pairs[:, 0], pairs[:, 1])), shape=shape, dtype=bool)


def close(step: sparse.csr_matrix, reached: sparse.csr_matrix) -> sparse.csr_matrix:
    """Everything that is reached in any number of steps."""
    while True:
        more = ((step @ reached) + reached).astype(bool)
        if more.nnz == reached.nnz:
            return more
        reached = more


# ------------------------------------------------------------------------------------- colouring


def colour(
    edges: np.ndarray, exit_block: np.ndarray, source_block: np.ndarray, backward_only: bool = False
) -> Colouring:
    """Colours for the entries of a matrix whose rows and columns fall into blocks."""
    exits, sources = edges[:, 0], edges[:, 1]
    n_exits, n_sources = len(exit_block), len(source_block)
    by_block = _by_blocks(exits, sources, exit_block, source_block, backward_only)
    if by_block is not None:
        return by_block
    backward, n_backward = colours_of(sources, exits, n_exits)
    if not backward_only:
        forward, n_forward = colours_of(exits, sources, n_sources)
        if n_forward <= n_backward:
            return Colouring(forward, n_forward, np.zeros(n_exits, int), 0, frozenset())
    pairs = _pairs(exit_block[exits], source_block[sources])
    return Colouring(np.zeros(n_sources, int), 0, backward, n_backward, frozenset(pairs))


def _by_blocks(exits, sources, exit_block, source_block, backward_only) -> Colouring | None:
    """One tangent per source block, one cotangent per exit block, if that is enough."""
    n_exits, n_sources = len(exit_block), len(source_block)
    n = int(max(exit_block.max(initial=0), source_block.max(initial=0))) + 1
    # Blocks are components. For `v' = a v + g.sum(1)`, `g' = b g` with v (2,) and g (2, 2):
    #
    #     (v, v), (g, g)    one source per exit, one exit per source: a tangent of ones on v gives
    #                       a, one on g gives b, all entries of both at once
    #     (v, g)            v0 reads g00 and g01, `many_in`: the tangent of g would give their sum.
    #                       Each g is read once, so a cotangent of ones on v' gives all entries
    #
    # Of a pair with several on both sides (a full matrix) neither would do: None.
    pair = exit_block[exits] * n + source_block[sources]
    many_in = _repeated(exits * n + source_block[sources], n_exits * n)
    many_out = _repeated(sources * n + exit_block[exits], n_sources * n)
    fans_in = distinct(pair if backward_only else pair[many_in], n * n)
    fans_out = distinct(pair[many_out], n * n)
    if np.isin(fans_in, fans_out).any():
        return None
    back = np.isin(pair, fans_in)
    source_colours, n_sources = _one_per_block(source_block, source_block[sources[~back]])
    exit_colours, n_exits = _one_per_block(exit_block, exit_block[exits[back]])
    pairs = frozenset((int(p) // n, int(p) % n) for p in fans_in)
    return Colouring(source_colours, n_sources, exit_colours, n_exits, pairs)


def _repeated(keys: np.ndarray, end: int) -> np.ndarray:
    """Which of the keys, all below `end`, occur several times."""
    if end <= 64 * keys.size:
        return np.bincount(keys, minlength=1)[keys] > 1
    _, inverse, count = np.unique(keys, return_inverse=True, return_counts=True)
    return count[inverse] > 1


def _one_per_block(block: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, int]:
    """A colour for each block in use; elements of others get -1."""
    n_blocks = int(block.max(initial=0)) + 1
    blocks = distinct(used, n_blocks)
    colours = np.full(n_blocks, -1)
    colours[blocks] = np.arange(len(blocks))
    return colours[block], len(blocks)


def colours_of(exits: np.ndarray, sources: np.ndarray, n_sources: int) -> tuple[np.ndarray, int]:
    """Colours of the sources such that no exit element reads two of one colour."""
    rank = _rank(exits, sources)
    colours = np.zeros(n_sources, int)
    colours[sources] = rank
    if np.array_equal(colours[sources], rank):
        return colours, int(rank.max(initial=-1)) + 1
    return _greedy(exits, sources, n_sources)


def _rank(exits: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """The place of each source among the sources of its exit element."""
    order = np.lexsort((sources, exits))
    first = np.searchsorted(exits[order], exits[order])
    rank = np.empty(len(order), int)
    rank[order] = np.arange(len(order)) - first
    return rank


def _greedy(exits: np.ndarray, sources: np.ndarray, n_sources: int) -> tuple[np.ndarray, int]:
    readers: dict[int, list[int]] = {}
    for e, s in zip(exits.tolist(), sources.tolist(), strict=True):
        readers.setdefault(s, []).append(e)
    # Colours that an exit reads already are the bits of a number; the first free one is added.
    taken = [0] * (int(exits.max(initial=-1)) + 1)
    colours = np.zeros(n_sources, int)
    for s, es in readers.items():
        forbidden = 0
        for e in es:
            forbidden |= taken[e]
        free = ~forbidden & (forbidden + 1)
        colours[s] = free.bit_length() - 1
        for e in es:
            taken[e] |= free
    return colours, int(colours[sources].max(initial=-1)) + 1


@dataclass(frozen=True, eq=False, slots=True)
class TapPattern:
    """Edges from one operator's output to the state exits, per real part of the output.

    `edges[part]` are (exit element, output element) pairs.
    """

    edges: tuple[np.ndarray, ...]
    colourings: tuple[Colouring, ...]

    @property
    def all_edges(self) -> np.ndarray:
        return np.concatenate(self.edges)


def tap_pattern(
    influence: Influence, components: Sequence[Component], taps: Sequence[int], loops: bool
) -> TapPattern:
    """Edges of the operator whose output has these source indices.

    In `loops` its output has an axis of iterations, and entries are read from cotangents: one gives
    all iterations.
    """
    places = Places(components, influence.offsets)
    edges, colourings = [], []
    for source in taps:
        low, high = map(int, influence.offsets[source : source + 2])
        exits, sources = rows_of(influence.rows, low, high)
        pairs = np.stack([exits, sources - low], axis=1)
        edges.append(pairs)
        one_block = np.zeros(high - low, int)
        colourings.append(colour(pairs, places.component, one_block, loops))
    return TapPattern(tuple(edges), tuple(colourings))
