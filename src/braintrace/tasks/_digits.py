"""Handwritten digits, row by row: the real 8 x 8 images that ship with scikit-learn."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import MissingExtra
from ._task import ACCURACY, Array, Batch, SequenceTask

ROWS = 8


Split = tuple[np.ndarray, np.ndarray]


@cache
def images() -> dict[str, Split]:
    """Images (n, 8, 8) in [0, 1] and labels of each split; a quarter is the test, and a fifth of
    the others the validation."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise MissingExtra("The task digits", "scikit-learn", "tasks") from error

    def split(images: np.ndarray, labels: np.ndarray, share: float) -> tuple[Split, Split]:
        parts = train_test_split(
            images, labels, test_size=share, random_state=0, stratify=labels
        )  # fmt: skip
        return (parts[0], parts[2]), (parts[1], parts[3])

    digits = load_digits()
    rest, test = split(digits.images / 16, digits.target, 0.25)
    train, validation = split(*rest, 0.2)
    return {"train": train, "validation": validation, "test": test}


class Digits(SequenceTask):
    """Name the digit after its last row; every class has its share of the test."""

    name = "digits"
    title = f"handwritten digits, {ROWS} rows of {ROWS} pixels"
    inputs, outputs, asked = ROWS, 10, 1
    measure = ACCURACY

    def __init__(self, length: int):
        if length != ROWS:
            raise ValueError(f"digits has {ROWS} steps, one per row: leave --length out.")
        super().__init__(length)
        labels = images()["test"][1]
        self.chance = float(np.bincount(labels).max() / len(labels))

    def batch(self, key: Array, size: int) -> Batch:
        train, labels = images()["train"]
        index = jax.random.randint(key, (size,), 0, len(train))
        return self._rows(jnp.asarray(train, float)[index], jnp.asarray(labels)[index])

    def validation(self, size: int) -> Batch:
        return self._first("validation", size)

    def test(self, size: int) -> Batch:
        return self._first("test", size)

    def _first(self, split: str, size: int) -> Batch:
        pixels, labels = images()[split]
        return self._rows(jnp.asarray(pixels[:size], float), jnp.asarray(labels[:size]))

    def _rows(self, pixels: Array, labels: Array) -> Batch:
        return pixels.swapaxes(0, 1), jnp.broadcast_to(labels, (ROWS, len(labels)))
