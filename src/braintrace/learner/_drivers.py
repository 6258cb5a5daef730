"""Sequence drivers: gradients and evolution over a whole sequence in one compiled scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._errors import message
from ._data import MultiStepData, SingleStepData


class SequenceDriverMixin:
    """`etrace_grad` and `etrace_evolve` for anything that is called like a learner."""

    __module__ = "braintrace"

    def _check_windows(self, chunk: int) -> None:
        """Refuse windows where they cannot be taken."""

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
    ) -> Any:
        """Sum the online gradients of a sequence; memory does not grow with its length.

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

        Returns:
            gradients, or (gradients, losses), (gradients, aux), (gradients, losses, aux).

        Raises:
            TypeError, ValueError: sequences, mask or options do not fit together.
        """
        if step_fn is None or not callable(step_fn):
            raise TypeError(
                _text(
                    "etrace_grad needs step_fn.",
                    "the loss is the user's",
                    "pass step_fn=lambda x, y: loss(learner(x), y)",
                )
            )
        length = _length(sequences)
        masked = mask is not None
        mask = _mask(mask, length)
        chunk = _chunk(chunk_size)
        self._check_windows(chunk)
        if chunk > 1 and getattr(self, "vjp_method", None) != "multi-step":
            raise ValueError(
                _text(
                    f"chunk_size={chunk} on a learner that is not multi-step.",
                    "a window needs reverse mode inside the window",
                    "build the learner with vjp_method='multi-step'",
                )
            )
        _choice("reduction", reduction, ("mean", "sum"))
        _choice("loss_output", loss_output, ("per_step", "masked", "scalar"))
        weights = _weights(_floating(self.param_states) if weights is None else weights)  # type: ignore[attr-defined]

        def weighted(m, *slices):
            loss, aux = _loss_of(step_fn(*slices), has_aux)
            expected = (chunk_here[0],) if chunk > 1 else ()
            if jnp.shape(loss) != expected:
                raise ValueError(
                    _text(
                        f"step_fn returned a loss of shape {jnp.shape(loss)}, expected {expected}.",
                        "each step has one loss",
                        "reduce the loss over the batch and features in step_fn",
                    )
                )
            return jnp.sum(jnp.where(m == 0, 0, m * loss)), (loss, aux)

        chunk_here = [chunk]
        grad = brainstate.transform.grad(weighted, weights, has_aux=True)

        def body(total, slices):
            grads, (loss, aux) = grad(*slices)
            if masked:  # what a step without weight computes, NaN included, must not count
                silent = jnp.all(slices[0] == 0)
                grads = jax.tree.map(lambda g: jnp.where(silent, 0, g), grads)
            return jax.tree.map(jnp.add, total, grads), (loss, aux)

        total = jax.tree.map(jnp.zeros_like, _values(weights))
        head, tail = _windows((mask, *sequences), length, chunk)
        results: list[Any] = [None, None]
        if head is not None:
            total, results[0] = brainstate.transform.scan(body, total, head)
        if tail is not None:
            chunk_here[0] = length % chunk
            total, results[1] = body(total, tail)
        losses, aux = _join(results, chunk, length)

        scale = 1.0 / jnp.maximum(mask.sum(), 1) if reduction == "mean" else 1.0
        grads = jax.tree.map(lambda g: g * jnp.asarray(scale, g.dtype), total)
        if loss_output == "masked":
            losses = losses * mask
        elif loss_output == "scalar":
            losses = (losses * mask).sum() * scale
        out = (grads, *([losses] if return_value else []), *([aux] if has_aux else []))
        return out[0] if len(out) == 1 else out

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
        length = _length(sequences)
        chunk = _chunk(chunk_size)
        self._check_windows(chunk)
        if step_fn is None:
            wrap = MultiStepData if chunk > 1 else lambda x: x
            call = lambda *slices: self(*map(wrap, slices))  # type: ignore[operator]
        else:
            call = step_fn
        head, tail = _windows(sequences, length, chunk)
        results: list[Any] = [None, None]
        if head is not None:
            results[0] = brainstate.transform.for_loop(lambda *s: call(*s), *head)
        if tail is not None:
            results[1] = call(*tail)
        return _join(results, chunk, length) if return_outputs else None


def _text(what: str, why: str, do: str) -> str:
    return message(what, why=why, do=do)


def _length(sequences: tuple[Any, ...]) -> int:
    if not sequences:
        raise ValueError(
            _text(
                "no sequence was given.",
                "there is nothing to step through",
                "pass at least one array with a leading time axis",
            )
        )
    for s in sequences:
        for node in jax.tree.leaves(
            s, is_leaf=lambda x: isinstance(x, (SingleStepData, MultiStepData))
        ):
            if isinstance(node, (SingleStepData, MultiStepData)):
                raise TypeError(
                    _text(
                        "a sequence is wrapped in step data.",
                        "the driver slices the arrays itself",
                        "pass the bare arrays and wrap the slices in step_fn",
                    )
                )
    leaves = [leaf for s in sequences for leaf in jax.tree.leaves(s)]
    if not leaves or any(not jax.tree.leaves(s) for s in sequences):
        raise ValueError(
            _text("an empty pytree was given as a sequence.", "it has no time axis", "leave it out")
        )
    shapes = [np.shape(leaf) for leaf in leaves]
    if any(not s for s in shapes):
        raise ValueError(
            _text(
                "a sequence holds a scalar.",
                "it has no time axis",
                "close over it in step_fn instead",
            )
        )
    lengths = {s[0] for s in shapes}
    if len(lengths) > 1:
        raise ValueError(
            _text(
                f"sequences of different lengths {sorted(lengths)}.",
                "they are sliced in lockstep along axis 0",
                "bring time to axis 0 and give all the same length",
            )
        )
    length = lengths.pop()
    if length == 0:
        raise ValueError(
            _text(
                "a sequence of zero steps.",
                "a gradient needs at least one step",
                "skip empty sequences",
            )
        )
    return int(length)


def _mask(mask: Any, length: int) -> jax.Array:
    if mask is None:
        return jnp.ones(length)
    mask = jnp.asarray(mask)
    if mask.shape != (length,):
        raise ValueError(
            _text(
                f"mask has shape {mask.shape}, expected ({length},).",
                "it weighs the loss of each step",
                "give one number per step",
            )
        )
    exact = mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)
    return mask.astype(float) if exact else mask


def _loss_of(found: Any, has_aux: bool) -> tuple[Any, Any]:
    pair = isinstance(found, (tuple, list)) and len(found) == 2
    if has_aux != pair:
        raise TypeError(
            _text(
                f"step_fn returned {type(found).__name__} with has_aux={has_aux}.",
                "with has_aux it returns (loss, aux), without it the loss alone",
                "return what has_aux announces",
            )
        )
    loss, aux = found if has_aux else (found, None)
    real = loss is not None and not isinstance(loss, u.Quantity)
    if not real or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        kind = f"a quantity in {loss.unit}" if isinstance(loss, u.Quantity) else type(loss).__name__
        kind = getattr(loss, "dtype", kind) if not isinstance(loss, u.Quantity) else kind
        raise TypeError(
            _text(
                f"the loss is {kind}.",
                "a gradient needs a real floating number without unit",
                "divide by a unit, take a real part, or convert to float in step_fn",
            )
        )
    return loss, aux


def _chunk(chunk_size: Any) -> int:
    if chunk_size is None:
        return 1
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, np.integer)):
        raise TypeError(
            _text(
                f"chunk_size is a {type(chunk_size).__name__}.",
                "it counts steps",
                "pass a positive integer",
            )
        )
    if chunk_size < 1:
        raise ValueError(
            _text(
                f"chunk_size={chunk_size}.",
                "a window has at least one step",
                "pass a positive integer",
            )
        )
    return int(chunk_size)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            _text(
                f"unknown {name} {value!r}.",
                f"known are {', '.join(choices)}",
                "choose one of them",
            )
        )


def _floating(params: Any) -> dict:
    """The parameters that have a gradient; counters and indices do not."""
    leaves = lambda s: jax.tree.leaves(s.value)
    return {
        path: s
        for path, s in params.items()
        if all(jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in leaves(s))
    }


def _weights(weights: Any) -> Any:
    items = [weights] if isinstance(weights, brainstate.State) else weights
    items = list(items.values()) if hasattr(items, "values") else items
    states = isinstance(items, (list, tuple)) and all(
        isinstance(w, brainstate.State) for w in items
    )
    if not states or not items:
        raise (TypeError if not states else ValueError)(
            _text(
                f"weights is {weights!r}.",
                "it names the states to differentiate",
                "pass states: a State, a list or a dict of them, or nothing for all parameters",
            )
        )
    return weights


def _values(weights: Any) -> Any:
    if isinstance(weights, brainstate.State):
        return weights.value
    if isinstance(weights, (list, tuple)):
        return type(weights)(w.value for w in weights)
    return {k: w.value for k, w in weights.items()}


def _windows(sequences: tuple[Any, ...], length: int, chunk: int) -> tuple[Any, Any]:
    """Full windows stacked on a new axis (None if there is none), and the shorter last one."""
    if chunk == 1:
        return sequences, None
    whole = length // chunk * chunk
    head = jax.tree.map(
        lambda a: a[:whole].reshape((whole // chunk, chunk, *a.shape[1:])), sequences
    )
    tail = jax.tree.map(lambda a: a[whole:], sequences)
    return head if whole else None, tail if whole < length else None


def _join(results: list[Any], chunk: int, length: int) -> Any:
    """Results of full windows and of the last, shorter one (or None) in one time order.

    A leaf whose leading axis counts the steps of its window is joined along time; any other has one
    entry per window.
    """
    head, tail = results
    if chunk == 1:
        return head

    def join(*parts):
        whole = [parts[0]] if head is not None else []
        last = [parts[-1]] if tail is not None else []
        timed = all(p.shape[1:2] == (chunk,) for p in whole)
        timed &= all(p.shape[:1] == (length % chunk,) for p in last)
        whole = [p.reshape((-1, *p.shape[2:])) if timed else p for p in whole]
        return jnp.concatenate(whole + [p if timed else p[None] for p in last])

    return jax.tree.map(join, *(r for r in results if r is not None))
