"""The sparse Jacobian that is kept: its edges, and the few tangents that give all its entries.

Of an exit element's sources among the states, the own position is kept, or, where the own position
is not read, a single other one (a *move*, as in a delay line). Neighbours that are added to the
own position are dropped and recorded. All edges, kept or dropped, get a colour such that no exit
element reads two sources of one colour; one tangent per colour then yields every entry exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._influence import Influence
from ._step import Component


@dataclass(frozen=True, eq=False, slots=True)
class Pattern:
    """Edges of the kept Jacobian between state elements, numbered through all components.

    `kept` are (exit element, entry element) pairs. `colours[e]` is the colour of entry element e.
    `dropped` are (exit component, entry component) pairs that lost neighbouring units.
    """

    kept: np.ndarray
    colours: np.ndarray
    n_colours: int
    dropped: tuple[tuple[int, int], ...]


def rows_of(found: Influence, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """All (exit element, source element) pairs with low <= source < high."""
    exits: list[np.ndarray] = [np.zeros(0, int)]
    sources: list[np.ndarray] = [np.zeros(0, int)]
    start = 0
    for row in found.rows:
        element, slot = np.nonzero((row >= low) & (row < high))
        exits.append(element + start)
        sources.append(row[element, slot])
        start += len(row)
    return np.concatenate(exits), np.concatenate(sources)


def state_pattern(found: Influence, components: tuple[Component, ...]) -> Pattern:
    """Edges from state entries to state exits, and their colours."""
    n = len(components)
    offsets = found.offsets[: n + 1]
    exit_element, source = rows_of(found, 0, int(offsets[-1]))
    exit_of = np.searchsorted(offsets, exit_element, side="right") - 1
    source_of = np.searchsorted(offsets, source, side="right") - 1
    position = exit_element - offsets[exit_of]
    source_position = source - offsets[source_of]

    shapes = [c.shape for c in components]
    kind = np.array([shapes.index(s) for s in shapes], dtype=int)  # components of equal shape
    same_shape = kind[exit_of] == kind[source_of]
    own = same_shape & (position == source_position)

    # Per exit element and shape of the source: how many positions it reads, and is one its own?
    n_kinds = int(kind.max(initial=0)) + 1
    cell = exit_element * n_kinds + kind[source_of]
    has_own = np.zeros(int(offsets[-1]) * n_kinds, bool)
    np.logical_or.at(has_own, cell, own)
    places = np.unique(np.stack([cell, source_position]), axis=1)[0]
    count = np.bincount(places, minlength=len(has_own))
    keep = np.where(has_own[cell], own, count[cell] == 1)

    lost = np.unique(np.stack([exit_of[~keep], source_of[~keep]]), axis=1).T
    colours, n_colours = colour(exit_element, source, source_of, int(offsets[-1]))
    kept = np.stack([exit_element[keep], source[keep]], axis=1)
    return Pattern(kept, colours, n_colours, tuple((int(a), int(b)) for a, b in lost))


def colour(
    exits: np.ndarray, sources: np.ndarray, source_of: np.ndarray, n_sources: int
) -> tuple[np.ndarray, int]:
    """Colours of the sources such that no exit element reads two of one colour."""
    for candidate in (source_of, _rank(exits, sources)):
        colours = np.zeros(n_sources, int)
        colours[sources] = candidate
        if np.array_equal(colours[sources], candidate) and _separates(exits, colours[sources]):
            used, dense = np.unique(colours[sources], return_inverse=True)
            colours[sources] = dense
            return colours, len(used)
    return _greedy(exits, sources, n_sources)


def _rank(exits: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """The place of each source among the sources of its exit element."""
    order = np.lexsort((sources, exits))
    first = np.searchsorted(exits[order], exits[order])
    rank = np.empty(len(order), int)
    rank[order] = np.arange(len(order)) - first
    return rank


def _separates(exits: np.ndarray, colours: np.ndarray) -> bool:
    pairs = np.stack([exits, colours])
    return np.unique(pairs, axis=1).shape[1] == pairs.shape[1]


def _greedy(exits: np.ndarray, sources: np.ndarray, n_sources: int) -> tuple[np.ndarray, int]:
    readers: dict[int, list[int]] = {}
    for e, s in zip(exits.tolist(), sources.tolist(), strict=True):
        readers.setdefault(s, []).append(e)
    taken: dict[int, set[int]] = {}
    colours = np.zeros(n_sources, int)
    for s, es in readers.items():
        forbidden = set().union(*(taken.setdefault(e, set()) for e in es))
        c = next(k for k in range(len(forbidden) + 1) if k not in forbidden)
        colours[s] = c
        for e in es:
            taken[e].add(c)
    return colours, int(colours[sources].max(initial=-1)) + 1


@dataclass(frozen=True, eq=False, slots=True)
class TapPattern:
    """Edges from one operator's output to the state exits.

    `edges` are (exit element, output element) pairs, `parts` tells for each whether the
    output's imaginary part is meant; `colours[part][element]` and `n_colours` as for states.
    """

    edges: np.ndarray
    parts: np.ndarray
    colours: tuple[np.ndarray, ...]
    n_colours: tuple[int, ...]


def tap_pattern(found: Influence, first: int, n_parts: int) -> TapPattern:
    """Edges of the operator whose tap parts are sources first, first + 1, ..."""
    edges, parts, colours, counts = [], [], [], []
    for part in range(n_parts):
        low, high = int(found.offsets[first + part]), int(found.offsets[first + part + 1])
        exits, sources = rows_of(found, low, high)
        sources = sources - low
        edges.append(np.stack([exits, sources], axis=1))
        parts.append(np.full(len(exits), part))
        c, k = colour(exits, sources, np.zeros(len(sources), int), high - low)
        colours.append(c)
        counts.append(k)
    return TapPattern(np.concatenate(edges), np.concatenate(parts), tuple(colours), tuple(counts))
