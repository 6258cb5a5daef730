"""Symbols to remember: one of them (the demo), or a list of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ._task import ACCURACY, ANSWERS, Array, Batch, SequenceTask


class Recall(SequenceTask):
    """Name the symbol shown at the start, long after it is gone.

    One channel per symbol, one that marks the cue and one that asks for the answer. The cue is
    shown for `cue` steps; every later step shows a random symbol, also while the answer is asked
    for in the last `asked` steps. So these steps hold no information on the label.
    """

    name = "recall"
    measure = ANSWERS

    def __init__(self, symbols: int, length: int, cue: int = 5, asked: int = 5):
        super().__init__(length)
        self.symbols, self.cue, self.asked = symbols, cue, asked
        self.inputs, self.outputs = symbols + 2, symbols
        self.chance = 1 / symbols
        self.title = f"delayed recall of 1 in {symbols} symbols over {length} steps"

    def batch(self, key: Array, size: int) -> Batch:
        for_label, for_rest = jax.random.split(key)
        labels = jax.random.randint(for_label, (size,), 0, self.symbols)
        shown = jax.random.randint(for_rest, (self.length, size), 0, self.symbols)
        symbols = jax.nn.one_hot(shown.at[: self.cue].set(labels), self.symbols)
        signals = jnp.zeros((self.length, size, 2))
        signals = signals.at[: self.cue, :, 0].set(1).at[-self.asked :, :, 1].set(1)
        xs = jnp.concatenate([symbols, signals], axis=-1)
        return xs, jnp.broadcast_to(labels, (self.length, size))


class Copy(SequenceTask):
    """`items` symbols, a pause, and as many steps in which they are asked for, in order.

    One channel per symbol and one that asks. Of all possible lists two eighths, drawn once
    at random, are held out, for validation and test: such a list never occurs in training.
    """

    symbols, items = 8, 4
    name, shortest = "copy", 2 * items + 1
    inputs, outputs, asked = symbols + 1, symbols, items
    measure = ACCURACY

    def __init__(self, length: int):
        super().__init__(length)
        pause = length - 2 * self.items
        what = f"{self.items} of {self.symbols} symbols"
        self.title = f"delayed copy of {what} over {pause} empty steps"
        # Lists as numbers in base `symbols`.
        order = np.random.default_rng(0).permutation(self.symbols**self.items)
        eighth = len(order) // 8
        self._test, self._validation, self._training = np.split(order, [eighth, 2 * eighth])
        counts = np.bincount(np.asarray(self._symbols(self._test)).ravel())
        self.chance = float(counts.max() / counts.sum())

    def batch(self, key: Array, size: int) -> Batch:
        return self._sequences(jax.random.choice(key, jnp.asarray(self._training), (size,)))

    def validation(self, size: int) -> Batch:
        """Held-out lists, each once."""
        return self._sequences(jnp.asarray(self._validation[:size]))

    def test(self, size: int) -> Batch:
        """Other held-out lists, each once."""
        return self._sequences(jnp.asarray(self._test[:size]))

    def _symbols(self, lists: Array | np.ndarray) -> Array:
        """The symbols of numbered lists, (items, size)."""
        places = self.symbols ** np.arange(self.items)
        return jnp.asarray(lists) // places[:, None] % self.symbols

    def _sequences(self, lists: Array) -> Batch:
        symbols = self._symbols(lists)
        xs = jnp.zeros((self.length, len(lists), self.inputs))
        xs = xs.at[: self.items, :, :-1].set(jax.nn.one_hot(symbols, self.symbols))
        targets = jnp.zeros((self.length, len(lists)), symbols.dtype)
        return xs.at[-self.items :, :, -1].set(1), targets.at[-self.items :].set(symbols)
