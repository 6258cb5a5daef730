"""Which elements of the entry states and operator outputs does each exit element read?

The abstract value of a variable is an integer array of its shape plus one axis: the indices of the
source elements it reads, padded with NONE. Data movement runs on these arrays, element-wise
equations take unions, bodies of control flow are walked iteration by iteration or until their sets
no longer grow. What mixes is cut, the equation counts as constant, and recorded; or, for rules that
keep everything, followed. Two units, `h' = 0.9 * h + y[::-1]`, where h is elements 0 and 1 of the
sources, y elements 2 and 3:

    0.9 * h    [[0], [1]]          data in place: one source per element
    y[::-1]    [[3], [2]]          data moved: so are the indices
    h'         [[3, 0], [2, 1]]    element-wise: the union

and `h' = h - mean(h)` is [[0], [1]], with the reduce_sum of the mean among the cuts.

A sum takes each element to one result. It is kept where every result ends, now and at later steps,
in at most one position of each state shape: then it stays within a unit. `influence` gives the
results of sums indices of their own (*probes*) and looks where they end. The mean above has probe
4: h' = [[4, 0], [4, 1]], so 4 ends in two units, and the sum is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np

from ..program import (
    Atom,
    Body,
    Const,
    Equation,
    Program,
    Var,
    is_traced,
    reads_named_axis,
    scan_layout,
)
from ._memory import taken
from ._moves import Width, fold, incidence, width
from ._reach import bits_of, indices_of, reach
from ._rings import assumed, cases
from ._sets import (
    MOST_SOURCES,
    NONE,
    TOO_MANY,
    Fact,
    Facts,
    Nonzero,
    Sources,
    combined,
    distinct,
    empty,
    facts_of,
    few_of,
    too_many,
    union,
)
from ._tangent import Tangent

_LOOKED_AT = 256  # results of an equation that are looked at for a line of the report
_FEW_ITERATIONS = 16  # a loop in which sets grow for twice as many is given up, if it repeats
_MOST_ITERATIONS = 512  # and so is one of so many whose iterations read different sources
EVERYTHING = np.inf
MOST_SLOTS = 64  # elements of a sum within a channel, and state elements of one


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """An equation whose tangent is dropped, and the indices of the sources that reached it.

    A result reads so many elements; `rows` are the sources of each, for sums and products of a few.
    """

    equation: Equation
    sources: frozenset[int]
    reason: str
    reads: float
    rows: np.ndarray | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Influence:
    """The result of the walk.

    `rows[c]` is (size of component c, m): the sources of each exit element. `offsets[s]` is the
    index of the first element of source s (entries, then tap parts; one past the end last).
    `lost[c]` are the cuts on paths that would have reached component c. `bodies` are the kept
    equations of control flow, with the outputs that are tangents. `meetings[c]` is the first
    equation whose result reads several elements of entry component c, where nothing adds up.
    """

    rows: tuple[np.ndarray, ...]
    offsets: np.ndarray
    cuts: tuple[Cut, ...]
    lost: tuple[frozenset[int], ...]
    bodies: Mapping[Equation, tuple[int, ...]]
    meetings: Mapping[int, Equation]


Values = list[Sources]  # None is a value without a tangent
# From the rows of a walk and the indices of the probes: which probes end in several units.
Offends = Callable[[tuple[np.ndarray, ...], np.ndarray, int], np.ndarray]


def influence(
    tangent: Tangent,
    time_axes: Sequence[tuple[int, ...]],
    facts: Mapping[Var, Fact],
    offends: Offends | None,
    follow: float | None = EVERYTHING,
    parts: Mapping[Var, tuple[Atom, int]] | None = None,
) -> Influence:
    """Walk the tangent program.

    Args:
        tangent: the program; its taps have an axis for every scan around the operator.
        time_axes: per tap, the axes that are more time: their iterations count as one source.
        facts: what the analysis may know of inputs, see `facts_of`.
        offends: which probes mix units; None follows what mixes instead of cutting it:
        follow: sums and products of at most so many elements, or `EVERYTHING`.
        parts: the value and axis that a variable without a tangent has a few samples of.
    """
    # Whether a sum mixes depends on which others are kept. Of three sums in a row, each with the
    # probe of its result, over states g (units, 2) and h (units,):
    #
    #     s = g.sum(1)      a result per unit: its probe ends in one unit as long as m is cut
    #     m = s.mean()      its probe ends in all units, whatever else is cut: certain
    #     h' = h + s - m    with m kept, the probes of s reach all units through it
    #
    # So the first walk cuts all sums and finds m; the second one keeps s and finds nothing more. A
    # sum that mixes only together with others is found by a walk that keeps them: of these, those
    # that still mix when all of them are cut are cut for certain, else the last one.
    walk = _Walk(tangent, time_axes, facts, follow if offends is None else None, parts or {})
    if offends is None:
        return walk.result(frozenset())
    # Sums that mix even if all sums are cut are cut for certain; that needs no large sets.
    result = walk.result(frozenset(), cut_all=True)
    if not walk.probes:
        return result
    cut = frozenset(walk.offending(offends, frozenset()))
    while True:
        result = walk.result(cut)
        bad = walk.offending(offends, cut)
        if not bad:
            return result
        # So are those that mix even if all that do are cut; if there are none, the last one.
        walk.result(cut | bad.keys())
        certain = {e for e in walk.offending(offends, cut | bad.keys(), probe_cut=True) if e in bad}
        cut |= certain or {list(bad)[-1]}


def _is_never_followed(eqn: Equation) -> bool:
    """Whether an equation is no derivative of one unit by another within the learner.

    `psum` over an axis with a name joins the calls that a `vmap` around the learner maps: a trace
    has the tangents of its own call only. A `custom_vjp_call` here is one without a tangent.
    """
    return reads_named_axis(eqn) or eqn.name == "custom_vjp_call"


class _Walk:
    # One walk gives the sets of all values; which sums are kept is not known before it. With h of
    # two units (sources 0, 1) and `s = sum(h)`, `h' = h - s`, s is probed:
    #
    #     s     [0, 1, 2]               2 is its probe: the source "result of this sum"
    #     h'    [[0, 1, 2], [0, 1, 2]]  2 ends in two units, so the sum is among `cut_sums`
    #     h'    [[0, 2], [1, 2]]        of the next walk: s is a constant with a probe
    #
    # A loop is walked in one of these ways, the first that applies (`each_iteration`, else
    # `until_stable`). For `length` iterations with the carry c_t and the slices x_t:
    #
    #     not alike       the x_t read different sources: every iteration, up to 512 of them
    #     alike           every iteration, until
    #       search          a carry comes again, c_t = c_s: from there all repeats (unless the body
    #                       reads a counter: `repeats` walks the cycle again without the facts)
    #       grown           or sets grew in more than 32 iterations: given up
    #     otherwise       the union over iterations, again until it no longer grows
    def __init__(self, tangent: Tangent, time_axes, facts, follow: float | None, parts):
        self.tangent, self.facts, self.parts = tangent, facts, parts
        self.follow, self.full = follow, follow is not None
        self.sources: dict[Var, np.ndarray] = {}
        sizes = []
        taps = [((), v) for v in tangent.entries]
        for axes, tap in zip(time_axes, tangent.taps, strict=True):
            taps += [(axes, v) for v in tap]
        start = 0
        for axes, var in taps:
            one = tuple(1 if i in axes else n for i, n in enumerate(var.shape))
            count = prod(one)
            own = np.arange(start, start + count).reshape((*one, 1))
            self.sources[var] = np.broadcast_to(own, (*var.shape, 1))
            sizes.append(count)
            start += count
        self.offsets = np.cumsum([0, *sizes])
        self.mixing: set[Equation] = set()  # of earlier walks too
        self.cases = cases(tangent.program)
        self.coupled = any(c.coupled is not None for c in tangent.components)

    def result(self, cut_sums: frozenset[Equation], cut_all: bool = False) -> Influence:
        """Walk once with these sums cut, or all of them."""
        self.cut_sums, self.cut_all = cut_sums, cut_all
        self.cuts: dict[Equation, tuple[set[int], Width]] = {}
        self.cut_rows: dict[Equation, np.ndarray] = {}
        self.bodies: dict[Equation, tuple[int, ...]] = {}
        self.probes: dict[Equation, tuple[int, int]] = {}
        self.meetings: dict[int, Equation] = {}
        self.last = int(self.offsets[-1])
        self.live = None if cut_all or self.full else self.alive()
        self.held: dict[int, int] = {}  # bytes of the sets of all variables, by array
        self.bytes = 0
        program = self.tangent.program
        again = len(self.cases) > 1 or any(e.bodies for e in program.equations)
        while True:
            before = len(self.cuts)
            exits: Values = [None] * len(self.tangent.exits)
            for case in self.cases:
                self.case = case
                ends = self.program(
                    program, dict(self.sources), dict(self.facts), self.tangent.exits
                )
                exits = [_either(a, b) for a, b in zip(exits, ends, strict=True)]
            if len(self.cuts) == before or not again:
                break  # a cut may come after an iteration or a case that went without it
        after = {o: 1 << i for i, e in enumerate(self.cuts) for o in e.outputs}
        bits = reach(program, after) if after else {}
        lost = [frozenset(indices_of(bits_of(e, bits))) for e in self.tangent.exits]
        rows = []
        for component, value in zip(self.tangent.components, exits, strict=True):
            size = prod(component.shape)
            rows.append(empty((size,)) if value is None else value.reshape(size, value.shape[-1]))
        self.rows = tuple(rows)
        plain = tuple(_without(r, self.offsets[-1]) for r in rows)
        cuts = tuple(
            Cut(e, frozenset(s), what.why, what.reads, self.cut_rows.get(e))
            for e, (s, what) in self.cuts.items()
        )
        found = dict(self.meetings)
        return Influence(plain, self.offsets, cuts, tuple(lost), dict(self.bodies), found)

    def alive(self) -> set[Atom]:
        """The values with a path to an exit that meets nothing of what is cut for certain."""
        # In `h' = 0.9 * h + mean(r)` with `r = tanh(h)` all of r leads to the mean alone, which is
        # cut: r is not live. Its sets would be of the size of h and nobody reads them, but for the
        # name of what is cut (`rough`). The body of a loop is walked anyway.
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
        candidates = {e: r for e, r in self.probes.items() if probe_cut or e not in cut}
        if not candidates:
            return {}
        bad = offends(self.rows, self.offsets, self.last)
        return {e: None for e, (low, high) in candidates.items() if bad[low:high].any()}

    # ------------------------------------------------------------------------------- programs

    def program(
        self,
        program: Program,
        env: dict[Var, np.ndarray],
        facts: dict[Var, Fact],
        outputs: Sequence[Atom],
    ) -> Values:
        def value_of(atom: Atom) -> Sources:
            return env.get(atom) if isinstance(atom, Var) else None

        def fact_of(atom: Atom) -> Fact:
            if isinstance(atom, Const):
                return None if is_traced(atom.value) else atom.value
            if atom in self.case:
                return assumed(atom, self.case)
            if atom in self.parts:
                whole, axis = self.parts[atom]
                return few_of(fact_of(whole), axis, atom.shape[axis])
            return facts.get(atom)

        for eqn in program.equations:
            values = [value_of(a) for a in eqn.inputs]
            if all(v is None for v in values):
                folded = fold(eqn, [fact_of(a) for a in eqn.inputs])
                facts.update((v, k) for v, k in zip(eqn.outputs, folded, strict=True))
            elif eqn.name == "stop_gradient":
                continue
            elif program is self.tangent.program and self.leads_nowhere(eqn):
                env.update((v, self.rough(v, values)) for v in eqn.outputs)
            else:
                outs = self.equation(eqn, values, [fact_of(a) for a in eqn.inputs])
                env.update((v, m) for v, m in zip(eqn.outputs, outs, strict=True) if m is not None)
                if program is self.tangent.program:
                    self.count(outs)
        self.output_facts = [fact_of(o) for o in outputs]
        return [value_of(o) for o in outputs]

    def count(self, values: Values) -> None:
        """Count the memory of new sets; variables share those that are the same."""
        for array in values:
            if array is None:
                continue
            own = array if array.base is None else array.base
            if id(own) not in self.held:
                self.held[id(own)] = own.nbytes
                self.bytes += own.nbytes
        taken(self.bytes)

    def leads_nowhere(self, eqn: Equation) -> bool:
        walked = eqn.bodies or eqn in self.mixing or eqn in self.cut_sums
        return self.live is not None and not walked and not any(o in self.live for o in eqn.outputs)

    def rough(self, var: Var, values: Values) -> np.ndarray:
        """Sets of which only the sources matter, which are named where they are cut."""
        first = self.offsets[sorted(self.source_indices(values))]
        return np.broadcast_to(first, (*var.shape, len(first)))

    def source_indices(self, values: Values) -> set[int]:
        """The indices of the sources of values."""
        out: set[int] = set()
        for value in values:
            if value is not None:
                elements = distinct(value + 1, self.last + 1) - 1  # NONE is -1
                elements = elements[(elements != NONE) & (elements < self.offsets[-1])]
                out.update((np.searchsorted(self.offsets, elements, side="right") - 1).tolist())
        return out

    def equation(self, eqn: Equation, values: Values, facts: Facts) -> Values:
        if eqn in self.cuts:
            return self.cut(eqn, values, self.cuts[eqn][1])
        if eqn.bodies:
            rule = {"cond": self.cond, "scan": self.scan, "while": self.loop}[eqn.name]
            outs = rule(eqn, values, facts)
            if isinstance(outs, str):
                return self.cut(eqn, values, Width(np.inf, True, outs))
            self.bodies[eqn] = tuple(k for k, v in enumerate(outs) if v is not None)
            return outs
        what = width(eqn, values, facts)
        joins = what.reads > 1
        # What mixes may end within a unit, too, if units have several elements.
        adds = joins and not self.full and (not what.fans or self.joins_within(what))
        if eqn in self.cut_sums or (self.cut_all and adds):
            self.note(eqn, values, facts, what)
            return self.probed(eqn, self.cut(eqn, values, what))
        follows = not self.stops(eqn, what) if self.full else adds
        result = incidence(eqn, values, facts) if follows or not joins else what.why
        if not isinstance(result, str) and any(too_many(r.shape[:-1], r.shape[-1]) for r in result):
            result = f"{eqn.name} {TOO_MANY}"
        if isinstance(result, str):
            self.mixing.add(eqn)
            self.note(eqn, values, facts, what)
            return self.cut(eqn, values, replace(what, why=result))
        if not joins:
            self.meet(eqn, values, result[0])
        out: Values = [*result]
        if eqn.name == "shard_map":  # values and tangents come out side by side
            out = [v if v is not None and v.shape[-1] else None for v in out]
            self.bodies[eqn] = tuple(k for k, v in enumerate(out) if v is not None)
        return self.probed(eqn, out) if adds else out

    def meet(self, eqn: Equation, arrays: list[Sources], result: np.ndarray) -> None:
        """Note the components of which several elements meet in a result, of the first of them."""
        if result.shape[-1] <= max(a.shape[-1] for a in arrays if a is not None):
            return
        # `h + h[::-1]` is [[0, 1], [1, 0]]: sorted, neighbours 0 and 1 are of the same component,
        # so h is noted. `h + y` is [[0, 2], [1, 3]], of a component and a tap: nothing meets.
        some = np.sort(result.reshape(-1, result.shape[-1])[:_LOOKED_AT], -1)
        component = np.searchsorted(self.offsets, some, side="right") - 1
        same = (component[:, 1:] == component[:, :-1]) & (some[:, :-1] != NONE)
        same &= some[:, 1:] < self.offsets[len(self.tangent.entries)]
        for c in np.unique(component[:, 1:][same]).tolist():
            self.meetings.setdefault(c, eqn)

    def joins_within(self, what: Width) -> bool:
        return self.coupled and what.reads <= MOST_SLOTS

    def note(self, eqn: Equation, arrays: list[Sources], facts: Facts, what: Width) -> None:
        """Record what the results of a sum or product of a few elements read."""
        few = not self.full and not self.cut_all and what.reads <= MOST_SLOTS
        if few and sum(a.size for a in arrays if a is not None) <= MOST_SOURCES // MOST_SLOTS:
            found = incidence(eqn, arrays, facts)
            if not isinstance(found, str) and found[0].size:
                self.cut_rows[eqn] = found[0].reshape(-1, found[0].shape[-1])

    def stops(self, eqn: Equation, what: Width) -> bool:
        """Whether a walk that follows what mixes does not follow this."""
        return _is_never_followed(eqn) or what.reads > (self.follow or 0)

    def cut(self, eqn: Equation, values: Values, what: Width) -> Values:
        sources, _ = self.cuts.setdefault(eqn, (set(), what))
        sources |= self.source_indices(values)
        return [empty(v.shape) for v in eqn.outputs]

    def probed(self, eqn: Equation, outs: Values) -> Values:
        """Add a probe for each result to its set, to see where it ends."""
        (value,) = outs
        assert value is not None
        shape = value.shape[:-1]
        size = prod(shape)
        if eqn not in self.probes:
            self.probes[eqn] = (self.last, self.last + size)
            self.last += size
        own = np.arange(*self.probes[eqn]).reshape((*shape, 1))
        return [union([value, own])]

    # --------------------------------------------------------------------------------- bodies
    # Values and tangents come out side by side; a value (no tangent) is None.

    def body(self, body: Body, values: Sequence[Sources], inputs: Sequence[Fact] = ()) -> Values:
        """Walk a body; `inputs` are the facts about its inputs, those that are missing None."""
        program = body.program
        env = {v: m for v, m in zip(program.inputs, values, strict=True) if m is not None}
        facts = facts_of(program.consts, body.values)
        pairs = zip(program.inputs, inputs, strict=False)
        facts.update((v, fact) for v, fact in pairs if fact is not None)
        return self.program(program, env, facts, program.outputs)

    def cond(self, eqn: Equation, values: Values, facts: Facts) -> Values | str:
        outs: Values = [None] * len(eqn.outputs)
        for body in eqn.bodies:
            branch = self.body(body, values[1:])
            outs = [_either(a, b) for a, b in zip(outs, branch, strict=True)]
        return outs

    def scan(self, eqn: Equation, values: Values, facts: Facts) -> Values | str:
        first, n_carry = scan_layout(eqn.params)
        last, length = first + n_carry, eqn.params["length"]
        consts, carry, xs = values[:first], values[first:last], values[last:]
        (body,) = eqn.bodies
        rows = self.each_iteration(eqn, values, facts)
        if rows is not None:
            rows, carry = rows[:-1], rows[-1][:n_carry]
            rows = rows[::-1] if eqn.params["reverse"] else rows
            if not rows:
                return [*carry, *(None for _ in eqn.outputs[n_carry:])]
            ys = [row[n_carry:] for row in rows]
            return [*carry, *(_stacked(column) for column in zip(*ys, strict=True))]
        slices = [_moved(x, lambda sources: union(list(sources))) for x in xs]
        outs = self.until_stable(
            "scan", lambda c: self.body(body, [*consts, *c, *slices], facts[:first]), carry
        )
        if isinstance(outs, str):
            return outs
        repeat = lambda sources: np.broadcast_to(sources, (length, *sources.shape))
        return [*outs[:n_carry], *(_moved(v, repeat) for v in outs[n_carry:])]

    def each_iteration(self, eqn: Equation, values: Values, facts: Facts) -> list[Values] | None:
        """Per iteration of a scan the carry that enters and the ys, then the last carry.

        None if there are too many iterations, or their sets grow for too long.
        """
        first, n = scan_layout(eqn.params)
        last, length = first + n, eqn.params["length"]
        consts, xs = values[:first], values[last:]
        alike = all(x is None or _alike(x) for x in xs)
        if length > _MOST_ITERATIONS and not alike:
            return None
        rows: list[Values] = []
        carry, counters = values[first:last], facts[first:last]
        search, grown = alike, 0

        def iteration(t: int, carry: Values, varying: Sequence[Fact] = ()) -> Values:
            inputs = [*consts, *carry, *(_moved(x, lambda sources: sources[t]) for x in xs)]
            return self.body(eqn.bodies[0], inputs, [*facts[:first], *varying])

        # Of 100 iterations that swap two units, c' = c[::-1] from c_0 = [[0], [1]], y = c:
        #
        #     rows[0]    c_0 = [[0], [1]], y_0        what enters the iteration, what it returns
        #     rows[1]    c_1 = [[1], [0]], y_1
        #     carry      c_2 = c_0                    s = 0: a cycle of two rows
        #
        # Row k is then rows[k % 2], and the carry that leaves is that of row 100, c_0.
        for t in range(length)[:: -1 if eqn.params["reverse"] else 1]:
            slices = [_fact_at(k, t) for k in facts[last:]]
            outs = iteration(t, carry, [*counters, *slices])
            counters = self.output_facts[:n]
            rows.append([*carry, *outs[n:]])
            grown += _width(outs[:n]) > _width(carry)
            carry = outs[:n]
            # Once a carry comes again, so does all that follows, unless it reads a counter.
            for s in sorted({0, 1, len(rows) - 1}.intersection(range(len(rows)))):
                if search and _all_same(rows[s][:n], carry):
                    cycle = [*rows[s:], [*carry, *outs[n:]]]
                    search = self.repeats(partial(iteration, t), cycle, n)
                    if search:
                        more = range(len(rows), length + 1)
                        return [*rows, *(cycle[(k - s) % (len(cycle) - 1)] for k in more)]
            if alike and (grown > 2 * _FEW_ITERATIONS or _MOST_ITERATIONS == len(rows) < length):
                return None
        return [*rows, carry]

    def repeats(self, iteration: Callable[[Values], Values], rows: list[Values], n: int) -> bool:
        """Whether these iterations are the same without the facts about counters."""
        cuts, mixing = {e: (set(s), why) for e, (s, why) in self.cuts.items()}, set(self.mixing)
        same = True
        for row, after in pairwise(rows):
            outs = iteration(row[:n])
            same = same and _all_same(outs[:n], after[:n]) and _all_same(outs[n:], row[n:])
        self.cuts, self.mixing = (self.cuts, self.mixing) if same else (cuts, mixing)
        return same

    def loop(self, eqn: Equation, values: Values, facts: Facts) -> Values | str:
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        consts, about = values[first:last], facts[first:last]
        iteration = lambda carry: self.body(eqn.bodies[1], [*consts, *carry], about)
        return self.until_stable("while", iteration, values[last:])

    def until_stable(
        self, name: str, iteration: Callable[[Values], Values], carry: Values
    ) -> Values | str:
        """The sets of a loop's carry, and of its other results, once they no longer grow."""
        # Sets can only grow, and there are finitely many sources, so this ends; `c + c[::-1]`:
        #
        #     [[0], [1]]    [[0, 1], [1, 0]]    the same again: two iterations
        #
        # A shift by one place, `c + roll(c)`, takes as many iterations as there are places: it is
        # given up long before, unless everything is followed.
        for _ in range(_MOST_ITERATIONS if self.follow == EVERYTHING else 2 * _FEW_ITERATIONS):
            outs = iteration(carry)
            grown = [_either(a, b) for a, b in zip(carry, outs, strict=False)]
            if all(_same(a, b) for a, b in zip(carry, grown, strict=True)):
                return [*grown, *outs[len(carry) :]]
            carry = grown
        return f"{name} spreads over more units at every iteration"


def _without(row: np.ndarray, limit: int) -> np.ndarray:
    """Rows of sources without the probes."""
    if not (row >= limit).any():
        return row
    return union([np.where(row < limit, row, NONE)])


def _fact_at(fact: Fact, t: int) -> Fact:
    """A fact about a value, at one iteration."""
    if isinstance(fact, Nonzero):
        return Nonzero(fact.where[t])
    return None if fact is None else np.asarray(fact)[t]


def _moved(value: Sources, move: Callable[[np.ndarray], np.ndarray]) -> Sources:
    return None if value is None else move(value)


def _either(a: Sources, b: Sources) -> Sources:
    if a is None or b is None:
        return b if a is None else a
    return union([a, b])


def _alike(sources: np.ndarray) -> bool:
    """Whether all iterations read the same."""
    return np.array_equal(sources, np.broadcast_to(sources[:1], sources.shape))


def _width(values: Values) -> int:
    """How many sources an element reads at most."""
    return max((v.shape[-1] for v in values if v is not None), default=0)


def _all_same(a: Values, b: Values) -> bool:
    return all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(a: Sources, b: Sources) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(union([a]), b)


def _stacked(values: Sequence[Sources]) -> Sources:
    shapes = [v.shape[:-1] for v in values if v is not None]
    if not shapes:
        return None
    return combined(values, shapes[:1] * len(values), lambda *slices: np.stack(slices))
