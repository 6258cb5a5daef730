"""Streams that change while a network learns from them, at every step, and one with a delay."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from ._task import Array, Batch, Measure, SequenceTask, cross_entropy, squared


def _recovery(outputs: Array, targets: Array, mask: Array) -> Array:
    """The share of what a change in the middle has cost that is regained by the end.

    Errors are means over a tenth of the stream: before the change, after it, and at the end. More
    than all of it is regained where the error at the end is below that before the change.
    """
    errors = ((outputs - targets) ** 2).mean(axis=(1, 2))
    length = len(errors)
    tenth, half = max(1, length // 10), length // 2
    before, lost, after = (
        errors[t : t + tenth].mean() for t in (half - tenth, half, length - tenth)
    )
    return jnp.where(lost > before, (lost - after) / (lost - before), jnp.nan)


RECOVERY = Measure("recovered (%)", "{:.1f}", 100, True, squared, _recovery)


class _Adapt(SequenceTask):
    """Predict the next value of a stream that changes in the middle."""

    inputs, outputs, shortest = 1, 1, 20
    measure = RECOVERY
    streaming, update_every = True, 1
    chance = 0.0  # nothing is regained

    def __init__(self, length: int):
        super().__init__(length)
        self.asked = length


class AdaptSine(_Adapt):
    """A sine of 20 steps per period, which become 12 in the middle; phases are random."""

    name = "adapt_sine"
    periods = (20, 12)

    def __init__(self, length: int):
        super().__init__(length)
        self.title = f"sine whose period changes from {self.periods[0]} to {self.periods[1]} steps"

    def batch(self, key: Array, size: int) -> Batch:
        late = jnp.arange(self.length + 1) >= self.length // 2
        turns = jnp.cumsum(1 / jnp.where(late, self.periods[1], self.periods[0]))
        phase = turns[:, None] + jax.random.uniform(key, (size,))
        x = jnp.sin(2 * jnp.pi * phase)[..., None]
        return x[:-1], x[1:]


STREAMS, BURN = 24, 500  # a third for each split; steps before the first one


@cache
def lorenz(steps: int) -> np.ndarray:
    """The first coordinate, (steps, STREAMS), `rho` 28 in the first half and 40 in the second.

    Runge-Kutta of fourth order, 0.02 units of time per sample.
    """

    def slope(p: np.ndarray, rho: float) -> np.ndarray:
        x, y, z = p
        return np.array([10 * (y - x), x * (rho - z) - y, x * y - 8 / 3 * z])

    dt, out = 0.02, []
    p = np.array([[0], [1], [20]]) + np.random.default_rng(0).normal(size=(3, STREAMS))
    for t in range(-BURN, steps):
        rho = 28 if t < steps // 2 else 40
        a = slope(p, rho)
        b = slope(p + dt / 2 * a, rho)
        c = slope(p + dt / 2 * b, rho)
        p = p + dt / 6 * (a + 2 * b + 2 * c + slope(p + dt * c, rho))
        out.append(p[0])
    return np.array(out[BURN:]) / 10


class AdaptLorenz(_Adapt):
    """The first coordinate of the Lorenz equations, whose `rho` changes from 28 to 40."""

    name = "adapt_lorenz"
    title = "Lorenz equations whose rho changes from 28 to 40"

    def batch(self, key: Array, size: int) -> Batch:
        return self._streams(jax.random.randint(key, (size,), 0, STREAMS // 3))

    def validation(self, size: int) -> Batch:
        return self._streams(jnp.arange(size) % (STREAMS // 3) + STREAMS // 3)

    def test(self, size: int) -> Batch:
        return self._streams(jnp.arange(size) % (STREAMS // 3) + 2 * (STREAMS // 3))

    def _streams(self, which: Array) -> Batch:
        x = jnp.asarray(lorenz(self.length + 1), float)[:, which, None]
        return x[:-1], x[1:]


def _last_answers(outputs: Array, labels: Array, mask: Array) -> Array:
    """The share of right answers in the last quarter."""
    right = (outputs.argmax(-1) == labels).mean(axis=1)
    late = mask * (jnp.arange(len(mask)) >= 3 * len(mask) // 4)
    return (right * late).sum() / late.sum()


class Delayed(SequenceTask):
    """A sign is shown every 60 steps, in noise, and asked for 50 steps later.

    The score is that of the last quarter of the stream.
    """

    period, delay = 60, 50
    name, shortest = "delayed", 4 * period
    title = f"a sign asked for {delay} steps later, in a stream"
    inputs, outputs = 2, 2
    measure = Measure("accuracy (%)", "{:.1f}", 100, True, cross_entropy, _last_answers)
    streaming, update_every = True, 1
    chance = 0.5

    @property
    def mask(self) -> Array:
        return (jnp.arange(self.length) % self.period == self.delay).astype(float)

    def batch(self, key: Array, size: int) -> Batch:
        for_labels, for_noise = jax.random.split(key)
        trials = -(-self.length // self.period)
        labels = jax.random.bernoulli(for_labels, shape=(trials, size)).astype(int)
        labels = jnp.repeat(labels, self.period, axis=0)[: self.length]
        shown = (jnp.arange(self.length) % self.period == 0)[:, None]
        noise = 0.1 * jax.random.normal(for_noise, (self.length, size))
        cue = jnp.where(shown, 2 * labels - 1.0, noise)
        asked = jnp.broadcast_to(self.mask[:, None], cue.shape)
        return jnp.stack([cue, asked], axis=-1), labels
