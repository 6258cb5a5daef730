"""Real recordings in the wheel of sktime (or of aeon): files of the time series archive.

Their files are read from where the package is installed; the package is not imported.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import MissingExtra
from ..data import pad, read_csv, read_ts
from ._stored import StoredTask, standardised
from ._task import ANSWERS, NORMALISED, Array, Batch, SequenceTask


def archived(file: str, task: str) -> Path:
    """Where a file of the archive is installed."""
    for package in ("sktime", "aeon"):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder, "datasets", "data", file)).is_file():
                return path
    raise MissingExtra(f"The task {task}", "sktime", "data")


@cache
def labelled(problem: str, task: str) -> dict[str, tuple[list[np.ndarray], np.ndarray]]:
    """Standardised series and labels of each split; the test is that of the archive.

    A fourth of each class of the archive's training is the validation.
    """
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    names: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    seen: Counter[str] = Counter()
    for half in ("TRAIN", "TEST"):
        path = archived(f"{problem}/{problem}_{half}.ts", task)
        for x, label in zip(*read_ts(path), strict=True):
            held = seen[label] % 4 == 1
            split = "test" if half == "TEST" else "validation" if held else "train"
            seen[label] += 1
            parts[split].append(x)
            names[split].append(label)
    classes = sorted({*names["train"]})
    labels = {split: np.array([classes.index(n) for n in names[split]]) for split in names}
    return {split: (x, labels[split]) for split, x in standardised(parts).items()}


class _Archive(StoredTask):
    """Series of the archive, of which the last steps are taken; zeros before shorter ones."""

    measure = ANSWERS
    problem: str

    def __init__(self, length: int):
        splits = {
            split: (pad(x, length, front=True)[0], labels)
            for split, (x, labels) in labelled(self.problem, self.name).items()
        }
        super().__init__(length, splits)


class JapaneseVowels(_Archive):
    """Who says /ae/: 9 speakers, 7 to 29 frames of 12 cepstrum coefficients of an utterance.

    The mean output of the last 7 frames is the answer.
    """

    name, problem, shortest, longest = "vowels", "JapaneseVowels", 7, 32
    title = "Japanese Vowels, 9 speakers, 12 coefficients of speech"
    inputs, outputs, asked = 12, 9, 7


class BasicMotions(_Archive):
    """Standing, walking, running or badminton, from a smart watch: acceleration and rotation.

    There are 10 steps per second; the mean output of the last half is the answer.
    """

    name, problem, shortest, longest = "motions", "BasicMotions", 2, 100
    title = "Basic Motions, 4 activities, 6 channels of a smart watch"
    inputs, outputs = 6, 4

    def __init__(self, length: int):
        self.asked = length // 2
        super().__init__(length)


# Where another kind of device begins, and the parts of training, validation and test around it.
CHANGES, PARTS = (1090, 4436, 7923), ((0, 3346), (3346, 5712), (5712, 11532))


@cache
def electricity() -> np.ndarray:
    """Readings of electric devices in households, of one kind after the other."""
    x = read_csv(archived("segmentation/ElectricDevices.csv", "electricity"), [1])[:, 0]
    return x / x[slice(*PARTS[0])].std()


class Electricity(SequenceTask):
    """Predict the next reading of electric devices in households, while learning from them.

    Somewhere in the middle half of a stream, another kind of device begins. The score is that of
    the whole stream.
    """

    name, shortest, longest = "electricity", 8, PARTS[1][1] - PARTS[1][0] - 1
    title = "readings of electric devices, two kinds in a stream, the next value"
    inputs, outputs = 1, 1
    measure = NORMALISED
    streaming, update_every = True, 1
    chance = 1.0

    def __init__(self, length: int):
        super().__init__(length)
        self.asked = length

    def _starts(self, split: int) -> tuple[int, int]:
        """The first and the last step at which a stream may start."""
        (begin, end), change = PARTS[split], CHANGES[split]
        first = max(begin, change - 3 * self.length // 4)
        return first, max(first, min(end - self.length - 1, change - self.length // 4))

    def batch(self, key: Array, size: int) -> Batch:
        first, last = self._starts(0)
        return self._streams(jax.random.randint(key, (size,), first, last + 1))

    def validation(self, size: int) -> Batch:
        return self._streams(jnp.linspace(*self._starts(1), size).astype(int))

    def test(self, size: int) -> Batch:
        return self._streams(jnp.linspace(*self._starts(2), size).astype(int))

    def _streams(self, starts: Array) -> Batch:
        x = jnp.asarray(electricity(), float)[starts + jnp.arange(self.length + 1)[:, None], None]
        return x[:-1], x[1:]
