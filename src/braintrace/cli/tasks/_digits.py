"""Handwritten digits, row by row: the real 8 x 8 images that ship with scikit-learn."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from .._parser import MissingExtra
from ._task import ACCURACY, Array, Batch, Task

ROWS = 8


@cache
def images() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images of training and test (n, 8, 8) in [0, 1], and their labels; a quarter is the test."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise MissingExtra("The task digits", "scikit-learn", "tasks") from error
    digits = load_digits()
    target = digits.target
    return tuple(train_test_split(
        digits.images / 16, target, test_size=0.25, random_state=0, stratify=target
    ))  # fmt: skip


class Digits(Task):
    """Name the digit after its last row; every class has its share of the test."""

    name = "digits"
    title = f"handwritten digits, {ROWS} rows of {ROWS} pixels"
    inputs, outputs, asked = ROWS, 10, 1
    measure = ACCURACY

    def __init__(self, length: int):
        if length != ROWS:
            raise ValueError(f"digits has {ROWS} steps, one per row: leave --length out.")
        super().__init__(length)
        labels = images()[3]
        self.chance = float(np.bincount(labels).max() / len(labels))

    def batch(self, key: Array, size: int) -> Batch:
        train, _, labels, _ = images()
        index = jax.random.randint(key, (size,), 0, len(train))
        return self._rows(jnp.asarray(train, float)[index], jnp.asarray(labels)[index])

    def test(self, size: int) -> Batch:
        """The first images of the test."""
        _, test, _, labels = images()
        return self._rows(jnp.asarray(test[:size], float), jnp.asarray(labels[:size]))

    def _rows(self, pixels: Array, labels: Array) -> Batch:
        return pixels.swapaxes(0, 1), jnp.broadcast_to(labels, (ROWS, len(labels)))
