"""A warning for losses that are not finite.

Losses are looked at outside of the compiled loop, and only when they are computed: no call waits
for its own, which are looked at in a later call then. After `MANY` calls they are looked at once
per `PAUSE` seconds: the last ones that are ready and, if these are not finite, the earlier ones, to
find the first. Most often one loss that is not finite makes the weights, and all losses after it,
not finite as well.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import warn
from ..program import is_traced

MANY, PAUSE = 100, 0.1


class _Call(NamedTuple):
    number: int
    losses: Any  # an array (T,)
    mask: Any
    every: int  # steps per update
    updates: int  # before this call

    @property
    def first_wrong(self) -> int | None:
        """The first step whose loss counts and is not finite."""
        wrong = ~np.isfinite(jax.device_get(self.losses))
        if self.mask is not None:
            wrong &= np.asarray(jax.device_get(self.mask)) != 0
        return int(np.argmax(wrong)) if wrong.any() else None


def _is_gone(array: Any) -> bool:
    """Whether the user has deleted or donated it."""
    return isinstance(array, jax.Array) and array.is_deleted()


class LossWatch:
    """The losses of a learner's training calls, until they are looked at; warns once."""

    def __init__(self, name: str):
        self._name, self._warned = name, False
        self._waiting: list[_Call] = []
        self._calls = self._updates = 0
        self._next = 0.0

    def add(self, losses: Any, mask: Any, every: int) -> None:
        """The losses of another call; inside of `jit` there are no numbers to look at."""
        if self._warned or is_traced(losses) or not losses.is_fully_addressable:
            return
        self._calls += 1
        self._waiting.append(_Call(self._calls, losses, mask, every, self._updates))
        self._updates += -(-losses.shape[0] // every)
        if self._calls <= MANY or time.monotonic() > self._next:
            self.look()
            self._next = time.monotonic() + PAUSE

    def look(self) -> None:
        """Look at the losses that are computed by now."""
        calls = [c for c in self._waiting if not (_is_gone(c.losses) or _is_gone(c.mask))]
        ready = next((n for n in range(len(calls), 0, -1) if calls[n - 1].losses.is_ready()), 0)
        self._waiting = calls[ready:]
        if ready and calls[ready - 1].first_wrong is not None:
            self._warn(next(call for call in calls if call.first_wrong is not None))

    def _warn(self, call: _Call) -> None:
        self._waiting, self._warned = [], True
        step = call.first_wrong or 0
        update = call.updates + step // call.every + 1
        warn(
            f"the loss is not finite from update {update} on.",
            where=f"{self._name}, losses[{step}] of training call {call.number}",
            why="NaN or infinity in the inputs, targets or states, or weights that grew until the "
            "loss overflowed; most optimizers leave weights that are not finite from there on",
            do="check the data, jnp.isfinite(xs).all(); if they are finite, lower the learning "
            "rate or clip the gradients; then start again from finite weights "
            "(optax.apply_if_finite skips such updates)",
        )
