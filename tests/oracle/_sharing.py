"""What shares a trace: which states one operator's trace lives on, which weights have one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from braintrace.program import Equation

from ._operators import Operator, reach
from ._structure import Structure, closure


def sharing(step: Structure) -> tuple[frozenset[int], ...]:
    """Per hidden leaf those that some operator's trace lives on as well, itself included.

    The trace lives on what the operator's output reaches along kept paths, now or later.
    """
    reached = [closure(step.kept, step.reads([o.y])) for o in step.traced]
    return sharing_on(step, step.traced, reached)


def sharing_on(
    step: Structure, operators: Sequence[Operator], reached: Sequence[np.ndarray]
) -> tuple[frozenset[int], ...]:
    """The same where the traces of the operators live on the states reached, (states, y).

    The copies of an operator in a body are one operator.
    """
    leaf, homes = step.leaf_of(), dict[Equation, set[int]]()
    for o, states in zip(operators, reached, strict=True):
        homes.setdefault(step.origin[o.equation], set()).update(leaf[states.any(1)].tolist())
    return tuple(
        frozenset({k}.union(*(s for s in homes.values() if k in s)))
        for k in range(len(step.hidden))
    )


def parameters_of(step: Structure, operators: Iterable[Operator]) -> np.ndarray:
    """Which entries of the parameter vector belong to arrays that a trained operand of one of
    these operators is computed from."""
    operands = [o.equation.inputs[i] for o in operators for i in o.trained]
    used = [any(a in reach(step.program, [p.entry]) for a in operands) for p in step.params]
    sizes = [p.entry.size * (2 if p.entry.is_complex else 1) for p in step.params]
    return np.repeat(np.asarray(used, bool), sizes)


def readers(step: Structure, path: tuple) -> list[Operator]:
    """The operators whose first trained operand is computed from a parameter."""
    values = reach(step.program, [p.entry for p in step.params if p.path == path])
    return [o for o in step.operators if o.equation.inputs[o.trained[0]] in values]


def group_of(step: Structure) -> np.ndarray:
    """Per hidden leaf the number of its group."""
    out = np.zeros(len(step.hidden), int)
    for i, group in enumerate(step.groups):
        out[group] = i
    return out
