"""Delayed recall: a synthetic task that needs memory."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclass(frozen=True, slots=True)
class Recall:
    """Name the symbol shown at the start, long after it is gone.

    One channel per symbol, one that marks the cue and one that asks for the answer. The cue is
    shown for `cue` steps; every later step shows a random symbol, also while the answer is asked
    for in the last `answer` steps. So these steps hold no information on the label.
    """

    symbols: int
    length: int
    cue: int = 5
    answer: int = 5

    @property
    def channels(self) -> int:
        """Size of the input of a step."""
        return self.symbols + 2

    @property
    def chance(self) -> float:
        """Accuracy of a guess."""
        return 1 / self.symbols

    def mask(self, length: int) -> Array:
        """1 at the steps whose answer counts, in a sequence of this length."""
        return jnp.zeros(length).at[-self.answer :].set(1)

    def batch(self, key: Array, size: int) -> tuple[Array, Array]:
        """Inputs (length, size, channels) and labels (size,)."""
        for_label, for_rest = jax.random.split(key)
        labels = jax.random.randint(for_label, (size,), 0, self.symbols)
        shown = jax.random.randint(for_rest, (self.length, size), 0, self.symbols)
        symbols = jax.nn.one_hot(shown.at[: self.cue].set(labels), self.symbols)
        signals = jnp.zeros((self.length, size, 2))
        signals = signals.at[: self.cue, :, 0].set(1).at[-self.answer :, :, 1].set(1)
        return jnp.concatenate([symbols, signals], axis=-1), labels
