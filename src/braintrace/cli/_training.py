"""Training: Adam, the held-out score, and the loop that `demo`, `train` and `compare` share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import brainstate
import jax
from jax import Array

from .._errors import MissingExtra
from ..tasks import Batch, SequenceTask
from ._gradient import Compiled
from ._network import Network, Weights

LARGEST = 1.0  # norm of a gradient; a larger one is scaled down


def held_out(task: SequenceTask, count: int) -> Batch:
    """At most `count` held-out sequences."""
    return jax.jit(lambda: task.test(count))()


def _scorer(network: Network, task: SequenceTask, held_out: Batch) -> Callable[[Weights], float]:
    size = held_out[0].shape[1]
    brainstate.nn.init_all_states(network, batch_size=size)

    @brainstate.transform.jit
    def score(xs, ys):
        brainstate.nn.reset_all_states(network, batch_size=size)
        outputs = brainstate.transform.for_loop(network, xs)
        return task.measure.score(outputs, ys, task.mask)

    def score_of(weights: Weights) -> float:
        network.weights = weights
        return float(score(*held_out))

    return score_of


class Training:
    """What all runs on a task share, compiled once; the network is used for scores only."""

    def __init__(
        self, network: Network, task: SequenceTask, size: int, rate: float, held_out: Batch
    ):
        try:
            import optax
        except ModuleNotFoundError as error:
            raise MissingExtra("Adam", "optax", "tasks") from error
        adam = optax.chain(optax.clip_by_global_norm(LARGEST), optax.adam(rate))

        @jax.jit
        def step(weights, moments, grads):
            moves, moments = adam.update(grads, moments, weights)
            return optax.apply_updates(weights, moves), moments

        self.draw = jax.jit(lambda key: task.batch(key, size))  # for training
        self.start, self.step = adam.init, step
        self.score = _scorer(network, task, held_out)  # of weights, held out


class Run:
    """The training of one network; update n is on the batch of `key(n)`."""

    def __init__(
        self, training: Training, gradient: Compiled, weights: Weights, key: Callable[[int], Array]
    ):
        self.training, self.gradient, self.key = training, gradient, key
        self.weights, self.moments = weights, training.start(weights)
        self.done = 0
        self.losses: list[Any] = []  # numbers, or arrays that are not waited for
        self.at: list[int] = []  # updates at which there is a held-out score
        self.scores: list[float] = []

    def advance(self) -> None:
        """One update; its loss is put on the curve without waiting for it."""
        grads, loss = self.gradient(self.weights, self.training.draw(self.key(self.done)))
        self.weights, self.moments = self.training.step(self.weights, self.moments, grads)
        self.losses.append(loss)
        self.done += 1

    def timed_advance(self) -> float:
        """One update, waited for; returns its seconds."""
        started = time.perf_counter()
        self.advance()
        self.losses[-1] = float(self.losses[-1])
        jax.block_until_ready(self.weights)
        return time.perf_counter() - started

    def score(self) -> float:
        """The held-out score now, put on the curve once."""
        if not self.at or self.at[-1] != self.done:
            self.at.append(self.done)
            self.scores.append(self.training.score(self.weights))
        return self.scores[-1]
