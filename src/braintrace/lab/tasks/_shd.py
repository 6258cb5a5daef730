"""Spiking Heidelberg Digits, from local files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import value_error
from ..data import bin_events
from ..data._shd import CHANNELS, recordings
from ._stored import Splits, StoredTask
from ._task import ANSWERS, Array

SECONDS, POOLED = 1.4, 5  # of a recording; channels that are counted together


@cache
def counts(path: Path, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Spike counts (T, n, C) and labels of a file, a byte per count."""
    binned, labels = [], []
    for events in recordings(path):
        x = bin_events(events, steps=steps, dt=SECONDS / steps, pool=POOLED)
        binned.append(np.minimum(x, 255).astype(np.uint8))
        labels.append(events.label)
    return np.stack(binned, axis=1), np.array(labels)


class SHD(StoredTask):
    """Name the spoken digit, of ten in each of two languages, from the spikes of 700 channels.

    Five neighbouring channels are one input; a step is a part of 1.4 s, later spikes are left out.
    The mean output after the first quarter is the answer. Every tenth recording of training is the
    validation.
    """

    name, shortest = "shd", 4
    inputs, outputs = CHANNELS // POOLED, 20
    title = f"Spiking Heidelberg Digits, 20 words, {CHANNELS} channels pooled to {inputs}"
    measure = ANSWERS

    def __init__(self, length: int, data: str | Path | None = None):
        if data is None:
            raise value_error(
                "the task shd has no data.",
                why="its files come with no package, and nothing is downloaded",
                do="name the folder of shd_train.h5 and shd_test.h5 by data=, or by --data",
            )
        self.asked = length - length // 4
        folder = Path(data)
        xs, labels = counts(folder / "shd_train.h5", length)
        held = np.arange(len(labels)) % 10 == 9
        splits: Splits = {
            "train": (xs[:, ~held], labels[~held]),
            "validation": (xs[:, held], labels[held]),
            "test": counts(folder / "shd_test.h5", length),
        }
        super().__init__(length, splits)

    def _inputs(self, inputs: np.ndarray, index: Array) -> Array:
        """From the host: as a constant of every compiled program it would take too much memory."""
        shape = (self.length, len(index), self.inputs)
        dtype = jnp.result_type(float)
        return jax.pure_callback(
            lambda i: inputs[:, np.asarray(i)].astype(dtype),
            jax.ShapeDtypeStruct(shape, dtype),
            index,
            vmap_method="sequential",
        )
