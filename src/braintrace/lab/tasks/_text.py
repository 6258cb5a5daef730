"""Next-character prediction on the help topics of Python: English text that is always there."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from ._task import BITS, Array, Batch, SequenceTask

SYMBOLS = 64
TRAINED, VALIDATED = 0.8, 0.9  # where these splits end


@cache
def corpus() -> str:
    """The topics in order of their names, each paragraph once, runs of blanks as one.

    Topics quote each other at length; without this, much of the test would occur in training.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            paragraphs.setdefault(re.sub(r"\s+", " ", paragraph).strip())
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


@cache
def encoded() -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Characters of training, validation and test as numbers, and the alphabet of training.

    The last number stands for every character that is not among the most frequent of training.
    """
    text = corpus()
    cut, end = (text.index("\n", int(share * len(text))) for share in (TRAINED, VALIDATED))
    alphabet = "".join(c for c, _ in Counter(text[:cut]).most_common(SYMBOLS - 1))
    number = {character: n for n, character in enumerate(alphabet)}
    numbers = np.array([number.get(character, SYMBOLS - 1) for character in text])
    return numbers[:cut], numbers[cut:end], numbers[end:], alphabet


class Text(SequenceTask):
    """Predict the next character; the first quarter of a sequence is context only.

    Training is the first eight tenths of the text, then one for validation and one for the test.
    """

    name, shortest = "text", 4
    inputs, outputs = SYMBOLS, SYMBOLS
    measure = BITS

    def __init__(self, length: int):
        train, validation, test, _ = encoded()
        self.longest = min(len(validation), len(test)) - 1
        super().__init__(length)
        digest = hashlib.sha256(corpus().encode()).hexdigest()[:8]
        self.title = (
            f"next of {SYMBOLS} characters, Python's help topics "
            f"({len(train)} for training, {len(test)} held out, sha256 {digest})"
        )
        # Bits per character of the frequencies of training, on the test.
        share = np.log2((np.bincount(train, minlength=SYMBOLS) + 1) / (len(train) + SYMBOLS))
        self.chance = float(-share[test].mean())
        self.asked = length - length // 4

    def batch(self, key: Array, size: int) -> Batch:
        train = encoded()[0]
        starts = jax.random.randint(key, (size,), 0, len(train) - self.length)
        return self._windows(train, starts)

    def validation(self, size: int) -> Batch:
        return self._spaced(encoded()[1], size)

    def test(self, size: int) -> Batch:
        return self._spaced(encoded()[2], size)

    def _spaced(self, text: np.ndarray, size: int) -> Batch:
        """Windows of a held-out text, evenly spaced."""
        starts = np.unique(np.linspace(0, len(text) - self.length - 1, size).astype(int))
        return self._windows(text, jnp.asarray(starts))

    def _windows(self, numbers: np.ndarray, starts: Array) -> Batch:
        text = jnp.asarray(numbers)[starts + jnp.arange(self.length + 1)[:, None]]
        return jax.nn.one_hot(text[:-1], SYMBOLS), text[1:]
