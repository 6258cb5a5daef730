"""A learning rule: a record of pure functions over the relations of a graph.

A stretch is several steps with constant weights; its arrays have a leading axis of steps. Letters:
`D` the kept Jacobian between the slots of an output element, (*lanes, *y, K, K); `f` the
derivative of the slots by the output, (*lanes, *y, K), with an axis of turns first where the
operator has them; `lam` a cotangent of the states where a step or window enters, read at the
slots, (*lanes, *y, K); `ct` the cotangent of the operator's output within its step or window;
`weights` the operand values of the relation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ..graph import HiddenParamOpRelation as Relation

Array = jax.Array
Trace = Any
Fresh = Array | bool | None  # whether traces are zero; None is not known
Grads = dict[str, Array]


class Steps(NamedTuple):
    """What one relation did in a stretch of steps; `own` is what the rule prepared from it."""

    x: Array | None
    f: Array
    D: Array
    own: Any = None


class Signals(NamedTuple):
    """What reaches one relation from the losses of a stretch.

    `lam` has one entry per window, of `every` steps; a single step, with recurrent entries cut, is
    `every` = None. `masked` says that some losses do not count: what meets a signal of zero counts
    as zero then, even if it is not a number.
    """

    lam: Array
    ct: Array
    every: int | None
    masked: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule stores and how it turns cotangents into gradients.

    Attributes:
        init: `(relation, weights) -> trace` before the first step.
        prepare: `(relations, traces, steps) -> own` per relation, what both of the following need;
            None for nothing.
        advance: `(relations, traces, steps, weights, fresh) -> traces` after the stretch; `fresh`
            is true if the traces before it are known to be zero.
        credit: `(relations, traces, steps, signals, weights, fresh) -> gradients` of the stretch
            that begins with these traces.
        crossing: whether D is the rule's own and credit to the past passes the new states through
            it (else it passes whatever the step kept).
        pending: the rule for weights that change every few steps, where that is another one.
        approximates: in words, how what it stores stands for a trace; None if it is the trace.
    """

    init: Callable[[Relation, Grads], Trace]
    advance: Callable[
        [
            Sequence[Relation],
            Sequence[Trace],
            Sequence[Steps],
            Sequence[Grads],
            Fresh,
        ],
        list[Trace],
    ]
    credit: Callable[
        [
            Sequence[Relation],
            Sequence[Trace],
            Sequence[Steps],
            Sequence[Signals],
            Sequence[Grads],
            Fresh,
        ],
        list[Grads],
    ]
    prepare: Callable[[Sequence[Relation], Sequence[Trace], Sequence[Steps]], list[Any]] | None = (
        None
    )
    crossing: bool = False
    pending: Pending | None = None
    approximates: str | None = None


class Pending(NamedTuple):
    """Traces that are rewritten only now and then, with the steps since beside them.

    Attributes:
        open: `(relations, traces, size) -> traces` with room for `size` steps.
        rule: the rule for these.
        fold: `(relations, traces) -> traces` as they were, all steps in them; for operators that
            are affine in their weights.
    """

    open: Callable[[Sequence[Relation], Sequence[Trace], int], list[Trace]]
    rule: Rule
    fold: Callable[[Sequence[Relation], Sequence[Trace]], list[Trace]]


@dataclass(frozen=True, slots=True)
class Forward:
    """The rule that keeps everything: every parameter's influence on every state it reaches.

    Attributes:
        at_once: how many parameter elements are pushed through the step side by side.
    """

    at_once: int = 4096
