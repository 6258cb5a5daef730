"""Along which axes a value repeats its first entry, as its program shows.

A result repeats along a line that is alike if every operand does that the line runs along:

    a = broadcast_in_dim(decay, (batch, units))    repeats along the batch: it reads no axis there
    a * h                                          does not, unless h does
"""

from __future__ import annotations

from ..program import Atom, Program, lines

Repeats = dict[Atom, frozenset[int]]


def repeats(program: Program) -> Repeats:
    """The axes along which each value repeats; of values that are not listed, none."""
    found: Repeats = {}
    along = lambda a, axis: a.shape[axis] == 1 or axis in found.get(a, ())
    for eqn in program.equations:
        axes = frozenset(
            line.result
            for line in lines(eqn)
            if line.alike
            and eqn.outputs[0].shape[line.result] > 1
            and all(
                d is None or along(a, d) for a, d in zip(eqn.inputs, line.operands, strict=True)
            )
        )
        if axes:
            found |= dict.fromkeys(eqn.outputs, axes)
    return found
