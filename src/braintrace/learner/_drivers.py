"""Sequence drivers: gradients and evolution over a whole sequence in one compiled scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ._data import MultiStepData
from ._progress import ticking
from ._sequences import (
    check_block,
    check_choice,
    chunk_of,
    floating,
    joined,
    length_of,
    loss_of,
    mask_of,
    text,
    values_of,
    weights_of,
    windows_of,
)


class SequenceDriverMixin:
    """`etrace_grad` and `etrace_evolve` for anything that is called like a learner."""

    __module__ = "braintrace"

    def _check_windows(self, chunk: int) -> None:
        """Refuse windows where they cannot be taken."""

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
        states, or that calls the learner inside of another transformation, is evaluated step by
        step.

        Args:
            *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
            step_fn: `step_fn(*slices)` calls the learner once and returns the loss of the step
                (or `(loss, aux)`). With windows, slices have a leading axis of `chunk_size`, the
                learner takes them as `MultiStepData`, and the losses of the window are returned.
            mask: weights of the steps' losses, shape (T,).
            chunk_size: steps per window; None or 1 is one step at a time.
            weights: the states to differentiate; default all floating parameters.
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
        """
        if step_fn is None or not callable(step_fn):
            raise TypeError(
                text(
                    "etrace_grad needs step_fn.",
                    "the loss is the user's",
                    "pass step_fn=lambda x, y: loss(learner(x), y)",
                )
            )
        length = length_of(sequences)
        counted = None if mask is None else mask_of(mask, length)
        chunk = chunk_of(chunk_size)
        self._check_windows(chunk)
        if chunk > 1 and getattr(self, "vjp_method", None) != "multi-step":
            raise ValueError(
                text(
                    f"chunk_size={chunk} on a learner that is not multi-step.",
                    "a window needs reverse mode inside the window",
                    "build the learner with vjp_method='multi-step'",
                )
            )
        check_choice("reduction", reduction, ("mean", "sum"))
        check_choice("loss_output", loss_output, ("per_step", "masked", "scalar"))
        check_block(block_size, memory_budget)
        weights = weights_of(floating(self.param_states) if weights is None else weights)  # type: ignore[attr-defined]

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
        losses, aux = joined(results, length, chunk)

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

        grad = brainstate.transform.grad(weighted, weights, has_aux=True)

        def body(total, slices):
            grads, result = grad(*slices)
            if mask is not None:  # what a call without weight computes, NaN included, is nothing
                silent = jnp.all(slices[0] == 0)
                grads = jax.tree.map(lambda g: jnp.where(silent, 0, g), grads)
            if tick is not None:
                jax.debug.callback(tick, 1)
            return jax.tree.map(jnp.add, total, grads), result

        total = jax.tree.map(jnp.zeros_like, values_of(weights))
        return brainstate.transform.scan(body, total, (mask, *sequences))

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
            call = step_fn
        parts = windows_of(sequences, length, chunk)
        results = [brainstate.transform.for_loop(lambda *s: call(*s), *part) for part in parts]
        return joined(results, length, chunk) if return_outputs else None
