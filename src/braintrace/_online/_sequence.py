"""A plan and a loss as the body of the loop over a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from ..engine import (
    OWN,
    Backward,
    BlockResult,
    Deposits,
    Fresh,
    States,
    TimeAxes,
    Values,
    advanced,
    map_steps,
    run_block,
    states_of_steps,
)
from ..graph import affine_equations
from ..program import PyTree, trace
from ..rules import Rule
from ._blocks import StepBytes, step_bytes
from ._loop import Bodies, Mode, Position, Stream, Weights, counted
from ._plan import Plan
from ._record import Recorder

Array = jax.Array
Loss = Callable[..., tuple[Array, PyTree]]  # (out, *targets) -> (loss, aux)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays that the steps of a sequence read, each with a leading axis of time."""

    inputs: tuple[Array, ...]
    targets: PyTree = ()
    extra: PyTree = None

    @property
    def length(self) -> int:
        leaves = jax.tree.leaves(self)
        return leaves[0].shape[0] if leaves else 1


def run_steps(
    plan: Plan,
    record: Rule,
    weights: Weights,
    at: Position,
    arrays: Arrays,
    window: int | None,
    mode: Mode,
) -> tuple[BlockResult, Position]:
    """Run the engine over one block; the position after it."""
    values, axes = _values(plan, weights, at, arrays, window)
    ran = run_block(plan.graph, record, values, at.traces, axes, **mode.options)
    if plan.attach is not None:
        attach = partial(plan.attach, plan.graph, values, axes, weights.of_rule)
        ran = replace(ran, outs=attach(ran.outs), credited=(attach(ran.credited[0]), values))
    last = lambda arrays: tuple(a[-1] for a in arrays)
    stored = ran.after.hidden[: len(at.states[0])]
    states = (last(stored), last(ran.after.others))
    return ran, Position(states, ran.traces, counted(at.count, arrays.length))


def _values(
    plan: Plan, weights: Weights, at: Position, arrays: Arrays, window: int | None
) -> tuple[Values, TimeAxes]:
    """The arrays of a block of steps."""
    timed = [True] * len(arrays.inputs) + [False] * len(weights.fixed)
    extra = {} if arrays.extra is None else dict(arrays.extra)
    flags = jax.tree.map(lambda a: True, extra)
    if weights.of_rule:
        extra[OWN], flags[OWN] = weights.of_rule, jax.tree.map(lambda a: False, weights.of_rule)
    axes = TimeAxes(
        arrays.length,
        tuple(False for _ in weights.consts),
        tuple(timed),
        window,
        tuple(jax.tree.leaves(flags)),
        jax.tree.structure(extra),
    )
    arguments, leaves = (*arrays.inputs, *weights.fixed), tuple(jax.tree.leaves(extra))
    hidden, others = map(tuple, at.states)
    step = plan.graph.step
    rates = at.traces[-step.rates :] if step.rates else ()
    hidden = (*hidden, *(jnp.zeros(v.shape, v.dtype) for v in step.filter_shapes), *rates)
    return Values(weights.consts, arguments, tuple(weights.trained), hidden, others, leaves), axes


@dataclass(frozen=True, eq=False)
class PlanBody:
    """Calls of a plan as a pure function of arrays, with the loss of each, or without one.

    A call is a step, or a window of them.
    """

    plan: Plan
    loss: Loss | None
    window: int | None
    targets: PyTree = ()  # shapes of those of one step
    masked: bool = False
    recorder: Recorder | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether calls are taken one after another."""
        # What does not count must not be met in the reverse pass, and RTRL's goes through it all.
        if (self.masked and self.record.per_parameter) or self.plan.attach is not None:
            return True
        graph, passed = self.plan.graph, self.plan.passed
        if self.window is not None and (graph.effects or graph.unmapped):
            return True  # windows are mapped, and these happen in order
        return passed is not None and passed.reads_states

    @property
    def goes_back(self) -> bool:
        """Whether its blocks can be taken backward: a step is run twice then."""
        graph = self.plan.graph
        traced = any(map(jax.tree.leaves, self.plan.trace_shapes))  # else nothing is saved by it
        return traced and not (self.one_by_one or graph.effects or graph.unmapped)

    @property
    def steps(self) -> int:
        """Steps in a call."""
        return self.window or 1

    @property
    def own_signal(self) -> bool:
        """Whether a call has a gradient that does not come from its loss."""
        return self.record.signal is not None

    @property
    def record(self) -> Rule:
        """The rule."""
        return self.plan.rule.record

    @property
    def relations(self) -> Sequence[Any]:
        """What has a trace, in a mixture part by part."""
        graph = self.plan.graph
        return [part.relations for part in graph.parts] or graph.relations

    @cached_property
    def step_bytes(self) -> StepBytes:
        """What one step takes."""
        return step_bytes(self.plan.graph)

    @cached_property
    def adds_constants(self) -> bool:
        """Whether a backward rule around the model adds a constant to a cotangent.

        It counts in its own call only, so that no other call may be evaluated in its place.
        """
        step = self.plan.graph.step
        outs = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in step.program.outputs[: step.n_outs]]
        leaves, tree = jax.tree.flatten((outs, self.targets))
        flat = lambda *a: jax.tree.leaves(self._one(*jax.tree.unflatten(tree, a)))
        program, _ = trace(flat, *leaves)
        return bool(affine_equations(program, program.outputs))

    def _one(self, outs: list[Array], targets: PyTree) -> tuple[Array, PyTree]:
        assert self.loss is not None
        return self.loss(jax.tree.unflatten(self.plan.out_tree, outs), *targets)

    def run(
        self, record: Rule, weights: Weights, at: Position, arrays: Arrays, mode: Mode
    ) -> tuple[PyTree, Array, Position]:
        """Run a block of calls: results, the losses to differentiate, the position after it.

        Results have a leading axis of calls; where they are differentiated, the first is the loss.
        """
        size, calls = self.steps, arrays.length
        steps = calls * size
        arrays = self._in_time(arrays)
        if mode.behind is not None:
            states = self._in_time(mode.behind.states)
            mode = replace(mode, behind=replace(mode.behind, states=states))
        passed = self.plan.passed
        if passed is not None:
            step = self.plan.problem.step
            extra = passed(step, weights, at.states, arrays.inputs, steps)
            arrays = replace(arrays, extra=extra)
        ran, new = run_steps(self.plan, record, weights, at, arrays, self.window, mode)
        if self.loss is None:
            results: PyTree = ran.outs
            losses: PyTree = None
        else:
            results = map_steps(steps, self._one, ran.outs, arrays.targets)
            losses = results[0]
            if mode.substitute is not None or record.replay is not None:
                index: Any = slice(None)
                if mode.substitute is not None:
                    index = (mode.substitute[:, None] * size + jnp.arange(size)).reshape(-1)
                targets = jax.tree.map(lambda a: a[index], arrays.targets)
                losses = map_steps(steps, self._one, ran.credited[0], targets)[0]
            if self.recorder is not None and self.recorder.within:
                hidden = ran.after.hidden[: len(at.states[0])]
                results = (*results, self.recorder.of_states(hidden, ran.after.others))
        results, losses = self._in_calls((results, losses))
        return results, losses, new

    def _in_time(self, arrays: PyTree) -> PyTree:
        """Arrays of calls, (calls, window, ...), along time."""
        merge = lambda a: a.reshape((a.shape[0] * a.shape[1], *a.shape[2:]))
        return arrays if self.window is None else jax.tree.map(merge, arrays)

    def _in_calls(self, arrays: PyTree) -> PyTree:
        """The inverse."""
        size = self.window
        if size is None:
            return arrays
        return jax.tree.map(lambda a: a.reshape((a.shape[0] // size, size, *a.shape[1:])), arrays)

    def states(self, weights: Weights, at: Position, arrays: Arrays) -> tuple[States, PyTree]:
        """The states before every step, with a leading axis of calls, and those after the last."""
        values, axes = _values(self.plan, weights, at, self._in_time(arrays), self.window)
        states, (hidden, others) = states_of_steps(self.plan.graph, values, axes)
        return self._in_calls(states), (hidden[: len(at.states[0])], others)

    def first(self, states: States) -> States:
        """The states before the first of the steps, as an entry of a block."""
        return jax.tree.map(lambda a: a[:1] if self.window is None else a[:1, :1], states)

    def behind_all(self, record: Rule, keep: bool) -> tuple[PyTree, PyTree]:
        """The adjoints and moves behind the last block of a segment, see `engine.Backward`."""
        graph, back = self.plan.graph, _backward(record)
        return back.adjoints(graph), back.moves(graph) if keep else None

    def read(
        self, record: Rule, weights: Weights, traces: PyTree, adjoints: PyTree, fresh: Fresh
    ) -> list[Array]:
        """The gradient of a segment by what was before it."""
        where = weights.consts, tuple(weights.trained)
        grads = _backward(record).read(self.plan.graph, *where, traces, adjoints, fresh)
        return list(grads)

    def put(
        self, record: Rule, weights: Weights, traces: PyTree, deposits: Deposits, fresh: Fresh
    ) -> PyTree:
        """The traces after a segment."""
        where = weights.consts, tuple(weights.trained)
        return advanced(self.plan.graph, record, where, traces, deposits, fresh)


def bodies_of(
    plan: Plan, loss: Loss | None, stream: Stream, recorder: Recorder | None = None
) -> Bodies:
    """The body of the loop over a sequence, for every size of a window."""
    shape = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
    targets, masked = jax.tree.map(shape, stream.arrays.targets), stream.mask is not None
    return lambda window: PlanBody(plan, loss, window, targets, masked, recorder=recorder)


def ended(plan: Plan, at: Position) -> Position:
    """A position whose traces are wanted no more."""
    return replace(at, traces=plan.zeros(), count=jnp.zeros_like(at.count))


def _backward(record: Rule) -> Backward:
    assert record.backward is not None  # see `_loop._span`
    return record.backward
