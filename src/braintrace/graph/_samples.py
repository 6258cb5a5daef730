"""A tangent program that runs along a batch is analysed on one or two of its samples.

If every equation between tangents treats the places along one axis alike and apart, what one sample
reads says what all of them read. `thin` follows that axis through the program, equation by
equation, and makes the same program of a few samples; an equation that joins samples, or one that
it has no rule for, ends the attempt, and the analysis takes the whole batch. Sources are told apart
by their leading axis: with h of shape (32, 4) and y of shape (32, 4) in `h' = 0.9 * h + y`

    the program       add(mul(0.9, h: (32, 4)), y: (32, 4))
    of one sample     add(mul(0.9, h: (1, 4)), y: (1, 4))

Where a source has no such axis (a weight that all samples share), two samples are analysed: it
reaches both, in lanes that do not meet, and so there are 32 of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np

from ..program import Atom, Equation, Line, Program, Var, lines, parameters, scan_layout
from ._influence import Influence
from ._pattern import Pattern, TapPattern
from ._relations import HiddenParamOpRelation
from ._sets import NONE, NotAlike
from ._sites import Site
from ._slots import Cell, Pick, Slots, Table, Tails
from ._slots import pick as as_pick
from ._step import Component, Step
from ._tangent import Tangent, tangent_program


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """A tangent program of `few` of the `size` samples of `whole`.

    `batched[s]` is whether source s (entries, then taps) has the axis of samples, its first;
    `original` the equation of the whole program that an equation comes from, where it is another;
    `parts` the variable and axis that an operand without a tangent is a part of.
    """

    whole: Tangent
    tangent: Tangent
    size: int
    few: int
    batched: tuple[bool, ...]
    original: Mapping[Equation, Equation]
    parts: Mapping[Var, tuple[Atom, int]]

    def of_whole(self, influence: Influence) -> Influence:
        """What the walk found, by the equations of the whole program."""
        original = self.original
        cuts = [replace(c, equation=original.get(c.equation, c.equation)) for c in influence.cuts]
        bodies = {original.get(e, e): outs for e, outs in influence.bodies.items()}
        meetings = {c: original.get(e, e) for c, e in influence.meetings.items()}
        return replace(influence, cuts=tuple(cuts), bodies=bodies, meetings=meetings)

    def check(self, pattern: Pattern, taps: Sequence[TapPattern]) -> None:
        """Every sample must be read by the same derivatives."""
        sources = iter(self.batched)
        n = len(self.tangent.entries)
        batched, sizes = [next(sources) for _ in range(n)], [v.size for v in self.tangent.entries]
        self._check_alike(pattern.colouring.sources, batched, sizes)
        self._check_alike(pattern.colouring.exits, batched, sizes)
        for tap, parts in zip(taps, self.tangent.taps, strict=True):
            for colouring, var in zip(tap.colourings, parts, strict=True):
                self._check_alike(colouring.sources, [next(sources)], [var.size])
                self._check_alike(colouring.exits, batched, sizes)

    def _check_alike(
        self, colours: np.ndarray, batched: Sequence[bool], sizes: Sequence[int]
    ) -> None:
        parts = np.split(colours, np.cumsum(sizes)[:-1])
        for own, part in zip(batched, parts, strict=True):
            if own and (part.reshape(self.few, -1) != part[: part.size // self.few]).any():
                raise NotAlike

    # ------------------------------------------------------------------------- slots of the whole

    def copies(self, site: int) -> int:
        """How many times the slots of an operator are there for the analysed ones."""
        return self.size // self.few if self.batched[self.tangent.tap_sources(site)[0]] else 1

    def widened(self, slots: Slots, site: int) -> Slots:
        """The slots of all samples."""
        # One sample (1, 4) of a batch of 32, y and h alike. Its slots say where element j is:
        #
        #     analysed    y (1, 4): at = Pick(elements [[0, 1, 2, 3]]) of h (1, 4)
        #     whole       y (32, 4): row b of at is [4 b, 4 b + 1, 4 b + 2, 4 b + 3] of h (32, 4)
        #
        # so an index is the sample times the size of a sample (`inner`), plus the place in it. If
        # y has no axis of samples (one row that all of them share), two samples were analysed, as
        # two lanes of the same y: the lanes are the samples, and there are 32 of them.
        y = self.tangent.taps[site][0]
        entries = _Places(self, self.tangent.entries, self.batched)
        own = self.batched[self.tangent.tap_sources(site)[0]]
        output = _Places(self, [y], [own])
        axis: int | None = len(slots.lanes)
        if not own:
            axis = 0 if entries.any_batched(slots.analysed) else None
            if axis == 0 and slots.lanes != (self.few,):
                raise NotAlike
        lanes = (self.size,) if axis == 0 and not own else slots.lanes
        y_shape = self.whole.taps[site][0].shape
        shape = lanes + y_shape

        def wide(pick: Pick, places: _Places) -> Pick:
            if pick.component is not None and not axis and slots.table is None:
                return Pick(shape, pick.component, None, places.sizes)
            if pick.component is not None:  # of one sample: behind lanes the samples come later
                return as_pick(places.widened(pick.elements, axis), places.starts)
            index = places.widened(pick.index, axis)
            return as_pick(index, places.starts)

        cell = lambda cell: tuple((c, wide(p, entries)) for c, p in cell)
        transition: tuple[tuple[Cell, ...], ...] = tuple(
            tuple(cell(c) for c in row) for row in slots.transition
        )
        arrival = tuple(
            tuple((p, d, back, wide(k, output if back else entries)) for p, d, back, k in row)
            for row in slots.arrival
        )
        at_entries = lambda table: None if table is None else entries.widened_table(table, axis)
        at_output = lambda table: None if table is None else output.widened_table(table, axis)
        return replace(
            slots,
            lanes=lanes,
            y_shape=y_shape,
            at=tuple(wide(p, entries) for p in slots.at),
            transition=transition,
            arrival=arrival,
            table=at_entries(slots.table),
            runs=((0, y_shape[0]), *slots.runs[1:]) if own else slots.runs,
            tails=tuple(Tails(at_entries(t.ahead), at_output(t.back)) for t in slots.tails),
        )


class _Places:
    """Elements of variables of a few samples, and where they are in the whole batch."""

    def __init__(self, samples: Samples, variables: Sequence[Var], batched: Sequence[bool]):
        few, size = samples.few, samples.size
        pairs = list(zip(variables, batched, strict=False))
        self.few, self.size = few, size
        self.offsets = np.cumsum([0, *(v.size for v in variables)])
        self.n = int(self.offsets[-1])
        self.inner = np.array([v.size // few if own else 0 for v, own in pairs], int)
        self.sizes = tuple(v.size // few * size if own else v.size for v, own in pairs)
        self.starts = np.cumsum([0, *self.sizes])

    def any_batched(self, elements: np.ndarray) -> bool:
        variable = np.searchsorted(self.offsets, elements[elements != NONE], side="right") - 1
        return bool((self.inner[variable] > 0).any())

    def widened(self, index: np.ndarray | None, axis: int | None) -> np.ndarray:
        """Indices of all samples, which are places along `axis`; None: there are none in them."""
        assert index is not None
        variable = np.searchsorted(self.offsets, np.maximum(index, 0), side="right") - 1
        inner = self.inner[variable]
        place = np.where(index == NONE, 0, index - self.offsets[variable])
        sample, within = np.divmod(place, np.maximum(inner, 1))
        sample, within = np.where(inner > 0, sample, 0), np.where(inner > 0, within, place)
        start = np.where(index == NONE, NONE, self.starts[variable] + within)
        if axis is None:
            if sample.any() or (inner[index != NONE] > 0).any():
                raise NotAlike
            return start
        # Place k along the axis must read sample k, and all samples the same place within it: then
        # the first says all. With two samples of three elements, offsets 0:
        #
        #     index     [[0, 1, 2], [3, 4, 5]]    sample 0 and 1, within [0, 1, 2] in both
        #     of 32     start [[0, 1, 2]] + 3 * [[0], [1], ..., [31]]
        along = lambda n: np.arange(n).reshape([-1 if k == axis else 1 for k in range(index.ndim)])
        own = np.where(inner > 0, along(self.few), 0)
        if ((sample != own) & (index != NONE)).any() or (start != start.take([0], axis)).any():
            raise NotAlike
        start, inner = start.take([0], axis), inner.take([0], axis)
        return np.where(start == NONE, NONE, start + inner * along(self.size))

    def widened_table(self, table: Table, axis: int | None) -> Table:
        """The same of a table of derivatives by elements."""
        derivative, element = np.divmod(table.index, self.n)
        element = self.widened(np.where(table.index == NONE, NONE, element), axis)
        first = derivative if axis is None else derivative.take([0], axis)
        index = first * int(self.starts[-1]) + element
        return Table(np.where(element == NONE, NONE, index))


def thin(tangent: Tangent) -> Samples | None:
    """The tangent program of a few samples, if it runs along a batch."""
    sizes = Counter(c.shape[0] for c in tangent.components if c.shape)
    if not sizes:
        return None
    size = sizes.most_common(1)[0][0]
    batched = tuple(bool(v.shape) and v.shape[0] == size for v in tangent.sources)
    few = 1 if all(batched) else 2
    if size <= few:
        return None
    try:
        return _Thinning(tangent, size, few, batched).samples()
    except NotAlike:
        return None


class _Thinning:
    def __init__(self, tangent: Tangent, size: int, few: int, batched: tuple[bool, ...]):
        self.whole, self.size, self.few, self.batched = tangent, size, few, batched
        self.axis: dict[Var, int | None] = {}  # of the tangents
        self.small: dict[tuple[Atom, int], Var] = {}
        self.parts: dict[Var, tuple[Atom, int]] = {}
        self.original: dict[Equation, Equation] = {}

    def part(self, atom: Atom, axis: int) -> Var:
        """A variable for a few samples of a value."""
        if isinstance(atom, Var) and atom in self.axis:
            own = self.axis[atom] == axis
        else:
            own = axis < len(atom.shape) and atom.shape[axis] == self.size
        _must(own)
        key = (atom, axis)
        if key not in self.small:
            self.small[key] = Var(_put(atom.shape, axis, self.few), atom.dtype)
            self.parts[self.small[key]] = key
        return self.small[key]

    def source(self, var: Var, batched: bool) -> Var:
        self.axis[var] = 0 if batched else None
        return self.part(var, 0) if batched else var

    def samples(self) -> Samples:
        tangent, own = self.whole, iter(self.batched)
        entries = tuple(self.source(v, next(own)) for v in tangent.entries)
        taps = tuple(tuple(self.source(v, next(own)) for v in parts) for parts in tangent.taps)
        equations = self.equations(tangent.program)
        exits: list[Atom] = []
        components: list[Component] = []
        for component, atom, batched in zip(
            tangent.components, tangent.exits, self.batched, strict=False
        ):
            if isinstance(atom, Var) and atom in self.axis:
                _must(self.axis[atom] == (0 if batched else None))
                atom = self.part(atom, 0) if batched else atom
            shape = (self.few, *component.shape[1:]) if batched else component.shape
            exits.append(atom)
            components.append(replace(component, shape=shape))
        shapes = {c.shape for c in tangent.components}
        _must(len({c.shape for c in components}) == len(shapes))  # kinds of units are shapes
        program = replace(tangent.program, equations=equations)
        few = replace(
            tangent,
            program=program,
            components=tuple(components),
            entries=entries,
            taps=taps,
            exits=tuple(exits),
        )
        return Samples(tangent, few, self.size, self.few, self.batched, self.original, self.parts)

    def equations(self, program: Program) -> tuple[Equation, ...]:
        thinned = [(self.equation(eqn), eqn) for eqn in program.equations]
        self.original.update(thinned)
        return tuple(eqn for eqn, _ in thinned)

    def equation(self, eqn: Equation) -> Equation:
        tangents = [isinstance(a, Var) and a in self.axis for a in eqn.inputs]
        if not any(tangents):
            return eqn
        if eqn.bodies:
            return self.control(eqn)
        if (line := self.line(eqn, tangents)) is None:
            self.axis.update(dict.fromkeys(eqn.outputs))
            return eqn
        pairs = zip(eqn.inputs, line.operands, strict=True)
        inputs = tuple(a if axis is None else self.part(a, axis) for a, axis in pairs)
        self.axis.update(dict.fromkeys(eqn.outputs, line.result))
        outputs = tuple(self.part(v, line.result) for v in eqn.outputs)
        params = parameters(eqn, line, self.few)
        return replace(eqn, inputs=inputs, outputs=outputs, params=params)

    def line(self, eqn: Equation, tangents: Sequence[bool]) -> Line | None:
        """The line of the samples: that of the tangents, or a new one that reads one of them."""
        axes = [self.axis[a] for a in compress(eqn.inputs, tangents) if isinstance(a, Var)]
        fits = [
            line
            for line in lines(eqn)
            if line.alike and list(compress(line.operands, tangents)) == axes
        ]
        if any(d is not None for d in axes):
            _must(len(fits) == 1)
            return fits[0]
        return next((n for n in fits if eqn.outputs[0].shape[n.result] == self.size), None)

    # Of a `cond`, `scan` or `while` the bodies are thinned. The axes of operands and results are in
    # dicts by number: those without a tangent are not in them, those without samples are None.

    def control(self, eqn: Equation) -> Equation:
        p = eqn.params
        if eqn.name == "scan":
            first, (n_consts, n_carry), bodies = 0, scan_layout(p), eqn.bodies
        elif eqn.name == "while":
            first, n_consts, bodies = p["cond_nconsts"], p["body_nconsts"], eqn.bodies[1:]
            n_carry = len(eqn.outputs)
        else:
            first, n_consts, n_carry, bodies = 1, len(eqn.inputs) - 1, 0, eqn.bodies
        operands = eqn.inputs[first:]
        # Slices and results of iterations have an axis more outside than inside.
        before = [k >= n_consts + n_carry for k in range(len(operands))]
        behind = [eqn.name == "scan" and k >= n_carry for k in range(len(eqn.outputs))]
        axes = {
            k: _shifted(self.axis[a], -before[k])
            for k, a in enumerate(operands)
            if isinstance(a, Var) and a in self.axis
        }
        while True:
            # A carry that starts without a tangent (zeros) may get one in the body, with an axis of
            # samples: then the body is thinned once more, with what came out of it as what goes in.
            # Axes are only added, so this ends; an axis that changes its place is `NotAlike`.
            inside = [self.inside(body.program, axes) for body in bodies]
            outs = _agreed(*(found for _, found in inside))
            carried = {n_consts + k: d for k, d in outs.items() if k < n_carry}
            grown = _agreed(axes, carried)
            if grown == axes:
                break
            axes = grown
        carried = {k - n_consts: d for k, d in axes.items()}
        outs = _agreed(outs, {k: d for k, d in carried.items() if 0 <= k < n_carry})

        def thin(atoms: Sequence[Any], axes: Mapping[int, int | None]) -> tuple[Any, ...]:
            pairs = ((a, axes.get(k)) for k, a in enumerate(atoms))
            return tuple(a if axis is None else self.part(a, axis) for a, axis in pairs)

        thinned = tuple(
            replace(
                body,
                program=replace(
                    body.program,
                    inputs=thin(body.program.inputs, axes),
                    equations=equations,
                    outputs=thin(body.program.outputs, outs),
                ),
            )
            for body, (equations, _) in zip(bodies, inside, strict=True)
        )
        entering = {k: _shifted(d, before[k]) for k, d in axes.items()}
        leaving = {k: _shifted(d, behind[k]) for k, d in outs.items()}
        self.axis.update((eqn.outputs[k], d) for k, d in leaving.items())
        return replace(
            eqn,
            inputs=(*eqn.inputs[:first], *thin(operands, entering)),
            outputs=thin(eqn.outputs, leaving),
            bodies=(*eqn.bodies[: len(eqn.bodies) - len(bodies)], *thinned),
        )

    def inside(
        self, program: Program, axes: Mapping[int, int | None]
    ) -> tuple[tuple[Equation, ...], dict[int, int | None]]:
        """The equations of a body of a few samples, and the axes of its results."""
        self.axis.update((program.inputs[k], d) for k, d in axes.items())
        equations = self.equations(program)
        outputs = enumerate(program.outputs)
        found = {k: self.axis[o] for k, o in outputs if isinstance(o, Var) and o in self.axis}
        return equations, found


def _shifted(axis: int | None, by: int) -> int | None:
    _must(axis is None or axis + by >= 0)
    return None if axis is None else axis + by


def _agreed(*some: Mapping[int, int | None]) -> dict[int, int | None]:
    out: dict[int, int | None] = {}
    for axes in some:
        _must(all(out.get(k, d) == d for k, d in axes.items()))
        out |= axes
    return out


def _put(sizes: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    return (*sizes[:at], value, *sizes[at + 1 :])


def _must(condition: bool) -> None:
    if not condition:
        raise NotAlike


# ---------------------------------------------------------------------------- the whole Jacobian


def samples_are_apart(
    step: Step,
    consts: Sequence[Any],
    sites: Sequence[Site],
    relations: Sequence[HiddenParamOpRelation],
) -> bool:
    """Whether axis 0 of all states, inputs and outputs of operators counts samples that never meet.

    Proved equation by equation, whatever the values are: `relu(mean_over_samples(h) - 20)` joins
    them, also where it is zero. No path is left out, and no weight runs along the axis.
    """
    operators = [r.operator for r in relations]
    shapes = [step.entry(leaf).shape for leaf in step.hidden]
    shapes += [op.y.shape for op in operators]
    if () in shapes or len({s[0] for s in shapes}) != 1:
        return False
    shared = all(0 in r.operator.free_axes(k) for r in relations for k in r.keys)
    if not shared or any(op.x is not None and not op.maps_rows for op in operators):
        return False
    samples = thin(tangent_program(step, consts, sites, crossing=True))
    return samples is not None and samples.few == 1
