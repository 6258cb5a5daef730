"""Sequences: gradients, training and evolution over a whole sequence in one compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_takes, type_error, value_error
from .._online import (
    Arrays,
    LossWatch,
    OnUpdate,
    Options,
    Position,
    Record,
    RunInfo,
    Updates,
    check_mask,
    check_moving,
    check_on_update,
    check_one_loss,
    loss_of,
    recorder_of,
    warn_if_silent,
)
from ..frontend import ModuleInfo, key_of, title_of
from ..program import PyTree, any_traced, evaluate, fingerprint
from ..rules import check_choice, check_count
from ._alone import alone
from ._checks import check_exact, not_compiled
from ._data import MultiStepData
from ._optimizers import optimizer_of
from ._sequences import length_of
from ._steps import Prepared, prepared_step, window_results
from ._weights import Differentiated, StateTree, WeightTree, check_read

REDUCTIONS = {"mean": "divided by the steps that count", "sum": "not divided"}
_LOSS_OUTPUTS = {
    "per_step": "the loss of every step",
    "masked": "times its weight",
    "scalar": "their sum, divided as the gradient",
}
Array = jax.Array
State: TypeAlias = brainstate.State


class SequenceDriverMixin:
    """Sequences for learners.

    `etrace_grad` sums online gradients, `etrace_train` updates weights on the way, `etrace_evolve`
    only runs; `grad` and `train` are for losses of outputs.
    """

    optimizer: Any = None
    optimized: list[int] | None = None  # ids of the states that it updates
    optimizer_state: State | None = None
    replaced: int = 0  # calls in a row with another optimizer, up to 2

    # What a learner has besides.
    vjp_method: str
    title: str
    window: int | None
    batch_size: int | None
    model4compile: Any
    placement: Any
    strict: bool
    last_run: RunInfo | None
    param_states: Any
    path_to_states: Any
    running_index: Any
    _forgot: Callable[[Any], None]
    report_of: Callable[[Prepared], Any]
    _known: Any
    _losses: LossWatch
    _knows_spikes: bool
    _prepared: Callable[..., Prepared]
    _call: Callable[..., Any]
    _write: Callable[..., None]

    @alone
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
        """Sum the online gradients of a sequence; memory has a bound that its length does not move.

        The sequence is evaluated in blocks: the weights do not change within them, so the traces
        are touched once per block, or several, and the rest are matrix products. The result is that
        of one step after another, up to rounding. The whole of `step_fn` is the step that is
        learned: what it does before and after the call has traces as the model has, see
        `learner.report`.

        Args:
            *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
            step_fn: `step_fn(*slices)` calls the learner and returns the loss of the step
                (or `(loss, aux)`). With windows, slices have a leading axis of `chunk_size`, the
                learner takes them as `MultiStepData`, and the losses of the window are returned.
            mask: weights of the steps' losses, shape (T,); finite numbers (inside of `jit`, where
                they cannot be looked at, a NaN makes the gradients NaN). What a backward rule adds
                to its cotangent (a penalty on activity) is no loss: it counts in every step.
            chunk_size: steps per window; default the `window` of `compile`, 1 is one at a time.
            weights: the states to differentiate, of the model or of whatever `step_fn` uses;
                default all floating parameters of the model.
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
        if reduction not in REDUCTIONS or loss_output not in _LOSS_OUTPUTS:
            check_choice("reduction", reduction, REDUCTIONS)
            check_choice("loss_output", loss_output, _LOSS_OUTPUTS)
        steps = self._steps("etrace_grad", sequences, step_fn, mask, chunk_size, weights, has_aux)
        options = Options(
            *(steps.together, block_size, memory_budget, keep_traces),
            fresh=steps.fresh(),
            mean=reduction == "mean",
            only=steps.of.wanted,
        )
        call = steps.call(donate=True)
        ran = call.gradient(etrace_gradient, _loss, options, progress)
        found, at, results, self.last_run = ran
        steps.write(at)
        if not keep_traces:
            self._forgot(steps.prepared)
        grads = steps.of.weights.tree(steps.of.gradients(found))
        losses, aux = steps.results(results)
        weighted = losses if steps.mask is None else losses * steps.mask
        if loss_output == "masked":
            losses = weighted
        elif loss_output == "scalar":
            scale = call.stream.mean_scale() if reduction == "mean" else 1.0
            losses = weighted.sum() * scale
        out = (grads, *([losses] if return_value else []), *([aux] if has_aux else []))
        return out[0] if len(out) == 1 else out

    @alone
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
        record: Record | None = None,
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
            record: what to record while training, see `braintrace.Record`.

        Returns:
            the losses (T,), each with the weights of its step; with `has_aux` (losses, aux); with
            `record` a `braintrace.show.Recording` after these.

        Raises:
            TypeError, ValueError: sequences, mask or options do not fit.
            CompilationError: the learner is strict, and `step_fn` does what is not learned exactly.
        """
        chunk = _chunk(self.window if chunk_size is None else chunk_size)
        every = check_count("update_every", update_every, "steps")
        if every % chunk:
            raise value_error(
                f"update_every={every} is not a multiple of chunk_size={chunk}.",
                why="the weights must not change within a window",
                do="make it a multiple",
            )
        check_choice("reduction", reduction, REDUCTIONS)
        steps = self._steps("etrace_train", sequences, step_fn, mask, chunk_size, weights, has_aux)
        if self.strict:
            report = self.report_of(steps.prepared)
            check_moving(report.parameters.values(), self.title, "etrace_train")
        of = steps.of
        check_on_update(on_update, (steps.sequences, steps.mask, of.weights.values()))
        update = optimizer_of(optimizer, of.weights, self)

        def step(grads: list, trained: list, own: Any, at: Position) -> Any:
            arrays, unused, consts = own
            grads, before = of.gradients(grads), of.leaves(trained, unused)
            after, arrays = update(consts, grads, before, arrays)
            trained, unused = of.placed(after, trained)
            return trained, (arrays, unused, consts), at

        plan, size = steps.prepared.plan, self.batch_size
        recorder = None if record is None else recorder_of(plan, record, every, size)
        mean = reduction == "mean"
        options = Options(steps.together, mean=mean, only=of.wanted, recorder=recorder)
        own = (update.own, of.unused(), list(update.consts))
        own = own if self.placement is None else self.placement.whole(own)
        key = (fingerprint(update.program, update.consts), len(update.own), of.places)
        call, updates = steps.call(donate=True), Updates(step, every)
        more = (on_update, self._losses, progress)
        trained, own, at, results, self.last_run = call.train(
            etrace_training, key, _loss, options, updates, own, *more
        )
        steps.write(at)
        of.weights.write(of.leaves(trained, own[1]))
        update.write(own[0])
        losses, aux = steps.results(results[:2])
        out = (losses, aux) if has_aux else (losses,)
        if recorder is not None:
            groups = tuple(g.hidden_paths for g in plan.graph.groups)
            out = *out, recorder.recording(results[-1], groups)
        return out[0] if len(out) == 1 else out

    def init_optimizer(self, optimizer: Any, weights: StateTree = None) -> None:
        """Make the state of an optimizer, so that `etrace_train` can be called inside of `jit`.

        Args:
            optimizer: an optax transformation, or an optimizer of braintools.
            weights: the states that it will update; default all floating parameters.
        """
        self.optimizer = self.optimizer_state = None
        optimizer_of(optimizer, WeightTree.of(weights, self.param_states), self)

    @alone
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
        chunk, wrap = _chunk(self.window if chunk_size is None else chunk_size), (lambda x: x)
        if step_fn is None and chunk > 1:
            wrap = MultiStepData
        call_it = _Evolution(self, wrap) if step_fn is None else step_fn
        nothing = WeightTree()
        steps = self._sequence("etrace_evolve", sequences, call_it, None, chunk, nothing, _outputs)
        options = Options(steps.window)
        at, outs, self.last_run = steps.call().scan(options)
        steps.write(at)
        if not return_outputs:
            return None
        return steps.outputs(outs)

    def grad(self, loss: Callable[..., PyTree], **options: Any) -> Callable[..., PyTree]:
        """The gradient of the summed losses of a sequence, as `braintrace.online` has it.

        Args:
            loss: `loss(out, *targets)`, the loss of one step.
            **options: those of `etrace_grad`, e.g. `has_aux`, `block_size`, `weights`.

        Returns:
            `f(xs, *targets, mask=None)`, which returns `(grads, losses)`, and `aux` with `has_aux`;
            `xs` are the inputs of all steps, a tuple if there are several.
        """
        options = {"reduction": "sum", **options, "return_value": True}
        return _OfOutputs(self, loss, self.etrace_grad, options)

    def train(
        self, loss: Callable[..., PyTree], optimizer: Any, update_every: int = 1, **options: Any
    ) -> Callable[..., PyTree]:
        """Learn while the sequence runs, as `braintrace.online` does.

        Args:
            loss: `loss(out, *targets)`, the loss of one step.
            optimizer: an optax transformation, or an optimizer of braintools.
            update_every: steps between two updates; the gradient is that of their summed losses.
            **options: those of `etrace_train`, e.g. `has_aux`, `on_update`, `record`, `weights`.

        Returns:
            `f(xs, *targets, mask=None)`, which returns the losses, `aux` with `has_aux`, and a
            recording with `record`.
        """
        more = {"optimizer": optimizer, "update_every": update_every, "reduction": "sum"}
        return _OfOutputs(self, loss, self.etrace_train, {**more, **options})

    # --------------------------------------------------------------------------------- planning

    def _steps(
        self,
        name: str,
        sequences: tuple[PyTree, ...],
        step_fn: Any,
        mask: PyTree,
        chunk_size: int | None,
        weights: StateTree,
        has_aux: bool,
    ) -> Steps:
        """A step function with a loss over sequences, checked."""
        if step_fn is None or not callable(step_fn):
            raise type_error(
                f"{name} needs step_fn.",
                why="you define the loss",
                do="pass step_fn=lambda x, y: loss(learner(x), y)",
            )
        chunk = _chunk(self.window if chunk_size is None else chunk_size)
        length = length_of(sequences)
        counted = None if mask is None else check_mask(mask, length)
        if chunk > 1 and self.vjp_method != "multi-step":
            raise value_error(
                f"chunk_size={chunk} on a learner that is not multi-step.",
                why="a window needs reverse mode inside the window",
                do="build the learner with vjp_method='multi-step'",
            )
        finish = _Losses(has_aux, chunk)
        steps = self._sequence(name, sequences, step_fn, counted, chunk, weights, finish)
        if self.strict:
            named = steps.of.weights.named(self.path_to_states)
            check_exact(self.report_of(steps.prepared), self.title, named)
        if not self._knows_spikes:
            call = steps.call()
            self._knows_spikes = warn_if_silent(call, title_of(self.model4compile))
        return steps

    def _sequence(
        self,
        name: str,
        sequences: tuple[PyTree, ...],
        step_fn: Callable[..., PyTree],
        mask: Array | None,
        chunk: int,
        weights: StateTree,
        finish: Any,
    ) -> Steps:
        if self._known.own is None:
            raise not_compiled(f"{self.title} is called")
        sequences = jax.tree.map(jnp.asarray, sequences)
        slices = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequences)
        window = chunk > 1

        def trace() -> tuple[ModuleInfo, WeightTree]:
            _check_slices(step_fn, len(sequences), name)
            params, tree = self.param_states, weights
            if not isinstance(tree, WeightTree):
                tree = WeightTree.of(tree, params)
            named = tree.named(self.path_to_states)
            info = prepared_step(self, step_fn, slices, finish, named, window)
            read = [s for s in info.states.values() if isinstance(s, brainstate.ParamState)]
            check_read(named, params, read)
            return info.trained({id(s) for s in (*params.values(), *tree.states)}), tree

        key = key_of(slices, self, step_fn, weights)
        prepared = self._prepared(("step", finish, window), key, trace)
        self._known.last = prepared
        single = self.vjp_method == "single-step" and not window
        size = None if single else chunk
        return Steps(self, prepared, sequences, mask, size, step_fn, finish)


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """A step function over sequences, with its analysed step.

    `window` is the number of steps in which nothing is cut, None for single steps.
    """

    learner: Any
    prepared: Prepared
    sequences: tuple[PyTree, ...]
    mask: Array | None
    window: int | None
    step_fn: Callable[..., PyTree]
    finish: Any

    @property
    def of(self) -> Differentiated:
        """What is differentiated."""
        return self.prepared.of

    @property
    def length(self) -> int:
        return jax.tree.leaves(self.sequences)[0].shape[0]

    @property
    def together(self) -> int | None:
        """Steps in which nothing is cut: those of a window, or of a rule that has its own."""
        rule = self.learner.learning_rule
        return self.window if rule.record.replay is None else rule.window

    def fresh(self) -> bool:
        """Whether the traces are zero, as far as that is certain while tracing.

        Without a trace it is looked up in the loop, so that one program serves both.
        """
        index = self.learner.running_index.value
        if not isinstance(index, np.ndarray) or index != 0:
            return False
        return any_traced([t.take() for t in self.learner.etraces.values()])

    def call(self, donate: bool = False) -> Any:
        """The step with the present arrays."""
        inputs = tuple(jax.tree.leaves(self.sequences))
        donate &= not any_traced(inputs)  # a write may be refused: the traces must outlive it
        return self.learner._call(self.prepared, Arrays(inputs), self.mask, donate)

    def write(self, at: Position) -> None:
        """Store the new states and traces."""
        self.learner._write(self.prepared, at)

    def results(self, results: PyTree) -> tuple[Array, PyTree]:
        """Losses and aux; those of whole windows are computed from the results of their steps."""
        losses, (aux, calls) = results
        if not self._in_windows or not self.finish.has_aux:
            return losses, aux
        return losses, self._of_windows(lambda *s: self.step_fn(*s)[1], calls)

    def outputs(self, outs: list[Array]) -> PyTree:
        """What a step function returns, along time."""
        out, calls, _ = jax.tree.unflatten(self.prepared.info.out_tree, outs)
        return self._of_windows(self.step_fn, calls) if self._in_windows else out

    @property
    def _in_windows(self) -> bool:
        return (self.window or 1) > 1

    def _of_windows(self, function: Callable[..., PyTree], calls: list[PyTree]) -> PyTree:
        """`function` of all windows, given the results of the learner's calls in them."""
        size, parts = self.window or 1, []
        whole = self.length // size * size
        for start, stop, n in ((0, whole, size), (whole, self.length, self.length - whole)):
            if start < stop:
                parts.append(self._of_windows_alike(function, calls, (start, stop, n)))
        return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)

    def _of_windows_alike(
        self, function: Callable[..., PyTree], calls: list[PyTree], part: tuple[int, int, int]
    ) -> PyTree:
        """The same of the steps of a part, in windows of one size."""
        start, stop, n = part
        cut = lambda a: a[start:stop].reshape((-1, n, *a.shape[1:]))
        windows = jax.tree.map(cut, (calls, self.sequences))
        shape = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        given = jax.tree.map(shape, windows)
        results, slices = given
        named = self.of.weights.named(self.learner.path_to_states)
        info = window_results(self.learner, function, results, slices, named)
        step, now = info.step, info.read()

        def one(*leaves: Array) -> list[Array]:
            inputs = step.arguments(leaves, now.params, now.hidden, now.others)
            return evaluate(step.program, info.consts, inputs)[: step.n_outs]

        outs = jax.vmap(one)(*jax.tree.leaves(windows))
        joined = lambda a: a.reshape((-1, *a.shape[2:])) if a.shape[1:2] == (n,) else a
        return jax.tree.unflatten(info.out_tree, list(map(joined, outs)))


@dataclass(frozen=True)
class _Losses:
    """What a step function returns, as `(loss, aux)`, checked."""

    has_aux: bool
    chunk: int

    def __call__(self, result: PyTree) -> tuple[Array, PyTree]:
        loss, aux = loss_of(result, self.has_aux, "step_fn")
        window, shape = self.chunk > 1, jnp.shape(loss)
        if window and shape[:1] == (1,):  # it is traced on windows of one step
            shape = (self.chunk, *shape[1:])
        check_one_loss("step_fn", shape, (self.chunk,) if window else ())
        return (loss[0], None) if window else (loss, aux)


def _outputs(result: PyTree) -> PyTree:
    return result


@dataclass(frozen=True)
class _Evolution:
    """The step of `etrace_evolve` without a function: a call of the learner."""

    learner: Any
    wrap: Callable[[PyTree], PyTree]

    def __call__(self, *slices: PyTree) -> PyTree:
        return self.learner(*map(self.wrap, slices))


class _OfOutputs:
    """A loss of outputs and targets as a step function, for one of the drivers."""

    def __init__(self, learner: Any, loss: Callable, driver: Callable, options: dict[str, Any]):
        self._learner, self._loss, self._driver, self._options = learner, loss, driver, options
        self._steps: dict[int, Callable[..., PyTree]] = {}

    def __call__(self, xs: PyTree, *targets: PyTree, mask: PyTree = None) -> PyTree:
        inputs = xs if type(xs) is tuple else (xs,)
        n, learner, loss = len(inputs), self._learner, self._loss
        step = lambda *s: loss(learner(*s[:n]), *s[n:])
        if (learner.window or 1) > 1:
            step = lambda *s: jax.vmap(loss)(learner(*map(MultiStepData, s[:n])), *s[n:])
        step = self._steps.setdefault(n, step)
        return self._driver(*inputs, *targets, step_fn=step, mask=mask, **self._options)


def etrace_gradient() -> None:
    """What gradients of step functions are compiled for."""


def etrace_training() -> None:
    """What training with step functions is compiled for."""


def _loss(out: PyTree) -> tuple[Array, PyTree]:
    """The loss of a step, and what else is wanted of it."""
    (loss, aux), calls, _ = out
    return loss, (aux, calls)


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
