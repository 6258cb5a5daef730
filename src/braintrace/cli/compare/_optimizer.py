"""Adam with a limit on the norm of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._missing import MissingExtra

LARGEST = 1.0  # norm of a gradient; a larger one is scaled down


def adam(rate: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`start(weights) -> moments` and `step(weights, moments, grads) -> (weights, moments)`.

    Raises:
        MissingExtra: optax is not installed.
    """
    try:
        import optax
    except ModuleNotFoundError as error:
        raise MissingExtra("Adam", "optax", "tasks") from error
    rule = optax.chain(optax.clip_by_global_norm(LARGEST), optax.adam(rate))

    @jax.jit
    def step(weights, moments, grads):
        moves, moments = rule.update(grads, moments, weights)
        return optax.apply_updates(weights, moves), moments

    return rule.init, step
