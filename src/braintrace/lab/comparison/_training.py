"""Training: optimizers, scores of held-out sequences, and the loop that the commands share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..._errors import MissingExtra, unknown
from ...program import PyTree
from ._gradient import Method, draws_of, with_draws
from ._model import Build, Params
from ._sequences import Batch, Sequences, samples_of

LARGEST = 1.0  # norm of a gradient; a larger one is scaled down
OPTIMIZERS = ("adam", "rmsprop", "sgd")

Advance = Callable[[PyTree, PyTree, Batch], tuple[PyTree, PyTree, Any]]


class Optimizer:
    """An optimizer of optax by name, with gradients of at most norm 1."""

    def __init__(self, name: str):
        if name not in OPTIMIZERS:
            raise ValueError(unknown("optimizer", name, OPTIMIZERS))
        try:
            import optax
        except ModuleNotFoundError as error:
            raise MissingExtra(name.capitalize(), "optax", "tasks") from error
        # The step size is an argument of `step`: all of them share a program.
        transform = optax.chain(optax.clip_by_global_norm(LARGEST), getattr(optax, name)(1.0))
        self.name, self.init = name, transform.init

        def step(weights: PyTree, moments: PyTree, grads: PyTree, rate: Any) -> Any:
            moves, moments = transform.update(grads, moments, weights)
            move = lambda p, m: p + (rate * m).astype(p.dtype)
            return jax.tree.map(move, weights, moves), moments

        self.step = jax.jit(step)


def by_sequence(gradient: Callable[..., Any], optimizer: Optimizer, rate: float) -> Advance:
    """One update per batch of sequences."""

    def advance(weights: PyTree, moments: PyTree, batch: Batch) -> tuple[PyTree, PyTree, Any]:
        grads, loss = gradient(weights, batch)
        return *optimizer.step(weights, moments, grads, rate), loss

    return advance


class Stream:
    """Updates every few steps while sequences run; compiled once for all step sizes."""

    def __init__(self, method: Method, task: Sequences, optimizer: Optimizer, every: int):
        def run(params: Params, moments: PyTree, draws: Any, rate: Any, batch: Batch) -> Any:
            def update(now: Any, steps: Any) -> Any:
                params, moments, carry = now
                xs, targets, mask = steps
                total = mask.sum()
                weights = mask / jnp.where(total == 0, 1, total)
                grads, carry, loss, out = method.run(params, carry, (xs, targets, weights))
                new = optimizer.step(params, moments, grads, rate)
                # Steps that do not count are no update: momentum alone would move the weights.
                new = jax.tree.map(lambda a, b: jnp.where(total == 0, b, a), new, (params, moments))
                return (*new, carry), (loss, out)

            carry = with_draws(method.start(task.x), draws)
            pieces = lambda a: a.reshape(-1, every, *a.shape[1:])
            steps = jax.tree.map(pieces, (*batch, task.mask))
            now, (losses, outs) = jax.lax.scan(update, (params, moments, carry), steps)
            outs = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outs)
            return now[:2], draws_of(now[2]), losses, outs

        self._run = jax.jit(run)
        self._first = draws_of(method.start(task.x))
        self.reset()

    def reset(self) -> None:
        """Draw random numbers from the first one on."""
        self._draws = self._first

    def __call__(
        self, params: Params, moments: PyTree, batch: Batch, rate: float
    ) -> tuple[Params, PyTree, Array, PyTree]:
        """Parameters and moments after a batch, losses of its updates, outputs of its steps."""
        (params, moments), self._draws, losses, outs = self._run(
            params, moments, self._draws, rate, batch
        )
        return params, moments, losses, outs


def scorer(build: Build, task: Sequences, batch: Batch) -> Callable[[Params], float]:
    """The score of parameters on held-out sequences."""
    model = build(0, samples_of(batch))

    @jax.jit
    def score(params: Params, batch: Batch) -> Array:
        xs, targets = batch
        _, outputs = jax.lax.scan(lambda h, x: model.step(params, h, x), model.state, xs)
        return task.score(outputs, targets)

    return lambda params: float(score(params, batch))


class Run:
    """The training of one network; update n is on the batch `draw(n)`."""

    def __init__(
        self,
        advance: Advance,
        weights: PyTree,
        moments: PyTree,
        draw: Callable[[int], Batch],
        score: Callable[[PyTree], float],
    ):
        self._advance, self._draw, self._score = advance, draw, score
        self.weights, self.moments = weights, moments
        self.done = 0
        self.losses: list[Any] = []  # numbers, or arrays that are not waited for
        self.at: list[int] = []  # updates at which there is a held-out score
        self.scores: list[float] = []

    def advance(self) -> None:
        """The updates of one batch; a single loss is not waited for."""
        self.weights, self.moments, loss = self._advance(
            self.weights, self.moments, self._draw(self.done)
        )
        self.losses += [loss] if jnp.ndim(loss) == 0 else np.asarray(loss).tolist()
        self.done = len(self.losses)

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
            self.scores.append(self._score(self.weights))
        return self.scores[-1]
