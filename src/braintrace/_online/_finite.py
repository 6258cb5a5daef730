"""A warning for losses that are not finite.

Losses are looked at outside of the compiled loop, and only when they are computed: no call waits
for its own, which are looked at in a later call then. After many calls this is done for those of
`PAUSE` seconds at once.
"""

from __future__ import annotations

import sys
import time
import warnings
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from .._errors import message
from .._jaxpr import is_traced

MANY, PAUSE = 100, 0.1


class _Call(NamedTuple):
    number: int
    losses: Any  # an array (T,)
    mask: Any
    every: int  # steps per update

    @property
    def wrong(self) -> np.ndarray:
        """Which losses count and are not finite."""
        counts = True if self.mask is None else np.asarray(self.mask) != 0
        return ~np.isfinite(self.losses) & counts


class LossWatch:
    """The losses of a learner's training calls, until they are looked at; warns once."""

    def __init__(self, name: str):
        self._name, self._warned = name, False
        self._waiting: list[_Call] = []
        self._calls = self._updates = 0  # of all calls, and of those that were looked at
        self._next = 0.0

    def add(self, losses: Any, mask: Any, every: int) -> None:
        """The losses of another call; inside of `jit` there are no numbers to look at."""
        if self._warned or is_traced(losses) or not losses.is_fully_addressable:
            return
        self._calls += 1
        self._waiting.append(_Call(self._calls, losses, mask, every))
        if self._calls <= MANY or time.monotonic() > self._next:
            self._look()
            self._next = time.monotonic() + PAUSE

    def _look(self) -> None:
        ready = list(takewhile(lambda call: call.losses.is_ready(), self._waiting))
        self._waiting = self._waiting[len(ready) :]
        finite = not ready or np.isfinite(np.concatenate([call.losses for call in ready])).all()
        for call in ready:
            if not finite and (wrong := call.wrong).any():
                return self._warn(call, int(np.argmax(wrong)))
            self._updates += -(-call.losses.shape[0] // call.every)

    def _warn(self, call: _Call, step: int) -> None:
        self._waiting, self._warned = [], True
        update = self._updates + step // call.every + 1
        text = message(
            f"the loss is not finite from update {update} on.",
            where=f"{self._name}, losses[{step}] of training call {call.number}",
            why="NaN or infinity in the inputs, targets or states, or weights that grew until the "
            "loss overflowed; each update from there on leaves weights that are not finite",
            do="check the data, jnp.isfinite(xs).all(); if they are finite, lower the learning "
            "rate or clip the gradients; then start again from finite weights",
        )
        frame, level = sys._getframe(), 1
        while frame.f_back and frame.f_globals["__name__"].startswith("braintrace."):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, stacklevel=level)
