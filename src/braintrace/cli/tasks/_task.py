"""What a task is: batches of training, held-out sequences, a loss of one step and a score.

Arrays are time-major: inputs (T, B, inputs), targets (T, B) of labels or (T, B, outputs) of values;
outputs are (B, out) at a step and (T, B, out) for sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

Batch = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class Measure:
    """What is minimised, and what is reported under this name."""

    name: str
    form: str  # how a number is printed
    scale: float  # before printing, 100 for percent
    rising: bool  # whether more is better
    loss: Callable[[Array, Array], Array]  # of outputs (B, out) and targets (B, ...) of one step
    score: Callable[[Array, Array, Array], Array]  # of sequences of them, and the mask (T,)

    def text(self, score: float) -> str:
        """A score as it is printed."""
        return self.form.format(self.scale * score)


def _cross_entropy(outputs: Array, labels: Array) -> Array:
    """Mean over the batch, in nats."""
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[..., None], axis=-1).mean()


def _squared(outputs: Array, targets: Array) -> Array:
    return ((outputs - targets) ** 2).mean()


def _accuracy(outputs: Array, labels: Array, mask: Array) -> Array:
    right = (outputs.argmax(-1) == labels).mean(axis=1)
    return (right * mask).sum() / mask.sum()


def _answers(outputs: Array, labels: Array, mask: Array) -> Array:
    """One answer per sequence, from the mean output of the steps that count."""
    mean = jnp.tensordot(mask, jax.nn.log_softmax(outputs), axes=1)
    return (mean.argmax(-1) == labels[-1]).mean()


def _error(outputs: Array, targets: Array, mask: Array) -> Array:
    return (mask * ((outputs - targets) ** 2).mean(axis=(1, 2))).sum() / mask.sum()


def _normalised(outputs: Array, targets: Array, mask: Array) -> Array:
    mean = jnp.tensordot(mask, targets.mean(axis=1), axes=1) / mask.sum()
    spread = _error(jnp.broadcast_to(mean, targets.shape), targets, mask)
    return jnp.sqrt(_error(outputs, targets, mask) / spread)


def _bits(outputs: Array, labels: Array, mask: Array) -> Array:
    losses = jax.vmap(_cross_entropy)(outputs, labels)
    return (mask * losses).sum() / mask.sum() / math.log(2)


ACCURACY = Measure("accuracy (%)", "{:.1f}", 100, True, _cross_entropy, _accuracy)
ANSWERS = Measure("accuracy (%)", "{:.1f}", 100, True, _cross_entropy, _answers)
ERROR = Measure("squared error", "{:.4f}", 1, False, _squared, _error)
NORMALISED = Measure("NRMSE", "{:.3f}", 1, False, _squared, _normalised)
BITS = Measure("bits per character", "{:.3f}", 1, False, _cross_entropy, _bits)


class Task:
    """A supervised sequence task that needs memory."""

    name: str  # as the command line has it
    shortest, longest = 1, math.inf  # steps of a sequence
    measure: Measure
    inputs: int  # size of the input of a step
    outputs: int  # size of the read-out
    asked: int  # how many steps count in the loss, the last ones
    chance: float  # the score of the best constant output on the held-out sequences
    title: str  # in a few words, with its sizes

    def __init__(self, length: int):
        if length < self.shortest:
            raise ValueError(f"{self.name} needs at least {self.shortest} steps.")
        if length > self.longest:
            raise ValueError(f"{self.name} has at most {self.longest} steps.")
        self.length = length

    @property
    def mask(self) -> Array:
        """1 at the steps that count, (T,)."""
        return jnp.zeros(self.length).at[self.length - self.asked :].set(1)

    @property
    def chance_level(self) -> str:
        """The chance level in words."""
        percent = " %" if self.measure.scale == 100 else ""
        return f"chance level: {self.measure.text(self.chance)}{percent}"

    def batch(self, key: Array, size: int) -> Batch:
        """Inputs and targets of training sequences."""
        raise NotImplementedError

    def test(self, size: int) -> Batch:
        """At most `size` held-out sequences, the same at every call.

        By default those of a key that training never uses.
        """
        return self.batch(jax.random.key(7_919), size)
