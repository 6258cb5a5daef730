"""Ring buffers: what is read and written at one index that varies.

An index that is not known when the step is analysed may be any place: what is read there joins all
places, and a write may change any of them. If the same index is read and written, that says too
much. With places 0 and 1 of `buffer` and the counter i

    old = buffer[i]                        old reads {0, 1}
    buffer' = buffer.at[i].set(0.5 * old)  place 0 reads {0} or {0, 1}: its neighbour, too?

it does not: i is 0 or 1, and in both cases either place reads itself. So the step is walked once
for each value of such an index, and an element may read what it reads in any of these cases.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..program import Atom, Const, Equation, Program, Var, is_inexact

Numbers = tuple[int | None, ...]
_MOST_CASES = 64
_READS = ("dynamic_slice", "gather")
_WRITES = ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul")
_SAME = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type"}


def cases(program: Program) -> list[dict[Atom, int]]:
    """The values of indices at which something is both read and written: one dictionary per case.

    An index has the same value in all variables that hold it.
    """
    numbers = _numbers(program)
    sizes: dict[bool, dict[int, int]] = {True: {}, False: {}}  # read, written: places by number
    for eqn in program.equations:
        read = eqn.name in _READS
        if (read or eqn.name in _WRITES) and is_inexact(eqn.inputs[0].dtype):
            for axis, number in _indices(eqn, numbers):
                size = eqn.inputs[0].shape[axis]
                sizes[read][number] = max(size, sizes[read].get(number, 0))
    out: list[dict[Atom, int]] = [{}]
    for number, size in sizes[False].items():
        size = max(size, sizes[True].get(number, 0))
        if number in sizes[True] and size * len(out) <= _MOST_CASES:
            same = [v for v, own in numbers.items() if own == (number,)]
            out = [{**case, **dict.fromkeys(same, k)} for case in out for k in range(size)]
    return out


def assumed(var: Var, case: Mapping[Atom, int]) -> np.ndarray:
    """The value that a variable has in a case."""
    return np.full(var.shape, case[var], var.dtype)


def _indices(eqn: Equation, numbers: Mapping[Atom, Numbers]) -> list[tuple[int, int]]:
    """At which axes of its first operand an equation reads or writes at which varying numbers."""
    if eqn.name in ("dynamic_slice", "dynamic_update_slice"):
        at = [numbers.get(a, (None,)) for a in eqn.inputs[1 + (eqn.name in _WRITES) :]]
        pairs = [(axis, number) for axis, (number, *_) in enumerate(at)]
    else:
        d = eqn.params["dimension_numbers"]
        axes = d.start_index_map if eqn.name in _READS else d.scatter_dims_to_operand_dims
        pairs = list(zip(axes, numbers.get(eqn.inputs[1], (None,) * len(axes)), strict=False))
    return [(axis, number) for axis, number in pairs if number is not None]


def _numbers(program: Program) -> dict[Atom, Numbers]:
    """What integers of size one, and rows of them, consist of: equal ones have the same number.

    None stands for one that is known.
    """
    known: dict[object, int] = {}
    out: dict[Atom, Numbers] = {}

    def of(atom: Atom) -> Numbers | None:
        if isinstance(atom, Const):
            return (None,) * (np.size(atom.value) == 1) or None
        if atom not in out and atom.size == 1:
            out[atom] = (known.setdefault(atom, len(known)),)
        return out.get(atom)

    for eqn in program.equations:
        if eqn.bodies or eqn.effects or any(is_inexact(a.dtype) for a in eqn.inputs):
            continue
        read = [of(a) for a in eqn.inputs]
        row = tuple(n for r in read for n in r or ())
        if None in read or not read or len(eqn.outputs) > 1:
            continue
        (result,) = eqn.outputs
        if eqn.name == "concatenate" or (eqn.name in _SAME and result.size == len(row)):
            out[result] = row
        elif result.size == 1 and len(row) == len(eqn.inputs):
            varies = any(n is not None for n in row)
            # Constants are told apart by their values, the rest by its number.
            inputs = [str(a.value) if isinstance(a, Const) else of(a) for a in eqn.inputs]
            key = repr((eqn.name, sorted(eqn.params.items(), key=str), inputs))
            out[result] = (known.setdefault(key, len(known)) if varies else None,)
    return out
