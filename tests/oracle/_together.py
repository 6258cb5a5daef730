"""What shares a trace: which states one operator's trace lives on, which weights have one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from braintrace._jaxpr import Equation

from ._operators import Operator, reach
from ._structure import Structure, closed


def together(step: Structure) -> tuple[frozenset[int], ...]:
    """Per hidden slot those that some operator's trace lives on as well, itself included.

    The trace lives on what the operator's output reaches along kept paths, now or later.
    """
    reached = [closed(step.kept, step.reads([o.y])) for o in step.traced]
    return together_on(step, step.traced, reached)


def together_on(
    step: Structure, operators: Sequence[Operator], reached: Sequence[np.ndarray]
) -> tuple[frozenset[int], ...]:
    """The same where the traces of the operators live on the states reached, (states, y).

    The copies of an operator in a body are one operator.
    """
    leaf, homes = step.leaf_of(), dict[Equation, set[int]]()
    for o, found in zip(operators, reached, strict=True):
        homes.setdefault(step.origin[o.equation], set()).update(leaf[found.any(1)].tolist())
    return tuple(
        frozenset({k}.union(*(s for s in homes.values() if k in s)))
        for k in range(len(step.hidden))
    )


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
