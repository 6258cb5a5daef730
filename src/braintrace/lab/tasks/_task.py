"""What a task is: sequences to train on, held-out ones, a loss of one step and a score.

Arrays are time-major: inputs (T, B, inputs), targets (T, B) of labels or (T, B, outputs) of values;
outputs are (B, out) at a step and (T, B, out) for sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

Batch = tuple[Array, Array]


class Task(Protocol):
    """What rules are compared on. Any object with these names is one, it need not inherit.

    Sequences are pairs of inputs and targets, arrays (or pytrees of them) whose first two axes are
    time and samples, `(T, B, ...)`; T is the same for all. What a loss needs besides a target, such
    as the mask of sequences that were padded, is part of the targets: `(labels, mask)`.

    A task may also have: `name` and `title`, for tables; `mask` (T,), the weights of the steps in
    the loss, default 1; `metric`, what the score is called, `scale` (100 for percent) and `form`
    (`"{:.1f}"`), how it is printed; `threshold`, a score to reach; `update_every`, steps between
    updates, default the length; `outputs`, the size of an output, if networks are to be made for it
    by name. With `streaming = True` there is no training apart: the network learns from its initial
    weights while it reads a split, and the score is that of the outputs it had meanwhile.

    A task of rewards has `judge(outputs, targets)`: the outputs of all steps, and what they were
    worth in place of the targets of the loss, as a `Judged`.
    """

    chance: float  # the score of the best constant output on the test split
    higher_is_better: bool

    def batch(self, key: Array, size: int) -> Any:
        """Inputs and targets of training sequences; may be compiled, the same for the same key."""

    def validation(self, size: int) -> Any:
        """At most `size` sequences for curves and the choice of settings, always the same."""

    def test(self, size: int) -> Any:
        """At most `size` sequences for the final score, always the same, in no other split."""

    def loss(self, output: Any, target: Any) -> Array:
        """The loss of one step, the mean over the samples."""

    def score(self, outputs: Any, targets: Any) -> Array:
        """The score of sequences: outputs and targets of all steps."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What a score is called and how it is printed; of built-in tasks also how it is computed."""

    name: str
    form: str  # how a number is printed
    scale: float  # before printing, 100 for percent
    higher_is_better: bool
    loss: Callable[..., Array] | None = None  # of outputs (B, out), targets (B, ...) of one step
    score: Callable[..., Array] | None = None  # of sequences of them, and the mask (T,)
    chance: float = math.nan  # the score of the best constant output

    def text(self, score: float) -> str:
        """A score as it is printed."""
        return self.form.format(self.scale * score)

    @property
    def chance_level(self) -> str:
        """The chance level in words."""
        return f"chance level: {self.text(self.chance)}{' %' if self.scale == 100 else ''}"

    def better(self, a: float, b: float) -> bool:
        """Whether one score is better than another; nan is the worst."""
        if not math.isfinite(a):
            return False
        return not math.isfinite(b) or (a > b if self.higher_is_better else a < b)


def cross_entropy(outputs: Array, labels: Array) -> Array:
    """Mean over the batch, in nats."""
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), labels[..., None], axis=-1).mean()


def squared(outputs: Array, targets: Array) -> Array:
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
    losses = jax.vmap(cross_entropy)(outputs, labels)
    return (mask * losses).sum() / mask.sum() / math.log(2)


ACCURACY = Measure("accuracy (%)", "{:.1f}", 100, True, cross_entropy, _accuracy)
ANSWERS = Measure("accuracy (%)", "{:.1f}", 100, True, cross_entropy, _answers)
ERROR = Measure("squared error", "{:.4f}", 1, False, squared, _error)
NORMALISED = Measure("NRMSE", "{:.3f}", 1, False, squared, _normalised)
BITS = Measure("bits per character", "{:.3f}", 1, False, cross_entropy, _bits)


class SequenceTask(Task):
    """A supervised sequence task with a known measure, whose last steps count."""

    name: str  # as the command line has it
    shortest, longest = 1, math.inf  # steps of a sequence
    measure: Measure
    inputs: int  # size of the input of a step
    outputs: int  # size of the read-out
    asked: int  # how many steps count in the loss, the last ones
    title: str  # in a few words, with its sizes

    def __init__(self, length: int):
        if length < self.shortest:
            raise ValueError(f"{self.name} needs at least {self.shortest} steps.")
        if length > self.longest:
            raise ValueError(f"{self.name} has at most {self.longest} steps.")
        self.length = length

    metric = property(lambda self: self.measure.name)
    scale = property(lambda self: self.measure.scale)
    form = property(lambda self: self.measure.form)
    higher_is_better = property(lambda self: self.measure.higher_is_better)

    @property
    def mask(self) -> Array:
        """1 at the steps that count, (T,)."""
        return jnp.zeros(self.length).at[self.length - self.asked :].set(1)

    @property
    def chance_level(self) -> str:
        """The chance level in words."""
        return replace(self.measure, chance=self.chance).chance_level

    def loss(self, output: Array, target: Array) -> Array:
        assert self.measure.loss is not None
        return self.measure.loss(output, target)

    def score(self, outputs: Array, targets: Array) -> Array:
        assert self.measure.score is not None
        return self.measure.score(outputs, targets, self.mask)

    def validation(self, size: int) -> Batch:
        """By default the sequences of a key that training never uses."""
        return self.batch(jax.random.key(7_907), size)

    def test(self, size: int) -> Batch:
        """By default the sequences of a key that training never uses."""
        return self.batch(jax.random.key(7_919), size)
