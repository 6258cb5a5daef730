"""What shares a trace: which states one operator's trace lives on, which weights have one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .._jaxpr import Equation
from ._operators import Operator, reach
from ._structure import Structure, closed


def homes(step: Structure) -> list[frozenset[int]]:
    """Per traced operator the hidden slots that its trace lives on: those its output reaches along
    kept paths, now or at later steps. The copies of an operator in a body are one operator."""
    leaf = step.leaf_of()
    found: dict[Equation, set[int]] = {}
    for o in step.traced:
        reached = closed(step.kept, step.reads([o.y])).any(1)
        found.setdefault(step.origin[o.equation], set()).update(leaf[reached].tolist())
    return [frozenset(found[step.origin[o.equation]]) for o in step.traced]


def together(step: Structure) -> list[frozenset[int]]:
    """Per hidden slot those that some operator's trace lives on as well, itself included."""
    found, n = homes(step), len(step.hidden)
    return [frozenset({k}.union(*(s for s in found if k in s))) for k in range(n)]


def made_of(step: Structure, operators: Iterable[Operator]) -> np.ndarray:
    """Which entries of the parameter vector belong to arrays that a trained operand of one of
    these operators is made of."""
    operands = [o.equation.inputs[i] for o in operators for i in o.trained]
    found = [any(a in reach(step.program, [s.entry]) for a in operands) for s in step.params]
    sizes = [s.entry.size * (2 if s.entry.is_complex else 1) for s in step.params]
    return np.repeat(np.asarray(found, bool), sizes)


def readers(step: Structure, path: tuple) -> list[Operator]:
    """The operators whose first trained operand is made of a parameter."""
    met = reach(step.program, [slot.entry for slot in step.params if slot.path == path])
    return [o for o in step.operators if o.equation.inputs[o.trained[0]] in met]


def group_of(step: Structure) -> np.ndarray:
    """Per hidden slot the number of its group."""
    out = np.zeros(len(step.hidden), int)
    for i, group in enumerate(step.groups):
        out[group] = i
    return out
