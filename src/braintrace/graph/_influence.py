"""Which elements of the entry states and operator outputs does each exit element read?

The abstract value of a variable is an integer array of its shape plus one axis: the numbers of the
source elements it reads, padded with NONE. Data movement runs on these arrays, element-wise
equations take unions, bodies of control flow are walked turn by turn or until their sets no longer
grow. What mixes is cut, the equation counts as constant, and recorded; or, for rules that keep
everything, followed.

A sum takes each element to one result. It is kept where every result ends, now and at later steps,
in at most one position of each state shape: then it stays within a unit. `influence` finds this
out by giving the results of sums numbers of their own (*probes*) and looking where they end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from .._jaxpr import (
    Atom,
    Body,
    Const,
    Equation,
    Program,
    Var,
    is_traced,
    scan_layout,
)
from ._moves import fold, is_sum, move, spread, summands
from ._sets import MOST_SOURCES, NONE, Nonzero, facts, union
from ._tangent import Tangent

_FEW_TURNS = 16  # a loop of so many turns is always walked turn by turn
_MOST_TURNS = 512  # and so is one of so many whose turns read different sources
_SUM = "{} adds up units"
EVERYTHING = 1 << 62
MOST_SLOTS = 64  # elements of a sum within a channel, and state elements of one


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """An equation whose tangent is dropped, and the sources (by number) that reached it.

    `rows` are the source elements that each result reads, known for sums and products of a few.
    """

    equation: Equation
    sources: frozenset[int]
    reason: str
    rows: np.ndarray | None = None


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
    bodies: Mapping[Equation, tuple[int, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    sources: np.ndarray  # (*shape, m)
    lost: frozenset[Equation]
    roughly: frozenset[int] = frozenset()  # sources (by number) of what leads to cuts only


Values = list[_Value | None]
# From the rows of a walk and the numbers of the probes: which probes end in several units.
Offends = Callable[[tuple[np.ndarray, ...], np.ndarray, int], np.ndarray]


def influence(
    tangent: Tangent,
    time_axes: Sequence[tuple[int, ...]],
    known: Mapping[Var, np.ndarray],
    offends: Offends | None,
    follow: int | None = EVERYTHING,
) -> Influence:
    """Walk the tangent program.

    Args:
        tangent: the program; its taps have an axis for every scan around the operator.
        time_axes: per tap, the axes that are more time: their turns count as one source.
        known: integer inputs whose value is known.
        offends: which probes mix units; None follows what mixes instead of cutting it:
        follow: sums and products of at most so many elements, or `EVERYTHING`.
    """
    walk = _Walk(tangent, time_axes, known, follow if offends is None else None)
    if offends is None:
        return walk.result(frozenset())
    # Sums that mix even if all sums are cut are cut for certain; that needs no large sets.
    found = walk.result(frozenset(), cut_all=True)
    if not walk.probes:
        return found
    cut = frozenset(walk.offending(offends, frozenset()))
    while True:
        found = walk.result(cut)
        bad = walk.offending(offends, cut)
        if not bad:
            return found
        # So are those that mix even if all that do are cut; if there are none, the last one.
        walk.result(cut | bad.keys())
        sure = {e for e in walk.offending(offends, cut | bad.keys(), probe_cut=True) if e in bad}
        cut |= sure or {list(bad)[-1]}


class _Walk:
    def __init__(self, tangent: Tangent, time_axes, known, follow: int | None):
        self.tangent, self.known = tangent, known
        self.follow, self.full = follow, follow is not None
        self.sources: dict[Var, np.ndarray] = {}
        counts = []
        taps = [((), v) for v in tangent.entries]
        for axes, tap in zip(time_axes, tangent.taps, strict=True):
            taps += [(axes, v) for v in tap]
        start = 0
        for axes, var in taps:
            one = tuple(1 if i in axes else n for i, n in enumerate(var.shape))
            count = int(np.prod(one, dtype=np.int64))
            own = np.arange(start, start + count).reshape((*one, 1))
            self.sources[var] = np.broadcast_to(own, (*var.shape, 1))
            counts.append(count)
            start += count
        self.offsets = np.cumsum([0, *counts])
        self.mixing: set[Equation] = set()  # found in earlier walks too

    def result(self, cut_sums: frozenset[Equation], cut_all: bool = False) -> Influence:
        """Walk once with these sums cut, or all of them."""
        self.cut_sums, self.cut_all = cut_sums, cut_all
        self.cuts: dict[Equation, tuple[set[int], str]] = {}
        self.cut_rows: dict[Equation, np.ndarray] = {}
        self.bodies: dict[Equation, tuple[int, ...]] = {}
        self.probes: dict[Equation, tuple[int, int]] = {}
        self.last = int(self.offsets[-1])
        self.live = None if cut_all or self.full else self.alive()
        env = {v: _Value(s, frozenset()) for v, s in self.sources.items()}
        program = self.tangent.program
        while True:
            before = len(self.cuts)
            exits = self.program(program, dict(env), dict(self.known), self.tangent.exits)
            if len(self.cuts) == before or not any(e.bodies for e in program.equations):
                break  # a cut inside a body may have come after a turn that went without it
        number = {e: i for i, e in enumerate(self.cuts)}
        rows, lost = [], []
        for component, value in zip(self.tangent.components, exits, strict=True):
            size = int(np.prod(component.shape, dtype=np.int64))
            found = np.full((size, 0), NONE) if value is None else value.sources
            rows.append(found.reshape(size, found.shape[-1]))
            lost.append(frozenset() if value is None else frozenset(number[e] for e in value.lost))
        self.rows = tuple(rows)
        plain = tuple(_without(r, self.offsets[-1]) for r in rows)
        cuts = tuple(
            Cut(e, frozenset(s), why, self.cut_rows.get(e)) for e, (s, why) in self.cuts.items()
        )
        return Influence(plain, self.offsets, cuts, tuple(lost), dict(self.bodies))

    def alive(self) -> set[Atom]:
        """The values from which there is a way to an exit past everything known to be cut."""
        live: set[Atom] = set(self.tangent.exits)
        cut = self.mixing | self.cut_sums
        for eqn in reversed(self.tangent.program.equations):
            leads = any(o in live for o in eqn.outputs) and eqn not in cut
            if leads or eqn.bodies:
                live.update(eqn.inputs)
        return live

    def offending(
        self, offends: Offends, cut: frozenset[Equation] | set, probe_cut: bool = False
    ) -> dict[Equation, None]:
        """The sums of the last walk whose results end in several units, in program order."""
        chosen = {e: r for e, r in self.probes.items() if probe_cut or e not in cut}
        if not chosen:
            return {}
        bad = offends(self.rows, self.offsets, self.last)
        return {e: None for e, (low, high) in chosen.items() if bad[low:high].any()}

    # ------------------------------------------------------------------------------- programs

    def program(
        self,
        program: Program,
        env: dict[Var, _Value],
        known: dict[Var, Any],
        outputs: Sequence[Atom],
    ) -> Values:
        def value_of(atom: Atom) -> _Value | None:
            return env.get(atom) if isinstance(atom, Var) else None

        def known_of(atom: Atom) -> Any:
            if isinstance(atom, Const):
                return None if is_traced(atom.value) else atom.value
            return known.get(atom)

        for eqn in program.equations:
            values = [value_of(a) for a in eqn.inputs]
            if all(v is None for v in values):
                facts = fold(eqn, [known_of(a) for a in eqn.inputs])
                known.update((v, k) for v, k in zip(eqn.outputs, facts, strict=True))
            elif eqn.name == "stop_gradient":
                continue
            elif program is self.tangent.program and self.leads_nowhere(eqn):
                env.update((v, self.rough(v, values)) for v in eqn.outputs)
            else:
                made = self.equation(eqn, values, [known_of(a) for a in eqn.inputs])
                env.update((v, m) for v, m in zip(eqn.outputs, made, strict=True) if m is not None)
        self.known_outputs = [known_of(o) for o in outputs]
        return [value_of(o) for o in outputs]

    def leads_nowhere(self, eqn: Equation) -> bool:
        known = eqn.bodies or eqn in self.mixing or eqn in self.cut_sums
        return self.live is not None and not known and not any(o in self.live for o in eqn.outputs)

    def rough(self, var: Var, values: Values) -> _Value:
        """A value of which only the sources as a whole matter: they are named where it is cut."""
        lost = frozenset().union(*(v.lost for v in values if v is not None))
        return _Value(np.full((*var.shape, 0), NONE), lost, frozenset(self.numbers(values)))

    def numbers(self, values: Values) -> set[int]:
        """The sources of values, by number."""
        out: set[int] = set()
        for value in values:
            if value is not None:
                met = np.unique(value.sources)
                met = met[(met != NONE) & (met < self.offsets[-1])]
                out.update((np.searchsorted(self.offsets, met, side="right") - 1).tolist())
                out |= value.roughly
        return out

    def equation(self, eqn: Equation, values: Values, known: list[Any]) -> Values:
        arrays = [None if v is None else v.sources for v in values]
        lost = frozenset().union(*(v.lost for v in values if v is not None))
        if eqn in self.cuts:
            return self.cut(eqn, values, lost, self.cuts[eqn][1])
        if eqn.bodies:
            rule = {"cond": self.cond, "scan": self.scan, "while": self.loop}[eqn.name]
            outs = rule(eqn, values, known)
            if isinstance(outs, str):
                return self.cut(eqn, values, lost, outs)
            self.bodies[eqn] = tuple(k for k, v in enumerate(outs) if v is not None)
            return outs
        adds = is_sum(eqn, arrays, known)
        if eqn in self.cut_sums or (self.cut_all and adds):
            self.note(eqn, arrays, known)
            return self.probed(eqn, self.cut(eqn, values, lost, _SUM.format(eqn.name)))
        result = _SUM.format(eqn.name) if adds and self.stops(eqn) else move(eqn, arrays, known)
        if isinstance(result, str) and self.full and not self.stops(eqn):
            result = spread(eqn, arrays, known)
        if not isinstance(result, str) and any(r.size > MOST_SOURCES for r in result):
            result = f"{eqn.name} joins too many elements"
        if isinstance(result, str):
            self.mixing.add(eqn)
            self.note(eqn, arrays, known)
            return self.cut(eqn, values, lost, result)
        made: Values = [_Value(array, lost) for array in result]
        if eqn.name == "shard_map":  # values and tangents come out side by side
            made = [m if r.shape[-1] else None for m, r in zip(made, result, strict=True)]
            self.bodies[eqn] = tuple(k for k, m in enumerate(made) if m is not None)
        return self.probed(eqn, made) if not self.full and adds else made

    def note(self, eqn: Equation, arrays: list[Any], known: list[Any]) -> None:
        """Keep what the results of a sum or product of a few elements read."""
        few = not self.full and not self.cut_all and summands(eqn) <= MOST_SLOTS
        if few and sum(a.size for a in arrays if a is not None) <= MOST_SOURCES // MOST_SLOTS:
            found = move(eqn, arrays, known)
            (rows,) = spread(eqn, arrays, known) if isinstance(found, str) else found
            if rows.size:
                self.cut_rows[eqn] = rows.reshape(-1, rows.shape[-1])

    def stops(self, eqn: Equation) -> bool:
        """Whether a walk that follows what mixes does not follow this."""
        return self.follow not in (None, EVERYTHING) and summands(eqn) > (self.follow or 0)

    def cut(self, eqn: Equation, values: Values, lost, reason: str) -> Values:
        sources, _ = self.cuts.setdefault(eqn, (set(), reason))
        sources |= self.numbers(values)
        empty = [np.full((*v.shape, 0), NONE) for v in eqn.outputs]
        return [_Value(e, lost | {eqn}) for e in empty]

    def probed(self, eqn: Equation, made: Values) -> Values:
        """Add the number of each result to its set, to see where it ends."""
        (value,) = made
        assert value is not None
        shape = value.sources.shape[:-1]
        size = int(np.prod(shape, dtype=np.int64))
        if eqn not in self.probes:
            self.probes[eqn] = (self.last, self.last + size)
            self.last += size
        own = np.arange(*self.probes[eqn]).reshape((*shape, 1))
        return [_Value(union([value.sources, own]), value.lost)]

    # --------------------------------------------------------------------------------- bodies
    # Values and tangents come out side by side; a value (no tangent) is None.

    def body(
        self, body: Body, values: Sequence[_Value | None], integers: Sequence[Any] = ()
    ) -> Values:
        """Walk a body; `integers` are the inputs whose value is known, None for others."""
        program = body.program
        env = {v: m for v, m in zip(program.inputs, values, strict=True) if m is not None}
        known = facts(program.consts, body.values)
        known.update(
            (v, k) for v, k in zip(program.inputs, integers, strict=False) if k is not None
        )
        return self.program(program, env, known, program.outputs)

    def cond(self, eqn: Equation, values: Values, known: list[Any]) -> Values | str:
        merged: Values = [None] * len(eqn.outputs)
        for body in eqn.bodies:
            merged = [
                _either(a, b) for a, b in zip(merged, self.body(body, values[1:]), strict=True)
            ]
        return merged

    def scan(self, eqn: Equation, values: Values, known: list[Any]) -> Values | str:
        first, n_carry = scan_layout(eqn.params)
        last, length = first + n_carry, eqn.params["length"]
        consts, carry, xs = values[:first], values[first:last], values[last:]
        (body,) = eqn.bodies
        rows = self.turn_by_turn(eqn, values, known)
        if rows is not None:
            rows, carry = rows[:-1], rows[-1][:n_carry]
            rows = rows[::-1] if eqn.params["reverse"] else rows
            if not rows:
                return [*carry, *(None for _ in eqn.outputs[n_carry:])]
            ys = [row[n_carry:] for row in rows]
            return [*carry, *(_stacked(column) for column in zip(*ys, strict=True))]
        slices = [None if x is None else _Value(union(list(x.sources)), x.lost) for x in xs]
        found = self.turns(
            "scan", lambda c: self.body(body, [*consts, *c, *slices], known[:first]), carry
        )
        if isinstance(found, str):
            return found
        stacked = [
            None
            if v is None
            else _Value(np.broadcast_to(v.sources, (length, *v.sources.shape)), v.lost)
            for v in found[n_carry:]
        ]
        return [*found[:n_carry], *stacked]

    def turn_by_turn(self, eqn: Equation, values: Values, known: list[Any]) -> list[Values] | None:
        """Per turn of a scan the carry it meets and what it gives beside it, then the last carry.

        None if there are too many turns, or their sets grow for too long.
        """
        first, n = scan_layout(eqn.params)
        last, length = first + n, eqn.params["length"]
        consts, xs = values[:first], values[last:]
        alike = all(x is None or _alike(x.sources) for x in xs)
        if length > _MOST_TURNS and not alike:
            return None
        rows: list[Values] = []
        carry, counters = values[first:last], known[first:last]
        many, search, grown = alike and length > _FEW_TURNS, True, 0

        def turn(t: int, carry: Values, integers: Sequence[Any] = ()) -> Values:
            inputs = [*consts, *carry, *(_at(x, t) for x in xs)]
            return self.body(eqn.bodies[0], inputs, [*known[:first], *integers])

        for t in range(length)[:: -1 if eqn.params["reverse"] else 1]:
            now = [_fact_at(k, t) for k in known[last:]]
            outs = turn(t, carry, [*counters, *now])
            counters = self.known_outputs[:n]
            rows.append([*carry, *outs[n:]])
            grown += _width(outs[:n]) > _width(carry)
            carry = outs[:n]
            # Once a carry comes again, so do all turns after it, unless they read their number.
            seen = [s for s in (0, 1, len(rows) - 1) if s < len(rows)] if many and search else ()
            for s in seen:
                if search and _all_same(rows[s][:n], carry):
                    cycle = [*rows[s:], [*carry, *outs[n:]]]
                    search = self.repeats(partial(turn, t), cycle, n)
                    if search:
                        more = range(len(rows), length + 1)
                        return [*rows, *(cycle[(k - s) % (len(cycle) - 1)] for k in more)]
            if many and (grown > 2 * _FEW_TURNS or _MOST_TURNS == len(rows) < length):
                return None
        return [*rows, carry]

    def repeats(self, turn: Callable[[Values], Values], rows: list[Values], n: int) -> bool:
        """Whether these turns are the same if their numbers are not known."""
        cuts, mixing = {e: (set(s), why) for e, (s, why) in self.cuts.items()}, set(self.mixing)
        same = True
        for row, after in pairwise(rows):
            outs = turn(row[:n])
            same = same and _all_same(outs[:n], after[:n]) and _all_same(outs[n:], row[n:])
        self.cuts, self.mixing = (self.cuts, self.mixing) if same else (cuts, mixing)
        return same

    def loop(self, eqn: Equation, values: Values, known: list[Any]) -> Values | str:
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        body = eqn.bodies[1]
        consts, facts = values[first:last], known[first:last]
        return self.turns("while", lambda c: self.body(body, [*consts, *c], facts), values[last:])

    def turns(self, name: str, turn: Callable[[Values], Values], carry: Values) -> Values | str:
        """The sets of a loop's carry, and of what else a turn gives, once they no longer grow."""
        for _ in range(_MOST_TURNS if self.follow == EVERYTHING else 2 * _FEW_TURNS):
            outs = turn(carry)
            grown = [_either(a, b) for a, b in zip(carry, outs, strict=False)]
            if all(_same(a, b) for a, b in zip(carry, grown, strict=True)):
                return [*grown, *outs[len(carry) :]]
            carry = grown
        return f"{name} spreads over more units at every turn"


def _without(row: np.ndarray, limit: int) -> np.ndarray:
    """Rows of sources without the probes."""
    if not (row >= limit).any():
        return row
    return union([np.where(row < limit, row, NONE)])


def _fact_at(known: Any, t: int) -> Any:
    """What is known of a value, at one turn."""
    if isinstance(known, Nonzero):
        return Nonzero(known.where[t])
    return None if known is None else np.asarray(known)[t]


def _at(value: _Value | None, t: int) -> _Value | None:
    return None if value is None else _Value(value.sources[t], value.lost)


def _either(a: _Value | None, b: _Value | None) -> _Value | None:
    if a is None or b is None:
        return b if a is None else a
    return _Value(union([a.sources, b.sources]), a.lost | b.lost)


def _alike(sources: np.ndarray) -> bool:
    """Whether all turns read the same."""
    return np.array_equal(sources, np.broadcast_to(sources[:1], sources.shape))


def _width(values: Values) -> int:
    """How many sources an element reads at most."""
    return max((v.sources.shape[-1] for v in values if v is not None), default=0)


def _all_same(a: Values, b: Values) -> bool:
    return all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(a: _Value | None, b: _Value | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.lost == b.lost and np.array_equal(union([a.sources]), b.sources)


def _stacked(values: Sequence[_Value | None]) -> _Value | None:
    some = [v for v in values if v is not None]
    if not some:
        return None
    width = max(v.sources.shape[-1] for v in some)
    shape = some[0].sources.shape[:-1]
    out = np.full((len(values), *shape, width), NONE)
    for row, v in zip(out, values, strict=True):
        if v is not None:
            row[..., : v.sources.shape[-1]] = v.sources
    return _Value(out, frozenset().union(*(v.lost for v in some)))
