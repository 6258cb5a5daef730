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

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..program import (
    Atom,
    Equation,
    Line,
    Program,
    Rewriting,
    Var,
    lines,
    parameters,
    producers,
    rewritten,
)
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
    return replace(step, program=_in_parts(step.program, chosen)) if chosen else step


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


def _in_parts(program: Program, chosen: set[Var]) -> Program:
    """The program in which the chosen values are computed in parts."""
    producer = producers(program)
    parts: dict[tuple[Atom, Cut], Atom] = {}

    def part(to: Rewriting, atom: Atom, axis: int, taken: Range) -> Atom:
        """A range of a value along an axis, computed once."""
        key = atom, Cut(axis, (taken,))
        if key not in parts:
            line = _line(producer[atom], axis) if atom in chosen else None
            if line is None:
                (whole,) = to.read([atom])
                parts[key] = to.slice(whole, axis, *taken)
            else:
                parts[key] = of_parts(to, producer[atom], line, taken)
        return parts[key]

    def of_parts(to: Rewriting, eqn: Equation, line: Line, taken: Range) -> Atom:
        along = zip(eqn.inputs, line.operands, strict=True)
        operands = [a if d is None else part(to, a, d, taken) for a, d in along]
        (out,), size, here = eqn.outputs, taken[1] - taken[0], to.at
        shape = (*out.shape[: line.result], size, *out.shape[line.result + 1 :])
        to.at = eqn
        new = to.apply(eqn.primitive, operands, shape, parameters(eqn, line, size), out.dtype)
        to.at = here
        return new

    def rule(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
        taken = _slice(eqn)
        if taken is None or eqn.inputs[0] not in chosen:
            return None
        return [part(to, eqn.inputs[0], taken.axis, taken.ranges[0])]

    return rewritten(program, rule)
