"""Influence maps: which source elements does each element of each tangent read?

The abstract value of a variable is an integer array of its own shape with one more axis, the
sources each element reads (NONE pads). Data movement is executed on these arrays; element-wise
equations take the union; every other equation mixes elements: it is cut, its result counts as a
constant, and what was cut is recorded. Bodies of control flow are walked in turn. Sources are
numbered through all entries, then all taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._jaxpr import (
    Atom,
    Const,
    Equation,
    Program,
    Var,
    bind,
    flatten,
    is_traced,
    prune,
    scan_layout,
)
from ._moves import MOST_SOURCES, NONE, move, union
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
    `lost[c]` are the cuts on paths that would have reached component c. `bodies` are the kept
    equations of control flow, with the outputs that are tangents.
    """

    rows: tuple[np.ndarray, ...]
    offsets: np.ndarray
    cuts: tuple[Cut, ...]
    lost: tuple[frozenset[int], ...]
    bodies: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    sources: np.ndarray  # (*shape, m)
    lost: frozenset[int]  # positions in the list of cuts


def influence(tangent: Tangent, known_inputs: dict[Var, np.ndarray]) -> Influence:
    """Walk the tangent program; `known_inputs` are integer inputs whose value is known."""
    sources = [*tangent.entries, *(v for tap in tangent.taps for v in tap)]
    offsets = np.cumsum([0, *(v.size for v in sources)])
    env: dict[Var, _Value] = {}
    for var, start in zip(sources, offsets[:-1], strict=True):
        own = np.arange(start, start + var.size).reshape((*var.shape, 1))
        env[var] = _Value(own, frozenset())
    cuts: list[Cut] = []
    bodies: dict[int, tuple[int, ...]] = {}
    exits = _walk(tangent.program, env, dict(known_inputs), offsets, cuts, tangent.exits, bodies)

    rows, lost_at = [], []
    for component, value in zip(tangent.components, exits, strict=True):
        size = int(np.prod(component.shape, dtype=np.int64))
        found = np.full((size, 0), NONE) if value is None else value.sources
        rows.append(found.reshape(size, found.shape[-1]))
        lost_at.append(frozenset() if value is None else value.lost)
    return Influence(tuple(rows), offsets, tuple(cuts), tuple(lost_at), bodies)


def _walk(
    program: Program,
    env: dict[Var, _Value],
    known: dict[Var, np.ndarray],
    offsets: np.ndarray,
    cuts: list[Cut],
    outputs: Sequence[Atom],
    bodies: dict[int, tuple[int, ...]],
) -> list[_Value | None]:
    """Values of `outputs`; what is cut on the way is added to `cuts`."""

    def value_of(atom: Atom) -> _Value | None:
        return env.get(atom) if isinstance(atom, Var) else None

    def known_of(atom: Atom) -> np.ndarray | None:
        if isinstance(atom, Const):
            return None if is_traced(atom.value) else atom.value
        return known.get(atom)

    for i, eqn in enumerate(program.equations):
        values = [value_of(a) for a in eqn.inputs]
        if all(v is None for v in values):
            _fold(eqn, [known_of(a) for a in eqn.inputs], known)
            continue
        if eqn.name == "stop_gradient":
            continue
        lost = frozenset().union(*(v.lost for v in values if v is not None))
        arrays = [None if v is None else v.sources for v in values]
        result: Sequence[Sources] | str
        if eqn.name in _BODIES:
            result = _BODIES[eqn.name](eqn, arrays, offsets)
        else:
            result = move(eqn, arrays, [known_of(a) for a in eqn.inputs])
        if isinstance(result, str):
            met = [a[a != NONE] for a in arrays if a is not None]
            numbers = np.unique(np.searchsorted(offsets, np.concatenate(met), side="right") - 1)
            cuts.append(Cut(i, frozenset(numbers.tolist()), result))
            lost |= {len(cuts) - 1}
            result = [np.full((*v.shape, 0), NONE) for v in eqn.outputs]
        elif eqn.name in _BODIES:
            bodies[i] = tuple(k for k, array in enumerate(result) if array is not None)
        for var, array in zip(eqn.outputs, result, strict=True):
            if array is not None:
                env[var] = _Value(array, lost)
    return [value_of(o) for o in outputs]


# Control flow. A body in which nothing mixes is as good as the equations inside it: the sets of its
# outputs are the union over branches, or over any number of turns. Where something mixes, the whole
# body is cut. Values and tangents come out side by side; a value (no tangent) is None here.
Sources = np.ndarray | None
_MOST_TURNS = 32  # until the sets of a loop no longer grow; a longer growth counts as mixing


def _body(jaxpr: Any, arrays: Sequence[Sources], offsets: np.ndarray) -> list[Sources] | str:
    program, consts = flatten(jaxpr)
    program = prune(program, program.outputs)
    moving = zip(program.inputs, arrays, strict=True)
    env = {v: _Value(a, frozenset()) for v, a in moving if a is not None}
    cuts: list[Cut] = []
    known = {
        v: np.asarray(c)
        for v, c in zip(program.consts, consts, strict=True)
        if not is_traced(c) and jax.dtypes.issubdtype(v.dtype, np.integer)
    }
    outs = _walk(program, env, known, offsets, cuts, program.outputs, {})
    if cuts:
        return cuts[0].reason
    return [None if v is None else v.sources for v in outs]


def _either(a: Sources, b: Sources) -> Sources:
    return b if a is None else a if b is None else union([a, b])


def _cond(eqn: Equation, arrays: list[Sources], offsets: np.ndarray) -> list[Sources] | str:
    merged: list[Sources] = [None] * len(eqn.outputs)
    for branch in eqn.params["branches"]:
        outs = _body(branch, arrays[1:], offsets)
        if isinstance(outs, str):
            return f"inside cond, {outs}"
        merged = [_either(a, b) for a, b in zip(merged, outs, strict=True)]
    return merged


def _turns(name: str, turn: Callable, carry: list[Sources]) -> list[Sources] | str:
    """The sets of a loop's carry (and what else a turn gives) once they no longer grow."""
    for _ in range(_MOST_TURNS):
        outs = turn(carry)
        if isinstance(outs, str):
            return f"inside {name}, {outs}"
        grown = [_either(a, b) for a, b in zip(carry, outs, strict=False)]
        if any(a is not None and a.shape[-1] > MOST_SOURCES for a in grown):
            return f"{name} joins more than {MOST_SOURCES} elements"
        same = all(
            (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
            for a, b in zip(carry, grown, strict=True)
        )
        if same:
            return [*grown, *outs[len(carry) :]]
        carry = grown
    return f"{name} spreads over more units at every turn"


def _scan(eqn: Equation, arrays: list[Sources], offsets: np.ndarray) -> list[Sources] | str:
    first, n_carry = scan_layout(eqn.params)
    last = first + n_carry
    slices = [None if a is None else union(list(a)) for a in arrays[last:]]
    if any(a is not None and a.shape[-1] > MOST_SOURCES for a in slices):
        return f"scan over an axis of more than {MOST_SOURCES} elements"
    turn = lambda carry: _body(eqn.params["jaxpr"], [*arrays[:first], *carry, *slices], offsets)
    outs = _turns("scan", turn, [None if a is None else union([a]) for a in arrays[first:last]])
    if isinstance(outs, str):
        return outs
    stacked = [
        None if a is None else np.broadcast_to(a, (eqn.params["length"], *a.shape))
        for a in outs[n_carry:]
    ]
    return [*outs[:n_carry], *stacked]


def _while(eqn: Equation, arrays: list[Sources], offsets: np.ndarray) -> list[Sources] | str:
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    turn = lambda carry: _body(eqn.params["body_jaxpr"], [*arrays[first:last], *carry], offsets)
    return _turns("while", turn, arrays[last:])


_BODIES: dict[str, Callable[..., list[Sources] | str]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}


def _fold(eqn: Equation, values: list[Any], known: dict[Var, np.ndarray]) -> None:
    """Compute integers that depend on nothing: indices of gathers, slices and rolls."""
    small = all(v.size <= _MOST_KNOWN for v in eqn.outputs)
    plain = all(jax.dtypes.issubdtype(v.dtype, np.integer) or v.dtype == bool for v in eqn.outputs)
    if eqn.effects or not (small and plain and all(v is not None for v in values)):
        return
    with jax.ensure_compile_time_eval():
        out = bind(eqn, values)
    known.update((var, np.asarray(o)) for var, o in zip(eqn.outputs, out, strict=True))
