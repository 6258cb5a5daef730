"""Tasks without a right answer to compare with: a choice, and a reward some time after it.

The choice is drawn from the outputs at the steps that count: their sum, halved, are logits. What
rules of a loss follow is the derivative of minus its expected reward (Williams, 1992); what waits
for a modulator gets the reward, minus its mean over the batch, at the last step alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._task import Array, Batch, Measure, SequenceTask

GAIN = 0.5  # of the summed outputs, as logits


class Judged(NamedTuple):
    """What was done, and what it was worth; in place of targets, (T, B, ...).

    Attributes:
        signal: the derivative of the loss by every output.
        reward: the reward minus its mean, at the step where it comes, else 0.
        chosen: at that step the reward times what speaks for the choice, 1 - p at the action that
            was taken and -p at the others.
    """

    signal: Array
    reward: Array
    chosen: Array


def _good_choices(outputs: Array, targets: tuple[Array, Array], mask: Array) -> Array:
    return (jnp.tensordot(mask, outputs, axes=1).argmax(-1) == targets[0][-1]).mean()


class _Rewarded(SequenceTask):
    """Targets are the good action of each sequence, and the noise that its choice is drawn with."""

    outputs, chance = 2, 0.5
    measure = Measure("good choices (%)", "{:.1f}", 100, True, None, _good_choices)

    def judge(self, outputs: Array, targets: tuple[Array, Array]) -> Judged:
        """Draw the choices and reward them."""
        good, noise = targets[0][-1], targets[1][-1]
        logits = GAIN * jnp.tensordot(self.mask, outputs, axes=1)
        taken = (logits + noise).argmax(-1)
        reward = (taken == good).astype(outputs.dtype)
        reward -= reward.mean()
        chosen = reward[:, None] * (jax.nn.one_hot(taken, self.outputs) - jax.nn.softmax(logits))
        last = (jnp.arange(self.length) == self.length - 1).astype(outputs.dtype)
        signal = -GAIN * self.mask[:, None, None] * chosen
        return Judged(signal, last[:, None] * reward, last[:, None, None] * chosen)

    def loss(self, output: Array, target: Any) -> Array:
        """A step's part of minus the expected reward, up to a constant."""
        return (output * target.signal).sum(-1).mean()

    def _targets(self, key: Array, good: Array) -> Any:
        noise = jax.random.gumbel(key, (len(good), self.outputs))
        return tuple(jnp.broadcast_to(a, (self.length, *a.shape)) for a in (good, noise))


class Bandit(_Rewarded):
    """One of four cues, in spikes of five channels each, and two arms, of which one pays for it.

    The cue is there for half of the time, in which the arm is chosen; the reward comes at the end.
    """

    cues, each = 4, 5
    name, shortest = "bandit", 4
    inputs = cues * each
    title = f"{cues} cues, two arms, the reward after a pause"

    @property
    def mask(self) -> Array:
        return (jnp.arange(self.length) < self.length // 2).astype(float)

    def batch(self, key: Array, size: int) -> Batch:
        of_cue, of_spikes, of_noise = jax.random.split(key, 3)
        cue = jax.random.randint(of_cue, (size,), 0, self.cues)
        on = self.mask[:, None, None] * jnp.repeat(jax.nn.one_hot(cue, self.cues), self.each, 1)
        xs = jax.random.bernoulli(of_spikes, 0.3 * on).astype(float)
        return xs, self._targets(of_noise, cue % 2)


class TMaze(_Rewarded):
    """A cue of the side, a corridor, a sign at which to turn, and the reward after another pause.

    Cue and sign take an eighth of the time each, in spikes of four channels; the last quarter is
    the pause.
    """

    channels = 4
    name, shortest = "t-maze", 16
    inputs = 3 * channels

    def __init__(self, length: int):
        super().__init__(length)
        self.part = length // 8
        self.sign = length - length // 4 - self.part
        corridor = self.sign - self.part
        self.title = f"a turn {corridor} steps after its cue, the reward {length // 4} steps later"

    @property
    def mask(self) -> Array:
        t = jnp.arange(self.length)
        return ((t >= self.sign) & (t < self.sign + self.part)).astype(float)

    def batch(self, key: Array, size: int) -> Batch:
        of_side, of_spikes, of_noise = jax.random.split(key, 3)
        side = jax.random.randint(of_side, (size,), 0, 2)
        shown = (jnp.arange(self.length) < self.part).astype(float)
        cue = shown[:, None, None] * jax.nn.one_hot(side, 2)
        sign = jnp.broadcast_to(self.mask[:, None, None], (self.length, size, 1))
        on = jnp.repeat(jnp.concatenate([cue, sign], axis=-1), self.channels, axis=-1)
        xs = jax.random.bernoulli(of_spikes, 0.7 * on).astype(float)
        return xs, self._targets(of_noise, side)
