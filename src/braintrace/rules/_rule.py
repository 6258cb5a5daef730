"""A learning rule: a record of pure functions over one relation.

Letters: `D` the kept Jacobian between the slots of an output element, (*lanes, *y, K, K);
`f` the derivative of the slots by the output, (*lanes, *y, K); `lam` the cotangent of the step at
its entry, read at the slots, (*lanes, *y, K); `weights` the operand values of the relation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ..graph import HiddenParamOpRelation as Relation

Array = jax.Array
Trace = Any
Grads = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule stores and how it turns cotangents into gradients.

    Attributes:
        init: `(relation, weights) -> trace` before the first step.
        advance: `(relation, trace, x, f, D, weights) -> trace` after the step.
        recall: `(relation, before, after, lam, weights) -> gradients`, the memory term of a step
            that turned the trace `before` into `after`.
        recall_window: `(relation, before, lam, weights) -> gradients`, the memory term of a window.
        tap: `(relation, after, ct, weights) -> gradients` replacing the operator's own weight
            gradient within a single step, None where that is kept.
        carry: `(relation, trace, D, weights) -> trace` that D alone makes of a trace, for a rule
            whose D is its own: credit to the past passes the new states through it.
        approximates: in words, how what it stores stands for a trace; None if it is the trace.
    """

    init: Callable[[Relation, Grads], Trace]
    advance: Callable[[Relation, Trace, Array | None, Array, Array, Grads], Trace]
    recall: Callable[[Relation, Trace, Trace, Array, Grads], Grads]
    recall_window: Callable[[Relation, Trace, Array, Grads], Grads]
    tap: Callable[[Relation, Trace, Array, Grads], Grads] | None = None
    carry: Callable[[Relation, Trace, Array, Grads], Trace] | None = None
    approximates: str | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """The rule that keeps everything: every parameter's influence on every state it reaches.

    Attributes:
        at_once: how many parameter elements are pushed through the step side by side.
    """

    at_once: int = 4096
