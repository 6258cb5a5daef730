"""Handwritten digits, by rows or by pixels: the real 8 x 8 images that ship with scikit-learn."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..._errors import MissingExtra
from ._stored import StoredTask
from ._task import ACCURACY

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


class Digits(StoredTask):
    """Name the digit after its last row; every class has its share of the test."""

    name = "digits"
    title = f"handwritten digits, {ROWS} rows of {ROWS} pixels"
    inputs, outputs, asked = ROWS, 10, 1
    steps, element = ROWS, "row"
    measure = ACCURACY

    def __init__(self, length: int):
        if length != self.steps:
            raise ValueError(
                f"{self.name} has {self.steps} steps, one per {self.element}: leave --length out."
            )
        splits = {
            name: (pixels.reshape(len(pixels), self.steps, -1).swapaxes(0, 1), labels)
            for name, (pixels, labels) in images().items()
        }
        super().__init__(length, splits)


class Pixels(Digits):
    """Name the digit after its last pixel, row by row and from left to right."""

    name = "pixels"
    title = f"handwritten digits, {ROWS * ROWS} pixels one by one"
    inputs, steps, element = 1, ROWS * ROWS, "pixel"
