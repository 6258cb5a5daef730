"""Prediction of the Mackey-Glass equation, a delayed feedback that is chaotic."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from ._task import NORMALISED, Array, Batch, SequenceTask

LAG, SUBSTEPS = 17, 10
BURN, TRAINED, GAP, TESTED = 500, 6000, 200, 2000  # units of time, one sample each


@cache
def series() -> np.ndarray:
    """`x' = 0.2 x(t - 17) / (1 + x(t - 17)^10) - 0.1 x`, one sample per unit of time.

    Runge-Kutta of fourth order with ten steps per unit; the delayed value between two steps is
    their mean.
    """
    dt, lag = 1 / SUBSTEPS, LAG * SUBSTEPS
    count = (BURN + TRAINED + 2 * GAP + 2 * TESTED) * SUBSTEPS
    x = [1.2] * (lag + 1)
    push = lambda delayed: 0.2 * delayed / (1 + delayed**10)
    for t in range(lag, lag + count):
        now, old, new = x[t], push(x[t - lag]), push(x[t - lag + 1])
        middle = push((x[t - lag] + x[t - lag + 1]) / 2)
        k1 = old - 0.1 * now
        k2 = middle - 0.1 * (now + dt / 2 * k1)
        k3 = middle - 0.1 * (now + dt / 2 * k2)
        k4 = new - 0.1 * (now + dt * k3)
        x.append(now + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return np.array(x[lag + 1 + BURN * SUBSTEPS :: SUBSTEPS])


@cache
def split_series() -> tuple[np.ndarray, ...]:
    """Series of training, validation and test, disjoint in time, standardised by the first."""
    x = series()
    train = x[:TRAINED]
    starts = (TRAINED + GAP, TRAINED + TESTED + 2 * GAP)
    others = [x[start : start + TESTED] for start in starts]
    return tuple((part - train.mean()) / train.std() for part in (train, *others))


class MackeyGlass(SequenceTask):
    """The value `ahead` steps later, from the values so far; the first quarter is context only."""

    ahead = 20
    name, shortest, longest = "mackey_glass", 4, TESTED - ahead - 1
    title = f"Mackey-Glass equation (lag {LAG}), {ahead} steps ahead"
    inputs, outputs = 1, 1
    measure = NORMALISED
    chance = 1.0

    def __init__(self, length: int):
        super().__init__(length)
        self.asked = length - length // 4

    def batch(self, key: Array, size: int) -> Batch:
        last = TRAINED - self.length - self.ahead
        return self._windows(split_series()[0], jax.random.randint(key, (size,), 0, last + 1))

    def validation(self, size: int) -> Batch:
        return self._spaced(split_series()[1], size)

    def test(self, size: int) -> Batch:
        return self._spaced(split_series()[2], size)

    def _spaced(self, x: np.ndarray, size: int) -> Batch:
        """Windows of a series, evenly spaced."""
        last = TESTED - self.length - self.ahead
        return self._windows(x, jnp.asarray(np.unique(np.linspace(0, last, size).astype(int))))

    def _windows(self, x: np.ndarray, starts: Array) -> Batch:
        values = jnp.asarray(x, float)[starts + jnp.arange(self.length + self.ahead)[:, None]]
        return values[: self.length, :, None], values[self.ahead :, :, None]
