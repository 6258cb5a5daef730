"""Delayed match to sample: are two stimuli, far apart in time, the same?"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ._spikes import poisson
from ._task import ANSWERS, HELD_OUT, Array, Batch, ending

CHANNELS = 10  # per population


@dataclass(frozen=True)
class Match:
    """One of two populations fires as the sample, and after a pause one of them as the test.

    A third population fires while the answer is asked for, in the last sixth. Sample and test take
    a sixth each. All channels fire now and then: no single spike tells anything.
    """

    length: int

    inputs = 3 * CHANNELS
    outputs = 2
    measure = ANSWERS
    chance = 0.5

    def __post_init__(self) -> None:
        if self.length < 12:
            raise ValueError("match needs at least 12 steps.")

    @property
    def title(self) -> str:
        """The task in a few words, with its sizes."""
        return f"delayed match to sample over {self.length - 3 * self._part} steps, spike trains"

    @property
    def mask(self) -> Array:
        """The steps in which the answer is asked for."""
        return ending(self.length, self._part)

    @property
    def _part(self) -> int:
        return self.length // 6

    def batch(self, key: Array, size: int) -> Batch:
        """Spikes and labels (1 for a match), drawn anew for every key."""
        for_sample, for_spikes = jax.random.split(key)
        match = jnp.arange(size) % 2  # as many matches as mismatches, if the size is even
        sample = jax.random.bernoulli(for_sample, shape=(size,)).astype(int)
        test = jnp.where(match == 1, sample, 1 - sample)
        part = self._part
        active = jnp.zeros((self.length, size, 3))
        active = active.at[:part, :, :2].set(jax.nn.one_hot(sample, 2))
        active = active.at[-2 * part : -part, :, :2].set(jax.nn.one_hot(test, 2))
        active = active.at[-part:, :, 2].set(1)
        xs = poisson(for_spikes, active, CHANNELS)
        return xs, jnp.broadcast_to(match, (self.length, size))

    def test(self, size: int) -> Batch:
        """Sequences of a key that training never uses."""
        return self.batch(jax.random.key(HELD_OUT), size)
