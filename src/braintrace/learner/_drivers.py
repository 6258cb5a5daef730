"""Sequence drivers: gradients and evolution over a whole sequence in one compiled scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._online import check_mask, masked_gradient, ticking
from ..rules import check_count
from ._data import MultiStepData
from ._optimizers import optimizer_of
from ._sequences import (
    check_choice,
    check_takes,
    chunk_of,
    count_of,
    joined,
    leaves_of,
    length_of,
    loss_of,
    text,
    values_of,
    weights_of,
    windows_of,
    write_leaves,
)


class SequenceDriverMixin:
    """Sequences for anything that is called like a learner.

    `etrace_grad` sums online gradients, `etrace_train` updates weights on the way, `etrace_evolve`
    only runs.
    """

    __module__ = "braintrace"

    optimizer: Any = None
    optimized: list[int] | None = None  # ids of the states that it updates
    optimizer_state: brainstate.State | None = None

    def _check_windows(self, chunk: int) -> None:
        """Refuse windows where they cannot be taken."""

    @property
    def _has_own_signal(self) -> bool:
        """Whether a call has a gradient that does not come from its loss."""
        return False

    def forget_past(self) -> None:
        """Zero the traces, so that what comes counts as a new sequence."""
        raise NotImplementedError

    def etrace_grad(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any] | None = None,
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
        reduction: str = "mean",
        loss_output: str = "per_step",
        has_aux: bool = False,
        return_value: bool = False,
        block_size: int | None = None,
        memory_budget: int | None = None,
        keep_traces: bool = True,
        progress: bool = False,
    ) -> Any:
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
            memory_budget: bytes that the values of one block may take, if `block_size` is not
                given.
            keep_traces: whether the traces after the sequence are wanted. Without them a sequence
                that fits in one block never builds a trace; they are left at zero.
            progress: whether to show a progress bar (needs tqdm).

        Returns:
            gradients, or (gradients, losses), (gradients, aux), (gradients, losses, aux).

        Raises:
            TypeError, ValueError: sequences, mask or options do not fit together.
            CompilationError: the learner is strict, and `step_fn` does what is not learned exactly.
        """
        chunk = chunk_of(chunk_size)
        length, counted = self._checked(sequences, step_fn, mask, chunk, "etrace_grad")
        check_choice("reduction", reduction, ("mean", "sum"))
        check_choice("loss_output", loss_output, ("per_step", "masked", "scalar"))
        count_of("block_size", block_size, "steps")
        count_of("memory_budget", memory_budget, "bytes")
        weights = weights_of(weights, self.param_states)  # type: ignore[attr-defined]

        step = _losses_of(step_fn, has_aux, chunk)
        parts = windows_of((counted, *sequences), length, chunk)
        total, results = None, []
        with ticking(progress, -(-length // chunk)) as tick:
            for part in parts:
                keep = keep_traces or part is not parts[-1]
                options = (block_size, memory_budget, keep, tick)
                found = self._in_blocks(step, part[0], part[1:], weights, options)
                if found is None:
                    found = self._one_by_one(step, part[0], part[1:], weights, tick)
                grads, result = found
                total = grads if total is None else jax.tree.map(jnp.add, total, grads)
                results.append(result)
        if not keep_traces:
            self.forget_past()
        losses, aux = joined(results, parts, chunk)

        mask = jnp.ones(length) if counted is None else counted
        scale = 1.0 / jnp.maximum(mask.sum(), 1) if reduction == "mean" else 1.0
        grads = jax.tree.map(lambda g: g * jnp.asarray(scale, g.dtype), total)
        if loss_output == "masked":
            losses = losses * mask
        elif loss_output == "scalar":
            losses = (losses * mask).sum() * scale
        out = (grads, *([losses] if return_value else []), *([aux] if has_aux else []))
        return out[0] if len(out) == 1 else out

    def _in_blocks(
        self, step: Callable, mask: Any, sequences: Any, weights: Any, options: tuple
    ) -> tuple[Any, Any] | None:
        """Gradients of a part of the sequence by blocks, None where that is not possible."""
        return None

    def _one_by_one(
        self, step: Callable, mask: Any, sequences: Any, weights: Any, tick: Any
    ) -> tuple[Any, Any]:
        """Gradients of a part of the sequence, call after call."""

        def weighted(m, *slices):
            loss, aux = step(*slices)
            total = jnp.sum(loss if m is None else jnp.where(m == 0, 0, m * loss))
            return total, (loss, aux)

        grad = brainstate.transform.grad(weighted, weights, has_aux=True, check_states=False)

        def body(total, slices):
            grads, result = grad(*slices)
            if mask is not None:
                counts, own = jnp.any(slices[0] != 0), self._has_own_signal
                grads = jax.tree.map(lambda g: masked_gradient(g, counts, own), grads)
            if tick is not None:
                jax.debug.callback(tick, 1)
            return jax.tree.map(jnp.add, total, grads), result

        total = jax.tree.map(jnp.zeros_like, values_of(weights))
        return brainstate.transform.scan(body, total, (mask, *sequences))

    def etrace_train(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any] | None = None,
        optimizer: Any = None,
        update_every: int = 1,
        mask: Any = None,
        chunk_size: int | None = None,
        weights: Any = None,
        reduction: str = "mean",
        has_aux: bool = False,
        progress: bool = False,
    ) -> Any:
        """Learn while the sequence runs: update the weights every few steps, in one compiled scan.

        Weights, states, traces and the state of the optimizer are left as they are after the last
        step. The state of an optax transformation is `learner.optimizer_state`; it starts anew
        when another transformation or other weights are passed. Inside of `jit` it must exist
        before: see `init_optimizer`.

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

        Returns:
            the losses (T,), each with the weights of its step; with `has_aux` (losses, aux).

        Raises:
            TypeError, ValueError: sequences, mask or options do not fit together.
            CompilationError: the learner is strict, and `step_fn` does what is not learned exactly.
        """
        chunk = chunk_of(chunk_size)
        every = check_count("update_every", update_every, "steps")
        if every % chunk:
            raise ValueError(
                text(
                    f"update_every={every} is not a multiple of chunk_size={chunk}.",
                    "the weights must not change within a window",
                    "make it a multiple",
                )
            )
        length, counted = self._checked(sequences, step_fn, mask, chunk, "etrace_train")
        check_choice("reduction", reduction, ("mean", "sum"))
        weights = weights_of(weights, self.param_states)  # type: ignore[attr-defined]
        step = _losses_of(step_fn, has_aux, chunk)
        arrays = (counted, *sequences)
        # An update of windows that do not fill it may have a shorter one: it is a case of its own.
        whole = length if chunk == 1 else length // every * every
        head = windows_of(jax.tree.map(lambda a: a[:whole], arrays), whole, chunk)
        tail = windows_of(jax.tree.map(lambda a: a[whole:], arrays), length - whole, chunk)
        tail = tail if whole < length else []
        results = []
        with ticking(progress, -(-length // chunk)) as tick:
            for part in head:
                update = optimizer_of(optimizer, weights, self)
                options = (update, every // chunk, reduction, tick)
                found = self._trained(step, part[0], part[1:], weights, options)
                if found is None:
                    found = self._trained_one_by_one(step, part[0], part[1:], weights, options)
                results.append(found)
            if tail:
                update = optimizer_of(optimizer, weights, self)
                results += self._last_update(step, tail, weights, (update, reduction, tick))
        losses, aux = joined(results, head + tail, chunk)
        return (losses, aux) if has_aux else losses

    def _last_update(self, step: Callable, parts: list, weights: Any, options: tuple) -> list[Any]:
        """One update from all of some parts of the sequence."""
        optimizer, reduction, tick = options
        total, size, results = None, 0.0, []
        for mask, *sequences in parts:
            found = self._in_blocks(step, mask, sequences, weights, (None, None, True, tick))
            if found is None:
                found = self._one_by_one(step, mask, sequences, weights, tick)
            grads, result = found
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            size = size + (result[0].size if mask is None else mask.sum())
            results.append(result)
        if reduction == "mean":
            weight = 1.0 / jnp.maximum(size, 1)
            total = jax.tree.map(lambda g: g * jnp.asarray(weight, g.dtype), total)
        old = leaves_of(weights, values_of(weights))
        new, own = optimizer(optimizer.consts, leaves_of(weights, total), old, optimizer.own)
        write_leaves(weights, new)
        optimizer.write(own)
        return results

    def init_optimizer(self, optimizer: Any, weights: Any = None) -> None:
        """Make the state of an optimizer, so that `etrace_train` can be called inside of `jit`.

        Args:
            optimizer: an optax transformation, or an optimizer of braintools.
            weights: the states that it will update; default all floating parameters.
        """
        weights = weights_of(weights, self.param_states)  # type: ignore[attr-defined]
        self.optimizer = self.optimizer_state = None
        optimizer_of(optimizer, weights, self)

    def _trained(
        self, step: Callable, mask: Any, sequences: Any, weights: Any, options: tuple
    ) -> Any:
        """Train on a part of the sequence by blocks, None where that is not possible."""
        return None

    def _trained_one_by_one(
        self, step: Callable, mask: Any, sequences: Any, weights: Any, options: tuple
    ) -> Any:
        """Train on a part of the sequence, call after call."""
        optimizer, per_update, reduction, tick = options
        own = brainstate.LongTermState(optimizer.own)

        def update(piece):
            m = piece[0]
            grads, results = self._one_by_one(step, m, piece[1:], weights, tick)
            if reduction == "mean":
                size = jax.tree.leaves(results)[0].size if m is None else jnp.maximum(m.sum(), 1)
                grads = jax.tree.map(lambda g: g * jnp.asarray(1.0 / size, g.dtype), grads)
            old = leaves_of(weights, values_of(weights))
            flat = leaves_of(weights, grads)
            new, own.value = optimizer(optimizer.consts, flat, old, own.value)
            write_leaves(weights, new)
            return results

        def scanned(pieces):
            return brainstate.transform.for_loop(update, pieces)

        count = jax.tree.leaves(sequences)[0].shape[0]
        whole = count // per_update * per_update
        out = []
        if whole:
            split = lambda a: a[:whole].reshape((whole // per_update, per_update, *a.shape[1:]))
            found = scanned(jax.tree.map(split, (mask, *sequences)))
            out.append(jax.tree.map(lambda a: a.reshape((whole, *a.shape[2:])), found))
        if whole < count:
            out.append(update(jax.tree.map(lambda a: a[whole:], (mask, *sequences))))
        optimizer.write(own.value)
        return jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *out)

    def _checked(
        self, sequences: tuple, step_fn: Any, mask: Any, chunk: int, name: str
    ) -> tuple[int, Any]:
        """Length of the sequences, and the mask as numbers."""
        if step_fn is None or not callable(step_fn):
            raise TypeError(
                text(
                    f"{name} needs step_fn.",
                    "the loss is the user's",
                    "pass step_fn=lambda x, y: loss(learner(x), y)",
                )
            )
        length = length_of(sequences)
        _check_slices(step_fn, len(sequences), name)
        counted = check_mask(mask, length)
        self._check_windows(chunk)
        if chunk > 1 and getattr(self, "vjp_method", None) != "multi-step":
            raise ValueError(
                text(
                    f"chunk_size={chunk} on a learner that is not multi-step.",
                    "a window needs reverse mode inside the window",
                    "build the learner with vjp_method='multi-step'",
                )
            )
        return length, counted

    def etrace_evolve(
        self,
        *sequences: Any,
        step_fn: Callable[..., Any] | None = None,
        chunk_size: int | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Advance states and traces over a sequence without a loss.

        Args:
            *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
            step_fn: what to do with the slices; default calls the learner with them.
            chunk_size: steps per window; the default `step_fn` wraps windows in `MultiStepData`.
            return_outputs: whether to return what `step_fn` returned, stacked over time.
        """
        length = length_of(sequences)
        chunk = chunk_of(chunk_size)
        self._check_windows(chunk)
        if step_fn is None:
            wrap = MultiStepData if chunk > 1 else lambda x: x
            call = lambda *slices: self(*map(wrap, slices))  # type: ignore[operator]
        else:
            _check_slices(step_fn, len(sequences), "etrace_evolve")
            call = step_fn
        parts = windows_of(sequences, length, chunk)
        results = [brainstate.transform.for_loop(lambda *s: call(*s), *part) for part in parts]
        return joined(results, parts, chunk) if return_outputs else None


def _check_slices(step_fn: Callable[..., Any], count: int, name: str) -> None:
    check_takes(
        step_fn,
        ["a slice"] * count,
        f"{name} calls step_fn(*slices), with one slice of each sequence",
        "give one sequence per argument; a function that takes the network first, as in "
        "verify.compare, is step_fn=lambda *slices: function(learner, *slices)",
    )


def _losses_of(step_fn: Any, has_aux: bool, chunk: int) -> Callable[..., tuple[Any, Any]]:
    """The user's step as a function to `(loss, aux)`, checked."""

    def step(*slices: Any) -> tuple[Any, Any]:
        loss, aux = loss_of(step_fn(*slices), has_aux)
        expected = jax.tree.leaves(slices)[0].shape[:1] if chunk > 1 else ()
        if jnp.shape(loss) != expected:
            raise ValueError(
                text(
                    f"step_fn returned a loss of shape {jnp.shape(loss)}, expected {expected}.",
                    "each step has one loss",
                    "reduce the loss over the batch and features in step_fn",
                )
            )
        return loss, aux

    return step
