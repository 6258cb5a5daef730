"""Tasks of spike trains: three populations of channels, active or not; the third one asks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._task import ANSWERS, Array, Batch, SequenceTask

CHANNELS = 10  # per population
ACTIVE, BACKGROUND = 0.4, 0.02  # probability of a spike per step


class _Spikes(SequenceTask):
    inputs, outputs = 3 * CHANNELS, 2
    measure = ANSWERS
    chance = 0.5

    def _batch(self, key: Array, active: Array, labels: Array) -> Batch:
        """Independent spikes (T, B, 3 * CHANNELS) from activity (T, B, 3)."""
        active = active.at[-self.asked :, :, 2].set(1)
        rates = BACKGROUND + (ACTIVE - BACKGROUND) * jnp.repeat(active, CHANNELS, axis=-1)
        xs = jax.random.bernoulli(key, rates).astype(active.dtype)
        return xs, jnp.broadcast_to(labels, (self.length, len(labels)))


class Match(_Spikes):
    """One of two populations fires as the sample, and after a pause one of them as the test.

    Are they the same? Sample, test and answer take a sixth of the time each. All channels fire now
    and then: a single spike has no information.
    """

    name, shortest = "match", 12

    def __init__(self, length: int):
        super().__init__(length)
        self.asked = length // 6
        self.title = f"delayed match to sample over {length - 3 * self.asked} steps, spike trains"

    def batch(self, key: Array, size: int) -> Batch:
        for_sample, for_spikes = jax.random.split(key)
        match = jnp.arange(size) % 2  # as many matches as mismatches, if the size is even
        sample = jax.random.bernoulli(for_sample, shape=(size,)).astype(int)
        test = jnp.where(match == 1, sample, 1 - sample)
        steps = self.asked
        active = jnp.zeros((self.length, size, 3))
        active = active.at[:steps, :, :2].set(jax.nn.one_hot(sample, 2))
        active = active.at[-2 * steps : -steps, :, :2].set(jax.nn.one_hot(test, 2))
        return self._batch(for_spikes, active, match)


class Evidence(_Spikes):
    """An odd number of cues, left or right, then a pause, then the question which were more.

    The cues take the first half of the time, the question its last tenth.
    """

    cues = 5
    name, shortest = "evidence", 4 * cues

    def __init__(self, length: int):
        super().__init__(length)
        self.asked = max(1, length // 10)
        self.period = length // (2 * self.cues)  # from cue to cue
        pause = length - self.cues * self.period - self.asked
        self.title = f"majority of {self.cues} cues, {pause} steps later, spike trains"

    def batch(self, key: Array, size: int) -> Batch:
        for_sides, for_spikes = jax.random.split(key)
        sides = jax.random.bernoulli(for_sides, shape=(self.cues, size)).astype(int)
        majority = (2 * sides.sum(axis=0) > self.cues).astype(int)
        labels = jnp.arange(size) % 2  # as many answers of each side, if the size is even
        sides = jnp.where(majority == labels, sides, 1 - sides)
        period = self.period
        on = jnp.arange(period) < (period + 1) // 2
        cue = jax.nn.one_hot(sides, 2)[:, None] * on[None, :, None, None]
        active = jnp.zeros((self.length, size, 3))
        active = active.at[: self.cues * period, :, :2].set(cue.reshape(-1, size, 2))
        return self._batch(for_spikes, active, labels)
