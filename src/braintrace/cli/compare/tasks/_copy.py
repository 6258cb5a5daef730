"""Delayed copy: repeat a list of symbols after a pause."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from ._task import ACCURACY, Array, Batch, ending


@dataclass(frozen=True)
class Copy:
    """`items` symbols, a pause, and as many steps in which they are asked for, in order.

    One channel per symbol and one that asks. Of all possible lists an eighth, chosen once at
    random, is held out: a list of the test never occurs in training.
    """

    length: int
    symbols: int = 8
    items: int = 4

    measure = ACCURACY

    def __post_init__(self) -> None:
        if self.length < 2 * self.items + 1:
            raise ValueError(f"copy needs at least {2 * self.items + 1} steps.")

    @property
    def title(self) -> str:
        """The task in a few words, with its sizes."""
        pause = self.length - 2 * self.items
        return f"delayed copy of {self.items} of {self.symbols} symbols over {pause} empty steps"

    @property
    def inputs(self) -> int:
        """One channel per symbol and one that asks."""
        return self.symbols + 1

    @property
    def outputs(self) -> int:
        """A score per symbol."""
        return self.symbols

    @property
    def chance(self) -> float:
        """The best constant answer on the held-out lists."""
        counts = np.bincount(np.asarray(self._listed(self._lists[0])).ravel())
        return float(counts.max() / counts.sum())

    @property
    def mask(self) -> Array:
        """The steps in which symbols are asked for."""
        return ending(self.length, self.items)

    @cached_property
    def _lists(self) -> tuple[np.ndarray, np.ndarray]:
        """Held-out lists and those of training, as numbers in base `symbols`."""
        order = np.random.default_rng(0).permutation(self.symbols**self.items)
        count = len(order) // 8
        return order[:count], order[count:]

    def batch(self, key: Array, size: int) -> Batch:
        """Inputs and targets of training sequences."""
        return self._shown(jax.random.choice(key, jnp.asarray(self._lists[1]), (size,)))

    def test(self, size: int) -> Batch:
        """Held-out lists, each once."""
        return self._shown(jnp.asarray(self._lists[0][:size]))

    def _listed(self, lists: Array | np.ndarray) -> Array:
        """The symbols of numbered lists, (items, size)."""
        places = self.symbols ** np.arange(self.items)
        return jnp.asarray(lists) // places[:, None] % self.symbols

    def _shown(self, lists: Array) -> Batch:
        symbols = self._listed(lists)
        xs = jnp.zeros((self.length, len(lists), self.inputs))
        xs = xs.at[: self.items, :, :-1].set(jax.nn.one_hot(symbols, self.symbols))
        targets = jnp.zeros((self.length, len(lists)), symbols.dtype)
        return xs.at[-self.items :, :, -1].set(1), targets.at[-self.items :].set(symbols)
