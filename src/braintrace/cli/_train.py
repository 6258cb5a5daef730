"""Training: Adam and the loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ._gradients import Gradient, Network, scores
from ._progress import progress_bar, stage
from ._task import Recall

Array = jax.Array
Update = Callable[[Any, Array], tuple[Any, Array]]

RATE = 5e-3


def updater(network: Network, gradient: Gradient, task: Recall, size: int) -> Update:
    """`(adam, key) -> (adam, loss)`: one update of the weights on the batch of this key."""

    @brainstate.transform.jit
    def update(adam, key):
        grads, loss = gradient(*task.batch(key, size))
        weights = network.weights
        values = {path: state.value for path, state in weights.items()}
        new, adam = adam_step(values, _clipped(grads), adam)
        for path, state in weights.items():
            state.value = new[path]
        return adam, loss

    return update


def adam_start(network: Network) -> tuple[Any, Any, Array]:
    """Zero moments, and the count of updates."""
    zeros = {k: jax.tree.map(jnp.zeros_like, s.value) for k, s in network.weights.items()}
    return zeros, zeros, jnp.zeros(())


def adam_step(values: Any, grads: Any, adam: Any, rate: float = RATE) -> tuple[Any, Any]:
    """New weights and moments of Adam."""
    first, second, n = adam
    n = n + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)

    def moved(w, m, v):
        step = m / (1 - 0.9**n) / (jnp.sqrt(v / (1 - 0.999**n)) + 1e-8)
        return (w - rate * step).astype(w.dtype)

    return jax.tree.map(moved, values, first, second), (first, second, n)


def accuracy(network: Network, task: Recall, keys: Array, size: int) -> float:
    """Fraction of right answers on one batch of sequences per key."""

    @brainstate.transform.jit
    def rate(key):
        xs, labels = task.batch(key, size)
        answers = scores(network, xs)[-task.answer :].mean(0).argmax(-1)
        return (answers == labels).mean()

    return float(jnp.stack([rate(key) for key in keys]).mean())


def train(
    networks: dict[str, Network], updates: dict[str, Update], keys: Array
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Train networks in lockstep on the same batches.

    Returns:
        Losses of every update, and the median seconds of an update, by name.
    """
    adams = {name: adam_start(network) for name, network in networks.items()}
    losses: dict[str, list[float]] = {name: [] for name in networks}
    seconds: dict[str, list[float]] = {name: [] for name in networks}

    def advance(key: Array) -> None:
        for name, update in updates.items():
            started = time.perf_counter()
            adams[name], loss = update(adams[name], key)
            losses[name].append(float(loss))
            seconds[name].append(time.perf_counter() - started)

    with stage("compiling the updates"):
        advance(keys[0])
    bar = progress_bar(len(keys), done=1)
    for key in keys[1:]:
        advance(key)
        text = ", ".join(f"{name} {loss[-1]:.3f}" for name, loss in losses.items())
        bar.set_postfix_str(text, refresh=False)
        bar.update(1)
    bar.close()
    return losses, {name: statistics.median(s[1:] or s) for name, s in seconds.items()}


def _clipped(grads: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
