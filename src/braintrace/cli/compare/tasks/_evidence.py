"""Evidence accumulation: on which side were there more cues?"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ._spikes import poisson
from ._task import ANSWERS, HELD_OUT, Array, Batch, ending

CHANNELS = 10  # per population


@dataclass(frozen=True)
class Evidence:
    """An odd number of cues, left or right, then a pause, then the question which were more.

    Populations of spiking channels stand for the two sides and the question. The cues take the
    first half of the time, the question its last tenth.
    """

    length: int
    cues: int = 5

    inputs = 3 * CHANNELS
    outputs = 2
    measure = ANSWERS
    chance = 0.5

    def __post_init__(self) -> None:
        if self.length < 4 * self.cues:
            raise ValueError(f"evidence needs at least {4 * self.cues} steps.")

    @property
    def title(self) -> str:
        """The task in a few words, with its sizes."""
        pause = self.length - self.cues * self._period - self._asked
        return f"majority of {self.cues} cues, {pause} steps later, spike trains"

    @property
    def mask(self) -> Array:
        """The steps in which the answer is asked for."""
        return ending(self.length, self._asked)

    @property
    def _period(self) -> int:
        return self.length // (2 * self.cues)

    @property
    def _asked(self) -> int:
        return max(1, self.length // 10)

    def batch(self, key: Array, size: int) -> Batch:
        """Spikes and labels (1 for right), drawn anew for every key."""
        for_sides, for_spikes = jax.random.split(key)
        sides = jax.random.bernoulli(for_sides, shape=(self.cues, size)).astype(int)
        majority = (2 * sides.sum(axis=0) > self.cues).astype(int)
        labels = jnp.arange(size) % 2  # as many answers of each side, if the size is even
        sides = jnp.where(majority == labels, sides, 1 - sides)
        period = self._period
        on = jnp.arange(period) < (period + 1) // 2
        cue = jax.nn.one_hot(sides, 2)[:, None] * on[None, :, None, None]
        active = jnp.zeros((self.length, size, 3))
        active = active.at[: self.cues * period, :, :2].set(cue.reshape(-1, size, 2))
        active = active.at[-self._asked :, :, 2].set(1)
        xs = poisson(for_spikes, active, CHANNELS)
        return xs, jnp.broadcast_to(labels, (self.length, size))

    def test(self, size: int) -> Batch:
        """Sequences of a key that training never uses."""
        return self.batch(jax.random.key(HELD_OUT), size)
