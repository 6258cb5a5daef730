"""A learning rule: a record of pure functions over the relations of a graph.

A block is several steps with constant weights; its arrays have a leading axis of steps. Letters:
`D` the kept Jacobian between the slots of an output element, (*lanes, *y, K, K); `f` the
derivative of the slots by the output, (*lanes, *y, K), with an axis of turns first where the
operator has them; `lam` a cotangent of the states where a step or window enters, read at the
slots, (*lanes, *y, K); `ct` the cotangent of the operator's output within its step or window;
`weights` the operand values of the relation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import jax

from ..graph import HiddenGroup
from ..graph import HiddenParamOpRelation as Relation

Array = jax.Array
Trace = Any
Fresh = Array | bool | None  # whether traces are zero; None is not known
Grads = dict[str, Array]


class Steps(NamedTuple):
    """What one relation did in a block of steps; `own` is what the rule prepared from it.

    `x` is what was recorded of its operator (see `Operator.recorded`).
    """

    x: Any
    f: Array
    D: Array
    own: Any = None


class Signals(NamedTuple):
    """What reaches one relation from the losses of a block.

    `lam` has one entry per window, of `every` steps; a single step, with recurrent entries cut, is
    `every` = None. `masked` says that some losses do not count: what meets a signal of zero counts
    as zero then, even if it is not a number. `new` is the cotangent of the states after each step,
    read at the slots, where the rule asks for it; `exits` is a signal that meets the trace after
    each step, in place of everything else.
    """

    lam: Array
    ct: Array
    every: int | None
    masked: bool
    new: Array | None = None
    exits: Array | None = None


class SignalInputs(NamedTuple):
    """What a learning signal can be made of, with a leading axis of steps.

    `states` and `cotangents` are per hidden leaf, the states after each step; in a window the
    cotangents are those of the states before it. `extra` is what the learner was called with
    besides the model's arguments.
    """

    groups: Sequence[HiddenGroup]
    cotangents: Sequence[Array]
    states: Sequence[Array]
    extra: dict[str, Any]


class ExitCotangents(Enum):
    """Which cotangents of the states after a step a rule gets, in `Signals.new`; single steps only.

    READ: those of the readers of a new state, within the step. DETACHED: the same, and what
    computes a new state sees no entry of the states it shares a trace with, so that credit to the
    past passes through the rule's own D. UNCUT: as DETACHED, and recurrent entries are not cut.
    """

    READ = auto()
    DETACHED = auto()
    UNCUT = auto()


class Feedback(NamedTuple):
    """Fixed random operands for the way back through operators that do not feed back."""

    key: Any
    scale: float


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule stores and how it turns cotangents into gradients.

    Attributes:
        init: `(relation, weights) -> trace` before the first step.
        prepare: `(relations, traces, steps) -> own` per relation, what both of the following need;
            None for nothing.
        advance: `(relations, traces, steps, weights, fresh) -> traces` after the block; `fresh`
            is true if the traces before it are known to be zero.
        credit: `(relations, traces, steps, signals, weights, fresh) -> gradients` of the block
            that begins with these traces.
        kept: `(relation, steps) -> steps` with another Jacobian in place of the step's own, or more
            slots.
        exit_cotangents: which cotangents of the states after a step are in `Signals.new`.
        signal: `SignalInputs -> cotangents` per hidden leaf in place of those of the loss.
        takes_signal: whether it can have one.
        feedback: where the way back is random; a signal of its own if there is no operator to
            go back through.
        one_by_one: whether steps must not be taken together.
        pending: the rule for weights that change every few steps, where that is another one.
        folds: whether it can follow a weight with a factor that varies (see `graph._fold`), because
            it stores nothing of the input alone.
        approximates: in words, how what it stores stands for a trace; None if it is the trace.
        per_parameter: whether traces belong to parameters, not to operators.
        complete: whether it follows all paths between states.
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
    kept: Callable[[Relation, Steps], Steps] | None = None
    exit_cotangents: ExitCotangents | None = None
    signal: Callable[[SignalInputs], Sequence[Array]] | None = None
    takes_signal: bool = True
    feedback: Feedback | None = None
    one_by_one: bool = False
    pending: Pending | None = None
    folds: bool = False
    approximates: str | None = None
    per_parameter: bool = False
    complete: bool = False


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
class FullInfluence:
    """The rule that keeps everything: every parameter's influence on every state it reaches.

    Attributes:
        at_once: how many parameter elements are pushed through the step side by side.
    """

    at_once: int = 4096
    per_parameter, complete, folds = True, True, False
    signal, exit_cotangents, feedback, pending, one_by_one = None, None, None, None, False
    approximates = None


@dataclass(frozen=True, slots=True, eq=False)
class RankOne:
    """Everything, as one outer product of states and parameters with the right mean.

    Attributes:
        key: what random signs are drawn from.
        eps: added to norms.
    """

    key: Any
    eps: float = 1e-12
    per_parameter, complete, folds = True, True, False
    signal, exit_cotangents, feedback, pending, one_by_one = None, None, None, None, True
    approximates = "the influence of every parameter: one random outer product stands for it"


@dataclass(frozen=True, slots=True, eq=False)
class Kronecker:
    """Everything, as one product of inputs and outputs per operator with the right mean.

    Attributes:
        key: what random signs are drawn from.
        eps: added to norms.
        batched: whether the first axis of states, inputs and outputs counts independent samples.
    """

    key: Any
    eps: float = 1e-12
    batched: bool = False
    per_parameter, complete, folds = False, True, False
    signal, exit_cotangents, feedback, pending, one_by_one = None, None, None, None, True
    approximates = "the influence of every weight: one random product stands for it"


WholeStepRule = FullInfluence | RankOne | Kronecker
