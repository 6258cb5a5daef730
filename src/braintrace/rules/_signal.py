"""Learning signals in place of the loss's own, per hidden group: (steps, *varshape, variables)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import value_error
from ..engine import Feedback, Rule, Signal, SignalInputs
from ..graph import HiddenGroup, group_name, seed_of

OfGroup = Callable[[HiddenGroup, Array, Array, dict[str, Any]], Array]


def by_group(of_group: OfGroup) -> Signal:
    """A signal from a function of one group; all arrays are (steps, *varshape, variables)."""

    def signal(inputs: SignalInputs) -> list[Array]:
        out: list[Array] = [jnp.zeros_like(c) for c in inputs.cotangents]
        for g in inputs.groups:
            cotangent, state = (
                g.concat_hidden([arrays[i] for i in g.leaves])
                for arrays in (inputs.cotangents, inputs.states)
            )
            own = jnp.asarray(of_group(g, cotangent, state, inputs.extra))
            sizes = zip(own.shape, cotangent.shape, strict=False)
            if own.ndim != cotangent.ndim or any(n not in (1, m) for n, m in sizes):
                raise value_error(
                    f"a learning signal of shape {own.shape} for the group {g.name}.",
                    why=f"it meets traces of shape {cotangent.shape}: (steps, *varshape, "
                    "num_state)",
                    do="return an array with these axes; an axis of one stands for all",
                )
            own = jnp.broadcast_to(own, cotangent.shape).astype(cotangent.dtype)
            for i, array in zip(g.leaves, g.split_hidden(own), strict=True):
                out[i] = array
        return out

    return signal


def with_signal(rule: Rule, signal: Signal) -> Rule:
    """The same rule with a signal of its own, also where it is another one for a while."""
    words = "the derivative of the loss by the states: the rule has a signal of its own"
    words_before = [] if rule.approximates is None else [rule.approximates]
    replaced = "; ".join([*words_before, words] if rule.signal is None else words_before)
    pending = rule.pending
    if pending is not None:
        pending = pending._replace(rule=replace(pending.rule, signal=signal))
    return replace(rule, signal=signal, approximates=replaced, pending=pending)


def random_feedback(key: Array, scale: float, adaptive: bool = False) -> Feedback:
    """Fixed random operands from this key; a signal where no operator is passed."""
    return Feedback(key, scale, _square(key), adaptive)


def _square(key: Array) -> Signal:
    """The direction of the loss's own signal, through one fixed random matrix per group."""

    def of_group(group: HiddenGroup, cotangent: Array, state: Array, extra: Any) -> Array:
        signal = cotangent if group.varshape else cotangent[..., None, :]
        n, own = signal.shape[-2], jax.random.fold_in(key, seed_of(group_name(group)))
        length = jnp.sqrt((jnp.abs(signal) ** 2).sum(-2, keepdims=True))
        B = 0.1 * jax.random.normal(own, (n, n), signal.real.dtype)
        projected = jnp.einsum("...ns,nm->...ms", signal / (length + 1e-8), B)
        return projected.reshape(cotangent.shape)

    return by_group(of_group)
