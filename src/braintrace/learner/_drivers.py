"""Sequence drivers: gradients and evolution over a whole sequence in one compiled scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import type_error, value_error
from .._online import (
    OnUpdate,
    Options,
    RunInfo,
    Stream,
    check_mask,
    check_moving,
    check_on_update,
    sized_options,
    ticking,
    window_sizes,
)
from ..engine import check_surroundings, put
from ..frontend import (
    Split,
    StateTree,
    Traced,
    check_takes,
    split_at_call,
    states_of,
    trace_function,
    trace_placed,
    tree_of,
    values_of,
    weights_of,
)
from ..graph import Path
from ..program import PyTree
from ..rules import check_count
from ._data import MultiStepData
from ._optimizers import optimizer_of
from ._run import SequenceRun, sequence_run
from ._sequences import check_choice, length_of, loss_of
from ._silence import warn_if_silent

Array = jax.Array


class SequenceDriverMixin:
    """Sequences for anything that is called like a learner.

    `etrace_grad` sums online gradients, `etrace_train` updates weights on the way, `etrace_evolve`
    only runs.
    """

    optimizer: Any = None
    optimized: list[int] | None = None  # ids of the states that it updates
    optimizer_state: brainstate.State | None = None
    replaced: int = 0  # calls in a row with another optimizer, up to 2

    # What a class with these methods has.
    __call__: Callable[..., PyTree]
    forget_past: Callable[[], None]  # zeroes the traces, so that a new sequence can start
    _learner: Any  # the learner of one call; a mapped one has another inside
    # Lets calls of the learner be placeholders; each appends to the list.
    _placing: Callable[[list[bool]], AbstractContextManager[None]]

    @property
    def param_states(self) -> Mapping[Path, brainstate.State]:
        """All parameters of the model, by path."""
        return brainstate.graph.states(self._learner.model4compile, brainstate.ParamState)

    def _check_windows(self, chunk: int) -> None:
        """Refuse windows where they cannot be taken."""

    def etrace_grad(
        self,
        *sequences: PyTree,
        step_fn: Callable[..., PyTree] | None = None,
        mask: PyTree = None,
        chunk_size: int | None = None,
        weights: StateTree = None,
        reduction: str = "mean",
        loss_output: str = "per_step",
        has_aux: bool = False,
        return_value: bool = False,
        block_size: int | None = None,
        memory_budget: int | None = None,
        keep_traces: bool = True,
        progress: bool = False,
    ) -> PyTree:
        """Sum the online gradients of a sequence; memory does not grow with its length.

        The sequence is evaluated in blocks: the weights do not change within one, so the traces
        are touched once per block and the rest are matrix products. The result is that of one
        step after another, up to rounding. A step function whose input depends on the model's own
        states, that calls the learner inside of another transformation, or that calls Python by a
        `pure_callback` without `vmap_method`, is evaluated step by step.

        Args:
            *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
            step_fn: `step_fn(*slices)` calls the learner once and returns the loss of the step
                (or `(loss, aux)`). With windows, slices have a leading axis of `chunk_size`, the
                learner takes them as `MultiStepData`, and the losses of the window are returned.
            mask: weights of the steps' losses, shape (T,); finite numbers (inside of `jit`, where
                they cannot be looked at, a NaN makes the gradients NaN). What a backward rule adds
                to its cotangent (a penalty on activity) is no loss: it counts in every step.
            chunk_size: steps per window; None or 1 is one step at a time.
            weights: the states to differentiate; default all floating parameters. What `step_fn`
                does with one outside the learner call counts within the step only, see
                `learner.report` afterwards.
            reduction: 'mean' divides by max(sum(mask), 1), 'sum' does not.
            loss_output: 'per_step', 'masked' or 'scalar'.
            has_aux: whether `step_fn` returns `(loss, aux)`. With windows, leaves of `aux` whose
                leading axis counts the window's steps are joined along time.
            return_value: whether to return the losses too.
            block_size: steps per block; default as many as fit, 1 is one after another.
            memory_budget: bytes that the values of one block may take, without `block_size`.
            keep_traces: whether the traces after the sequence are wanted. Without them a sequence
                that fits in one block never builds a trace; they are left at zero.
            progress: whether to show a progress bar (needs tqdm).

        Returns:
            gradients, or (gradients, losses), (gradients, aux), (gradients, losses, aux).

        Raises:
            TypeError, ValueError: sequences, mask or options do not fit.
            CompilationError: the learner is strict, and `step_fn` does what is not learned exactly.
        """
        chunk = _chunk(chunk_size)
        length, stream = self._checked(sequences, step_fn, mask, chunk, "etrace_grad")
        check_choice("reduction", reduction, ("mean", "sum"))
        check_choice("loss_output", loss_output, ("per_step", "masked", "scalar"))
        options = sized_options(None, block_size, memory_budget, keep_traces)
        weights = weights_of(weights, self.param_states)
        with ticking(progress, -(-length // chunk)) as tick:
            run = self._sequence(_losses_of(step_fn, has_aux, chunk), stream, weights, chunk)
            options = replace(options, tick=tick, mean=reduction == "mean")
            leaves, (losses, aux) = run.gradient(options)
        if not keep_traces:
            self.forget_past()
        grads = tree_of(weights, leaves)
        weighted = losses if stream.mask is None else losses * stream.mask
        if loss_output == "masked":
            losses = weighted
        elif loss_output == "scalar":
            losses = weighted.sum() * (stream.mean_scale() if reduction == "mean" else 1.0)
        out = (grads, *([losses] if return_value else []), *([aux] if has_aux else []))
        return out[0] if len(out) == 1 else out

    def etrace_train(
        self,
        *sequences: PyTree,
        step_fn: Callable[..., PyTree] | None = None,
        optimizer: Any = None,
        update_every: int = 1,
        mask: PyTree = None,
        chunk_size: int | None = None,
        weights: StateTree = None,
        reduction: str = "mean",
        has_aux: bool = False,
        progress: bool = False,
        on_update: OnUpdate | None = None,
    ) -> PyTree:
        """Learn while the sequence runs: update the weights every few steps, in one compiled scan.

        Weights, states, traces and the state of the optimizer are left as they are after the last
        step. The state of an optax transformation is `learner.optimizer_state`; it is
        initialised again when another transformation or other weights are passed. Inside `jit` it
        must exist already: see `init_optimizer`.

        Args:
            *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
            step_fn: as in `etrace_grad`.
            optimizer: an optax transformation, or an optimizer of braintools.
            update_every: steps between two updates.
            mask: weights of the steps' losses, shape (T,).
            chunk_size: steps per window; divides `update_every`.
            weights: the states to update; default all floating parameters.
            reduction: 'mean' divides the gradient of an update by max(sum(mask), 1), 'sum' does
                not.
            has_aux: whether `step_fn` returns `(loss, aux)`.
            progress: whether to show a progress bar (needs tqdm).
            on_update: `on_update(step, metrics)`, called for every update of this call, counted
                from 1, with its `loss` (the mean over its steps) and `grad_norm`. It is called
                outside the compiled loops of 256 updates: for one loop while the next one runs.

        Returns:
            the losses (T,), each with the weights of its step; with `has_aux` (losses, aux).

        Raises:
            TypeError, ValueError: sequences, mask or options do not fit.
            CompilationError: the learner is strict, and `step_fn` does what is not learned exactly.
        """
        chunk = _chunk(chunk_size)
        every = check_count("update_every", update_every, "steps")
        if every % chunk:
            raise value_error(
                f"update_every={every} is not a multiple of chunk_size={chunk}.",
                why="the weights must not change within a window",
                do="make it a multiple",
            )
        length, stream = self._checked(sequences, step_fn, mask, chunk, "etrace_train")
        if self._learner.strict:
            report, rule = self._learner.report, type(self._learner).__name__
            check_moving(report.parameters.values(), rule, "etrace_train")
        check_choice("reduction", reduction, ("mean", "sum"))
        weights = weights_of(weights, self.param_states)
        check_on_update(on_update, (stream, values_of(weights)))
        with ticking(progress, -(-length // chunk)) as tick:
            run = self._sequence(_losses_of(step_fn, has_aux, chunk), stream, weights, chunk, every)
            update = optimizer_of(optimizer, weights, self)
            options = Options(tick=tick, mean=reduction == "mean", norms=on_update is not None)
            losses, aux = run.train(options, update, every, on_update)
        return (losses, aux) if has_aux else losses

    def init_optimizer(self, optimizer: Any, weights: StateTree = None) -> None:
        """Make the state of an optimizer, so that `etrace_train` can be called inside of `jit`.

        Args:
            optimizer: an optax transformation, or an optimizer of braintools.
            weights: the states that it will update; default all floating parameters.
        """
        weights = weights_of(weights, self.param_states)
        self.optimizer = self.optimizer_state = None
        optimizer_of(optimizer, weights, self)

    def _checked(
        self, sequences: tuple, step_fn: Any, mask: PyTree, chunk: int, name: str
    ) -> tuple[int, Stream]:
        """Length of the sequences, and their arrays with the mask."""
        if step_fn is None or not callable(step_fn):
            raise type_error(
                f"{name} needs step_fn.",
                why="you define the loss",
                do="pass step_fn=lambda x, y: loss(learner(x), y)",
            )
        length = length_of(sequences)
        _check_slices(step_fn, len(sequences), name)
        counted = check_mask(mask, length)
        self._check_windows(chunk)
        if chunk > 1 and getattr(self, "vjp_method", None) != "multi-step":
            raise value_error(
                f"chunk_size={chunk} on a learner that is not multi-step.",
                why="a window needs reverse mode inside the window",
                do="build the learner with vjp_method='multi-step'",
            )
        return length, Stream(self._spread(sequences), counted)

    def _spread(self, sequences: PyTree) -> PyTree:
        """Sequences on the devices of their samples."""
        learner = self._learner
        check_surroundings(learner.placement, sequences)
        if learner.placement is None:
            return sequences
        places = learner.placement.arrays(learner.graph.analysis, sequences, 1)
        return put(sequences, places)

    def etrace_evolve(
        self,
        *sequences: PyTree,
        step_fn: Callable[..., PyTree] | None = None,
        chunk_size: int | None = None,
        return_outputs: bool = False,
    ) -> PyTree:
        """Advance states and traces over a sequence without a loss.

        Args:
            *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
            step_fn: what to do with the slices; default calls the learner with them.
            chunk_size: steps per window; the default `step_fn` wraps windows in `MultiStepData`.
            return_outputs: whether to return what `step_fn` returned, stacked over time.
        """
        length_of(sequences)
        chunk = _chunk(chunk_size)
        self._check_windows(chunk)
        if step_fn is None:
            wrap = MultiStepData if chunk > 1 else lambda x: x
            call: Callable[..., PyTree] = lambda *slices: self(*map(wrap, slices))
        else:
            _check_slices(step_fn, len(sequences), "etrace_evolve")
            call = step_fn
        stream = Stream(self._spread(sequences))
        results = self._sequence(call, stream, None, chunk).outputs(Options())
        return results if return_outputs else None

    # --------------------------------------------------------------------------------- planning

    def _sequence(
        self,
        step: Callable,
        stream: Stream,
        weights: StateTree,
        chunk: int,
        every: int | None = None,
    ) -> SequenceRun:
        """The step function as something to run over a sequence.

        Raises:
            ValueError: the step function never calls the learner.
            CompilationError: the learner is strict, and the step function uses weights in a way
                that is not learned exactly.
        """
        learner, several = self._learner, False
        splits: dict[int | None, Split] = {}
        placed: dict[int | None, Traced] = {}
        trained = [] if weights is None else weights
        window = None if chunk == 1 else chunk
        slices = {
            size: jax.tree.map(lambda a, s=size: a[0] if s is None else a[:s], stream.arrays)
            for size in window_sizes(stream.length, window, every)
        }
        reasons: list[str] = []
        for size, arguments in slices.items():
            called: list[bool] = []
            with self._placing(called):
                traced = trace_placed(step, arguments)
            if weights is not None:
                several |= learner._judge(traced, called, weights)
            if traced is None:
                reasons.append("the learner is called inside of a derivative or a vmap")
                continue
            private = {id(s) for s in (*learner.etraces.values(), learner.running_index)}
            split = split_at_call(traced, private)
            if isinstance(split, str):
                reasons.append(split)
                continue
            placed[size], splits[size] = traced, split
            written = {id(traced.leaves[i].state) for i in split.changed}
            if not written.isdisjoint(map(id, states_of(trained)[0])):
                reasons.append("step_fn changes a weight")
        if not learner.calls_in_blocks:
            reasons.append(f"{type(learner).__name__} looks at the end of every call")
        if reasons:
            learner.last_run = RunInfo(False, reasons[0])
            # Not pruned: an operation without use may be there to refuse a second derivative.
            trace = lambda arguments: trace_function(step, *arguments, pruned=False)
            real = {size: trace(arguments) for size, arguments in slices.items()}
            return sequence_run(learner, trained, stream, window, real, None, True)
        if not learner._knows_spikes and None in placed:
            learner._knows_spikes = warn_if_silent(
                learner.model4compile, stream, placed[None], splits[None]
            )
        rule = learner.rule
        if rule.one_by_one:
            reasons.append("a step of the rule needs the trace of the step before")
        elif several or (stream.mask is not None and rule.per_parameter):
            reasons.append("the rule goes back through all steps of a block")
        learner.last_run = RunInfo(not reasons, next(iter(reasons), None))
        return sequence_run(learner, trained, stream, window, placed, splits, bool(reasons))


def _chunk(chunk_size: int | None) -> int:
    """Steps per window."""
    return 1 if chunk_size is None else check_count("chunk_size", chunk_size, "steps")


def _check_slices(step_fn: Callable[..., PyTree], count: int, name: str) -> None:
    check_takes(
        step_fn,
        ["a slice"] * count,
        f"{name} calls step_fn(*slices), with one slice of each sequence",
        "give one sequence per argument; a function that takes the network first, as in "
        "verify.compare, is step_fn=lambda *slices: function(learner, *slices)",
    )


def _losses_of(step_fn: Any, has_aux: bool, chunk: int) -> Callable[..., tuple[Array, PyTree]]:
    """The user's step as a function to `(loss, aux)`, checked."""

    def step(*slices: PyTree) -> tuple[PyTree, PyTree]:
        loss, aux = loss_of(step_fn(*slices), has_aux)
        expected = jax.tree.leaves(slices)[0].shape[:1] if chunk > 1 else ()
        if jnp.shape(loss) != expected:
            raise value_error(
                f"step_fn returned a loss of shape {jnp.shape(loss)}, expected {expected}.",
                why="each step has one loss",
                do="reduce the loss over the batch and features in step_fn",
            )
        return loss, aux

    return step
