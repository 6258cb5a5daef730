"""Along which axes a value repeats its first entry, as its program shows.

`broadcast_in_dim` makes such axes; element-wise equations leave those that all operands have:

    a = broadcast_in_dim(decay, (batch, units))    repeats along the batch
    a * h                                          does not, unless h does
"""

from __future__ import annotations

from math import prod

from ..program import ELEMENTWISE, Atom, Equation, Program

Repeats = dict[Atom, frozenset[int]]


def repeats(program: Program) -> Repeats:
    """The axes along which each value repeats; of values that are not listed, none."""
    found: Repeats = {}
    for eqn in program.equations:
        for o in eqn.outputs:
            axes = frozenset(
                d for d in range(len(o.shape)) if o.shape[d] > 1 and _axis(eqn, d, found)
            )
            if axes:
                found[o] = axes
    return found


def _axis(eqn: Equation, d: int, found: Repeats) -> bool:
    """Whether the outputs of an equation repeat along axis `d`."""
    out, along = eqn.outputs[0], lambda a, i: a.shape[i] == 1 or i in found.get(a, ())
    if eqn.name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        return d not in dims or along(eqn.inputs[0], dims.index(d))
    if eqn.name in ELEMENTWISE:
        return all(not a.shape or along(a, d) for a in eqn.inputs)
    if eqn.name == "concatenate":
        return d != eqn.params["dimension"] and all(along(a, d) for a in eqn.inputs)
    if eqn.name == "reshape":  # an axis that stays one: as much before it as there was
        (a,) = eqn.inputs[:1]
        before = prod(out.shape[:d])
        return any(
            a.shape[i] == out.shape[d] and prod(a.shape[:i]) == before and along(a, i)
            for i in range(len(a.shape))
        )
    return False
