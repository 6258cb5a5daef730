"""Tasks of labelled recordings that are stored, in three splits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ._task import Array, Batch, SequenceTask

Splits = dict[str, tuple[np.ndarray, np.ndarray]]  # inputs (T, n, C) and labels (n,) by name


class StoredTask(SequenceTask):
    """Name the class of a recording; held-out sequences are spread over their split."""

    def __init__(self, length: int, splits: Splits):
        super().__init__(length)
        self.splits = splits
        labels = splits["test"][1]
        self.chance = float(np.bincount(labels).max() / len(labels))

    def batch(self, key: Array, size: int) -> Batch:
        count = len(self.splits["train"][1])
        return self._taken("train", jax.random.randint(key, (size,), 0, count))

    def validation(self, size: int) -> Batch:
        return self._spread("validation", size)

    def test(self, size: int) -> Batch:
        return self._spread("test", size)

    def _spread(self, split: str, size: int) -> Batch:
        count = len(self.splits[split][1])
        index = np.linspace(0, count, min(size, count), endpoint=False).astype(int)
        return self._taken(split, jnp.asarray(index))

    def _taken(self, split: str, index: Array) -> Batch:
        inputs, labels = self.splits[split]
        targets = jnp.broadcast_to(jnp.asarray(labels)[index], (self.length, len(index)))
        return self._inputs(inputs, index), targets

    def _inputs(self, inputs: np.ndarray, index: Array) -> Array:
        return jnp.asarray(inputs, float)[:, index]


def standardised(parts: dict[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """Series (T, C) of each split, less the mean of training and over its deviation, by channel."""
    train = np.concatenate(parts["train"])
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    return {name: [(x - mean) / deviation for x in part] for name, part in parts.items()}
