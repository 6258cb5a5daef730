"""What a learning rule is to the engine: a record of pure functions and a few facts.

A block is several steps with constant weights; its arrays have a leading axis of steps. A rule
stores traces, one pytree for each thing that has one. Along a block the engine calls

    observe(graph, block, traces) -> observed         what the next two need of the forward pass
    advance(graph, block, traces, observed, fresh)    the traces after the block
    credit(graph, arrived)                            from cotangents to gradients of the parameters

`rules.relation_rule` builds a rule from functions of single operators (`Steps`, `Signals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..graph import Graph, HiddenGroup, Path
from ._values import Block, Values

Array = jax.Array
Trace = Any
Fresh = Array | bool | None  # whether traces are zero; None if uncertain
Grads = dict[str, Array]

COUNTED = 2**30  # steps; more are not counted, since an int32 of them would begin anew below zero


class Steps(NamedTuple):
    """What one relation did in a block of steps; `prepared` is what the rule made of it.

    `x` is what was recorded of its operator (see `Operator.recorded`). `D` is the kept Jacobian
    between the slots of an output element, (*lanes, *y, K, K), with a single entry along axes (and
    steps) where it repeats; `f` the derivative of the slots by the output, (*lanes, *y, K), with an
    axis of iterations first where the operator has them. `slots` are the parts of `f` along K,
    with a single entry where they repeat; None where there are many.
    """

    x: Any
    f: Array
    D: Array
    prepared: Any = None
    slots: tuple[Array, ...] | None = None


class Signals(NamedTuple):
    """What reaches one relation from the losses of a block.

    `lam` is the cotangent of the states where a step or window enters, read at the slots, (*lanes,
    *y, K); `ct` that of the operator's output within its step or window. `lam` has one entry per
    window, of `every` steps; a single step, with recurrent entries cut, is `every` = None. `masked`
    says that some losses do not count: what meets a signal of zero counts as zero then, even if it
    is not a number. `new` is the cotangent of the states after each step, read at the slots, where
    the rule asks for it; `exits` is a signal that meets the trace after each step, in place of
    everything else.
    """

    lam: Array
    ct: Array
    every: int | None
    masked: bool
    new: Array | None = None
    exits: Array | None = None


class SignalInputs(NamedTuple):
    """What a learning signal can read, with a leading axis of steps.

    `states` and `cotangents` are per hidden leaf, the states after each step; in a window the
    cotangents are those of the states before it. `extra` is what the learner was called with
    besides the model's arguments.
    """

    groups: Sequence[HiddenGroup]
    cotangents: Sequence[Array]
    states: Sequence[Array]
    extra: dict[str, Any]


Signal = Callable[[SignalInputs], Sequence[Array]]


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
    """Fixed random operands in the reverse pass through operators that do not feed back.

    `signal` is used where there is no such operator. Operands that are `adaptive` are the weights
    of the operator plus the random ones: what feedback that gets the same updates becomes.
    """

    key: Array
    scale: float
    signal: Signal
    adaptive: bool = False


@dataclass(frozen=True, slots=True)
class SignalSource:
    """Which exit cotangents a rule gets, and a signal of its own with what that reads."""

    exits: ExitCotangents | None
    signal: Signal | None
    states: Any = ()
    extra: Any = None


class Arrived(NamedTuple):
    """What reached the memory of a rule in the reverse pass of a block.

    Attributes:
        params: the parameters.
        consts: constants of the step.
        traces: the traces before the block.
        observed: what the rule observed.
        fresh: whether the traces are zero.
        entry: cotangents of the states where steps or windows enter, per hidden leaf.
        taps: cotangents of the operators' outputs, by the index of the relation.
        exits: cotangents of the new states, per hidden leaf; empty if the rule asks for none.
        every: steps per window, None for single steps.
        substitute: see `run_block`.
        source: the signal that the rule has.
        later: in a block that is taken backward, the adjoints after it, see `Backward`.
        counts: whether any loss of the block counts; None if that is certain.
    """

    params: Any
    consts: Any
    traces: Any
    observed: Any
    fresh: Fresh
    entry: Any
    taps: Any
    exits: Any
    every: int | None
    substitute: Array | None
    source: SignalSource
    later: Any = None
    counts: Array | None = None


def zeros_like_traces(traces: Sequence[Trace]) -> list[Trace]:
    """Traces before the first step."""
    return jax.tree.map(jnp.zeros_like, list(traces))


def observe_nothing(graph: Graph, block: Block, traces: Sequence[Trace]) -> Any:
    """For rules that go through the step themselves."""
    return ()


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule stores and how it computes gradients from cotangents.

    Attributes:
        init: `(graph, values) -> traces` before the first step; of the values, constants and
            parameters are there.
        traced: `graph -> [(number, path)]` of what has a trace, in the order of the traces.
        names: `graph -> [tree]`, for every trace a tree of its structure, or less deep, of names
            that the parts keep in any other step with the same operators and states, see
            `graph._names`; None for rules that have a trace per number and path.
        advance: `(graph, block, traces, observed, fresh) -> traces` after the block; `fresh` is
            true if the traces before it are certainly zero.
        credit: `(graph, arrived) -> gradients` of the parameters.
        observe: `(graph, block, traces) -> observed`, arrays that both of these need.
        reset: `traces -> traces` between sequences.
        entry_only: whether its memory meets nothing but the states before a block: reverse mode
            goes through the whole block, and operators have no taps.
        exit_cotangents: which cotangents of the states after a step it asks for.
        signal: cotangents per hidden leaf in place of those of the loss.
        takes_signal: whether it can have one.
        feedback: where the reverse pass is random.
        one_by_one: whether steps or windows must run one after another.
        pending: the rule for weights that change every few steps, where that is another one.
        backward: how it takes the blocks of a segment from the last to the first, if it can.
        folds: whether it can follow a weight with a factor that varies (see `graph._fold`), because
            it stores nothing of the input alone.
        approximates: in words, how what it stores stands for a trace; None if it is the trace.
        constants: arrays of the rule that are in no trace, by name; a checkpoint compares them.
        per_parameter: whether traces belong to parameters, not to operators.
        complete: whether it follows all paths between states.
        replay: `(graph, values, traces, block, substitute) -> results` of the block, from earlier
            steps evaluated again at the present parameters; None if nothing is.
        steps_back: how far, None for no limit.
        parts: the rules of a mixture, see `_mixture`; each has a graph in `Graph.parts`.
    """

    init: Callable[[Graph, Values], list[Trace]]
    traced: Callable[[Graph], list[tuple[int, Path]]]
    advance: Callable[[Graph, Block, Sequence[Trace], Any, Fresh], list[Trace]]
    credit: Callable[[Graph, Arrived], Any]
    observe: Callable[[Graph, Block, Sequence[Trace]], Any] = observe_nothing
    names: Callable[[Graph], list[Any]] | None = None
    reset: Callable[[Sequence[Trace]], list[Trace]] = zeros_like_traces
    entry_only: bool = False
    exit_cotangents: ExitCotangents | None = None
    signal: Signal | None = None
    takes_signal: bool = False
    feedback: Feedback | None = None
    one_by_one: bool = False
    pending: Pending | None = None
    backward: Backward | None = None
    folds: bool = False
    approximates: str | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    per_parameter: bool = False
    complete: bool = False
    replay: Callable[[Graph, Values, Sequence[Trace], Block, Array | None], list[Array]] | None = (
        None
    )
    steps_back: int | None = None
    parts: tuple[Part, ...] = ()

    def named(self, graph: Graph) -> list[Any]:
        """For every trace a tree of the names of its parts."""
        if self.names is not None:
            return self.names(graph)
        return [f"{'.'.join(map(str, path))} {number}" for number, path in self.traced(graph)]


class Part(NamedTuple):
    """One rule of a mixture; in a block of windows it takes these, or single steps."""

    rule: Rule
    windowed: bool


class Pending(NamedTuple):
    """Traces that are rewritten only now and then, with the steps since beside them.

    Attributes:
        fits: whether these relations can have it.
        open: `(relations, traces, size) -> traces` with room for `size` steps.
        rule: the rule for these.
        fold: `(relations, traces) -> traces` as they were, all steps in them.
    """

    fits: Callable[[Sequence[Any]], bool]
    open: Callable[[Sequence[Any], Sequence[Trace], int], list[Trace]]
    rule: Rule
    fold: Callable[[Sequence[Any], Sequence[Trace]], list[Trace]]


class Backward(NamedTuple):
    """How a rule takes the blocks of a segment, several of them, from the last to the first.

    For gradients that are linear in the traces. What later steps ask of the traces after a block,
    the adjoints, goes from each block to the one before it, and meets the traces where the segment
    begins: none is made in between. If the traces after the segment are wanted, what the steps of a
    block have deposited is moved to the end of the segment, and put into the traces once.

    Attributes:
        adjoints: `graph -> arrays`, zeros: those after the last block.
        credit: `(graph, arrived) -> (gradients, adjoints)`, of the parameters by the steps of a
            block alone, and before the block; those after it are `arrived.later`.
        read: `(graph, consts, params, traces, adjoints, fresh) -> gradients` from what was before
            the segment.
        moves: `graph -> maps` that leave everything as it is: from the last block on.
        deposits: `(graph, block, observed, moves) -> (moves, deposits)`, moved to the end of the
            segment, with an axis of steps; the maps from there on are those from the block on.
        put: `(graph, consts, params, traces, moves, deposits, fresh) -> traces` after the segment.
    """

    adjoints: Callable[[Graph], list[Array]]
    credit: Callable[[Graph, Arrived], tuple[Any, list[Array]]]
    read: Callable[[Graph, Any, Any, Sequence[Trace], list[Array], Fresh], Any]
    moves: Callable[[Graph], Any]
    deposits: Callable[[Graph, Block, Any, Any], tuple[Any, Any]]
    put: Callable[[Graph, Any, Any, Sequence[Trace], Any, Any, Fresh], list[Trace]]
