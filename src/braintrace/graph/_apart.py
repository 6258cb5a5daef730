"""Products whose results are taken apart: a product for each part.

    i, f = split(x @ W + b)         i = x @ W[:, :n] + b[:n];   f = x @ W[:, n:] + b[n:]

The weights of a gate then have the slots that this gate reaches, not those of all gates. In a
Mamba-2 layer what goes into the step size reaches every element of the state, 256 per unit, and
what goes into the inputs, of which there are many more, three. Slices move up along the lines of
the table of axes, through whatever treats the places of an axis alike:

    y = x @ W        the cut of y, at n, is one of W along its axis 1; each part reads all of x
    z = y + c        that of z is one of y; c, behind no weight, is sliced where it is read
    b, s = z[:, :n], z[:, n:]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from jax import lax

from ..program import Atom, Equation, Line, Program, Var, lines, parameters, prune
from ._reach import reach
from ._step import Step

MOST_PARTS = 8  # more are not gates: single elements, heads
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
Range = tuple[int, int]


class Cut(NamedTuple):
    """Ranges along an axis, in order and apart from each other."""

    axis: int
    ranges: tuple[Range, ...]


def taken_apart(step: Step) -> Step:
    """The step with a product per part, where all that is read of a product are parts of it."""
    params = {step.entry(leaf) for leaf in step.params}
    moves = reach(step.program, {v: 1 for v in step.program.inputs if v not in params})
    trained = reach(step.program, dict.fromkeys(params, 1))
    fixed = {v for v in trained if trained[v] and not moves.get(v)}
    cuts = _cuts(step.program)
    chosen = _chosen(step.program, cuts, fixed)
    return replace(step, program=prune(_Parts(cuts, chosen).of(step.program))) if chosen else step


def _slice(eqn: Equation) -> Cut | None:
    """The one axis along which an equation takes a range out."""
    if eqn.name != "slice" or any(n != 1 for n in eqn.params["strides"] or ()):
        return None
    p, shape = eqn.params, eqn.inputs[0].shape
    ranges = zip(p["start_indices"], p["limit_indices"], strict=True)
    found = [(d, cut) for d, cut in enumerate(ranges) if cut != (0, shape[d])]
    return Cut(found[0][0], (found[0][1],)) if len(found) == 1 else None


def _line(eqn: Equation, axis: int) -> Line | None:
    """What the operands are read along, if the same is computed at each place of an axis."""
    if len(eqn.outputs) != 1 or eqn.effects or eqn.bodies:
        return None
    return next((line for line in lines(eqn) if line.result == axis and line.alike), None)


def _cuts(program: Program) -> dict[Var, Cut]:
    """The cuts of values of which nothing is read but parts."""
    ranges: dict[Atom, dict[int, set[Range]]] = {}
    whole: set[Atom] = set(program.outputs)

    def cut_of(atom: Atom) -> Cut | None:
        found = ranges.get(atom, {})
        if atom in whole or len(found) != 1:
            return None
        ((axis, parts),) = found.items()
        cut = Cut(axis, tuple(sorted(parts)))
        apart = all(a[1] <= b[0] for a, b in pairwise(cut.ranges))
        return cut if apart and 1 < len(cut.ranges) <= MOST_PARTS else None

    cuts: dict[Var, Cut] = {}
    for eqn in reversed(program.equations):
        if (taken := _slice(eqn)) is not None:
            ranges.setdefault(eqn.inputs[0], {}).setdefault(taken.axis, set()).update(taken.ranges)
            continue
        cut = cut_of(eqn.outputs[0]) if eqn.outputs else None
        line = None if cut is None else _line(eqn, cut.axis)
        if cut is None or line is None:
            whole.update(eqn.inputs)
        else:
            for atom, axis in zip(eqn.inputs, line.operands, strict=True):
                if axis is not None:
                    ranges.setdefault(atom, {}).setdefault(axis, set()).update(cut.ranges)
                elif atom.shape:
                    whole.add(atom)
        if cut is not None:
            cuts[eqn.outputs[0]] = cut
    return cuts


def _chosen(program: Program, cuts: dict[Var, Cut], fixed: set[Var]) -> set[Var]:
    """The values that are computed in parts: those behind a product of a weight.

    `fixed` are the values that are computed from parameters alone. Those in parts as well, if
    nothing else reads them: a bias that is spread over samples.
    """
    behind: set[Atom] = set()
    for eqn in program.equations:
        for atom in _read_in_parts(eqn, cuts):
            if atom in behind or (eqn.name in _PRODUCTS and atom in fixed):
                behind.add(eqn.outputs[0])
    chosen: set[Var] = set()
    whole: set[Atom] = set(program.outputs)
    for eqn in reversed(program.equations):
        out = eqn.outputs[0] if eqn.outputs else None
        apart = out in cuts and _line(eqn, cuts[out].axis) is not None
        if apart and behind and (out in behind or (out in fixed and out not in whole)):
            chosen.add(out)
        elif _slice(eqn) is None:
            whole.update(eqn.inputs)
    return chosen


def _read_in_parts(eqn: Equation, cuts: dict[Var, Cut]) -> list[Atom]:
    """The operands of which each part of a result reads a part."""
    cut = cuts.get(eqn.outputs[0]) if eqn.outputs else None
    line = None if cut is None else _line(eqn, cut.axis)
    along = [] if line is None else zip(eqn.inputs, line.operands, strict=True)
    return [atom for atom, axis in along if axis is not None]


@dataclass(slots=True)
class _Parts:
    """A program in which the `chosen` values are computed in parts."""

    cuts: dict[Var, Cut]
    chosen: set[Var]
    equations: list[Equation] = field(default_factory=list)
    same: dict[Atom, Atom] = field(default_factory=dict)  # of a slice, the part that it is
    parts: dict[tuple[Atom, int, Range], Atom] = field(default_factory=dict)

    def of(self, program: Program) -> Program:
        for eqn in program.equations:
            taken = _slice(eqn)
            if taken is not None and eqn.inputs[0] in self.chosen:
                self.same[eqn.outputs[0]] = self.part(
                    eqn, eqn.inputs[0], taken.axis, taken.ranges[0]
                )
            elif eqn.outputs and eqn.outputs[0] in self.chosen:
                self.divide(eqn)
            else:
                self.equations.append(replace(eqn, inputs=self.read(eqn.inputs)))
        outputs = self.read(program.outputs)
        return replace(program, equations=tuple(self.equations), outputs=outputs)

    def read(self, atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
        return tuple(self.same.get(a, a) for a in atoms)

    def divide(self, eqn: Equation) -> None:
        out = eqn.outputs[0]
        axis, ranges = self.cuts[out]
        line = _line(eqn, axis)
        assert line is not None
        for start, stop in ranges:
            shape = (*out.shape[:axis], stop - start, *out.shape[axis + 1 :])
            part = Var(shape, out.dtype)
            operands = tuple(
                self.same.get(a, a) if d is None else self.part(eqn, a, d, (start, stop))
                for a, d in zip(eqn.inputs, line.operands, strict=True)
            )
            params = parameters(eqn, line, stop - start)
            self.equations.append(replace(eqn, inputs=operands, outputs=(part,), params=params))
            self.parts[out, axis, (start, stop)] = part

    def part(self, eqn: Equation, atom: Atom, axis: int, taken: Range) -> Atom:
        """A range of a value along an axis, taken once."""
        atom = self.same.get(atom, atom)
        key = (atom, axis, taken)
        if key not in self.parts:
            first, last = [0] * len(atom.shape), list(atom.shape)
            first[axis], last[axis] = taken
            shape = tuple(e - s for s, e in zip(first, last, strict=True))
            params = {"start_indices": tuple(first), "limit_indices": tuple(last), "strides": None}
            out = Var(shape, atom.dtype)
            sliced = replace(eqn, primitive=lax.slice_p, inputs=(atom,), outputs=(out,))
            self.equations.append(replace(sliced, params=params))
            self.parts[key] = out
        return self.parts[key]
