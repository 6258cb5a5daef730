"""Influence maps: which source elements does each element of each tangent read?

The abstract value of a variable is an integer array of its own shape with one more axis, the
sources each element reads (NONE pads). Data movement is executed on these arrays; element-wise
equations take the union; every other equation mixes elements: it is cut, its result counts as a
constant, and what was cut is recorded. Sources are numbered through all entries, then all taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._jaxpr import Atom, Const, Equation, Var, bind, is_traced
from ._moves import NONE, move
from ._tangent import Tangent

_MOST_KNOWN = 1 << 22  # elements of an integer array that is worth computing at compile time


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """An equation whose tangent is dropped, and the sources (by number) that reached it."""

    equation: int
    sources: frozenset[int]
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class Influence:
    """The result of the walk.

    `rows[c]` is (size of component c, m): the sources of each exit element. `offsets[s]` is the
    number of the first element of source s (entries, then tap parts; one past the end last).
    `lost[c]` are the cuts on paths that would have reached component c.
    """

    rows: tuple[np.ndarray, ...]
    offsets: np.ndarray
    cuts: tuple[Cut, ...]
    lost: tuple[frozenset[int], ...]

    def source_of(self, elements: np.ndarray) -> np.ndarray:
        """Which source an element number belongs to."""
        return np.searchsorted(self.offsets, elements, side="right") - 1


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    sources: np.ndarray  # (*shape, m)
    lost: frozenset[int]  # positions in the list of cuts


def influence(tangent: Tangent, known_inputs: dict[Var, np.ndarray]) -> Influence:
    """Walk the tangent program; `known_inputs` are integer inputs whose value is known."""
    sources = [*tangent.entries, *(v for tap in tangent.taps for v in tap)]
    offsets = np.cumsum([0, *(v.size for v in sources)])
    env: dict[Var, _Value] = {}
    known: dict[Var, np.ndarray] = dict(known_inputs)
    cuts: list[Cut] = []
    for var, start in zip(sources, offsets[:-1], strict=True):
        own = np.arange(start, start + var.size).reshape((*var.shape, 1))
        env[var] = _Value(own, frozenset())

    def value_of(atom: Atom) -> _Value | None:
        return env.get(atom) if isinstance(atom, Var) else None

    def known_of(atom: Atom) -> np.ndarray | None:
        if isinstance(atom, Const):
            return None if is_traced(atom.value) else atom.value
        return known.get(atom)

    for i, eqn in enumerate(tangent.program.equations):
        values = [value_of(a) for a in eqn.inputs]
        if all(v is None for v in values):
            _fold(eqn, [known_of(a) for a in eqn.inputs], known)
            continue
        if eqn.name == "stop_gradient":
            continue
        lost = frozenset().union(*(v.lost for v in values if v is not None))
        arrays = [None if v is None else v.sources for v in values]
        result = move(eqn, arrays, [known_of(a) for a in eqn.inputs])
        if isinstance(result, str):
            met = [a[a != NONE] for a in arrays if a is not None]
            numbers = np.unique(np.searchsorted(offsets, np.concatenate(met), side="right") - 1)
            cuts.append(Cut(i, frozenset(numbers.tolist()), result))
            lost |= {len(cuts) - 1}
            result = [np.full((*v.shape, 0), NONE) for v in eqn.outputs]
        for var, array in zip(eqn.outputs, result, strict=True):
            env[var] = _Value(array, lost)

    rows, lost_at = [], []
    for component, atom in zip(tangent.components, tangent.exits, strict=True):
        value = value_of(atom)
        size = int(np.prod(component.shape, dtype=np.int64))
        found = np.full((size, 0), NONE) if value is None else value.sources
        rows.append(found.reshape(size, found.shape[-1]))
        lost_at.append(frozenset() if value is None else value.lost)
    return Influence(tuple(rows), offsets, tuple(cuts), tuple(lost_at))


def _fold(eqn: Equation, values: list[Any], known: dict[Var, np.ndarray]) -> None:
    """Compute integers that depend on nothing: indices of gathers, slices and rolls."""
    small = all(v.size <= _MOST_KNOWN for v in eqn.outputs)
    plain = all(jax.dtypes.issubdtype(v.dtype, np.integer) or v.dtype == bool for v in eqn.outputs)
    if eqn.effects or not (small and plain and all(v is not None for v in values)):
        return
    with jax.ensure_compile_time_eval():
        out = bind(eqn, values)
    known.update((var, np.asarray(o)) for var, o in zip(eqn.outputs, out, strict=True))
