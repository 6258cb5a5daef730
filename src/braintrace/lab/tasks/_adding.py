"""The adding problem: the sum of two marked numbers in a long list."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._task import ERROR, Array, Batch, SequenceTask


class Adding(SequenceTask):
    """Uniform numbers in [0, 1); one of each half is marked, their sum is the answer at the end."""

    name, shortest = "adding", 4
    inputs, outputs, asked = 2, 1, 1
    measure = ERROR
    chance = 1 / 6  # the variance of a sum of two uniform numbers

    def __init__(self, length: int):
        super().__init__(length)
        self.title = f"sum of 2 marked of {length} numbers"

    def batch(self, key: Array, size: int) -> Batch:
        for_values, for_first, for_second = jax.random.split(key, 3)
        values = jax.random.uniform(for_values, (self.length, size))
        half = self.length // 2
        first = jax.random.randint(for_first, (size,), 0, half)
        second = jax.random.randint(for_second, (size,), half, self.length)
        marks = jax.nn.one_hot(first, self.length) + jax.nn.one_hot(second, self.length)
        xs = jnp.stack([values, marks.T], axis=-1)
        total = (values * marks.T).sum(axis=0)
        return xs, jnp.broadcast_to(total[:, None], (self.length, size, 1))
