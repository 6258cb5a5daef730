"""What a task is: batches of training, held-out sequences, a loss and a score.

Arrays are time-major: inputs (T, B, inputs), targets (T, B) of labels or (T, B, outputs) of values.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ._loss import Array, Measure

Batch = tuple[Array, Array]


class Task:
    """A supervised sequence task that needs memory.

    Attributes:
        name: as the command line has it.
        length: steps of a sequence, from `shortest` to `longest`.
        measure: loss and score.
        inputs: size of the input of a step.
        outputs: size of the read-out.
        asked: how many steps count in the loss; these are the last ones.
        chance: chance level, the score of the best constant output on the held-out sequences.
        title: the task in a few words, with its sizes.
    """

    name: str
    shortest, longest = 1, math.inf
    measure: Measure
    inputs: int
    outputs: int
    asked: int
    chance: float
    title: str

    def __init__(self, length: int):
        if length < self.shortest:
            raise ValueError(f"{self.name} needs at least {self.shortest} steps.")
        if length > self.longest:
            raise ValueError(f"{self.name} has at most {self.longest} steps.")
        self.length = length

    @property
    def mask(self) -> Array:
        """1 at the steps that count, (T,)."""
        return jnp.zeros(self.length).at[self.length - self.asked :].set(1)

    @property
    def chance_level(self) -> str:
        """The chance level in words."""
        percent = " %" if self.measure.scale == 100 else ""
        return f"chance level: {self.measure.text(self.chance)}{percent}"

    def batch(self, key: Array, size: int) -> Batch:
        """Inputs and targets of training sequences."""
        raise NotImplementedError

    def test(self, size: int) -> Batch:
        """At most `size` held-out sequences, the same at every call.

        By default those of a key that training never uses.
        """
        return self.batch(jax.random.key(7_919), size)
