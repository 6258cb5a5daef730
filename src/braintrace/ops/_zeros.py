"""Which values of a program are zero because of what they are computed from.

y = tanh(x) * c;  z = y + d        with x zero: y is zero whatever c is, z is not unless d is
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from ..program import ZERO_AT_ZERO, Atom, Const, Program, Var, is_inexact, is_traced

_ALL = ZERO_AT_ZERO | set(
    """
    broadcast_in_dim complex concatenate cumsum optimization_barrier pad reduce_max reduce_min
    reduce_sum reshape rev scatter-add slice transpose
    """.split()
)  # zero where all they read is
_ANY = {"mul", "dot_general", "conv_general_dilated"}  # zero where one of them is
_FIRST = {"div", "dynamic_slice", "gather"}  # zero where the first is, but for what fills it up


def zeros_in(program: Program, zero: Collection[Var]) -> Callable[[Atom], bool]:
    """Whether a value of the program is seen to be zero, if these inputs are."""
    zeros = set(zero)

    def is_zero(atom: Atom) -> bool:
        if isinstance(atom, Const):
            return not is_traced(atom.value) and not np.any(atom.value)
        return atom in zeros

    for e in program.equations:
        read = [is_zero(a) for a in e.inputs if is_inexact(a.dtype)]
        of = all if e.name in _ALL else any if e.name in _ANY else None
        filled = np.any(e.params.get("fill_value") or 0)
        if read and (of(read) if of else e.name in _FIRST and read[0] and not filled):
            zeros.update(e.outputs)
    return is_zero
