"""Losses that are not finite: a warning, updates that are left out, or an error.

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
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._errors import NonFiniteError, message, type_error, warn
from ..program import PyTree, any_traced, is_traced

MANY, PAUSE = 100, 0.1
NONFINITE = {
    "warn": "warns once and goes on",
    "skip": "leaves out updates that are not finite",
    "stop": "leaves out all from the first one on, and raises an error",
}


class Guarded(NamedTuple):
    """An optimizer's arrays with the number of updates that were left out."""

    own: PyTree
    skipped: Array


def guarded(
    nonfinite: str, old: PyTree, new: PyTree, losses: Array, mask: Array | None, grads: list[Array]
) -> PyTree:
    """Weights, `Guarded` and position after an update, or those before it.

    An update is finite if its losses, gradients, weights and traces are, and no number of a state
    has become NaN or infinite: some states begin with -inf, such as the time of the last spike.
    """
    trained, own, at = new
    if mask is not None:
        losses = jnp.where(mask == 0, 0, losses)
    fine = [_finite(a) for a in jax.tree.leaves((losses, grads, trained, at.traces))]
    pairs = zip(*(jax.tree.leaves(p.states) for p in (at, old[2])), strict=True)
    fine += [_finite(a) | (_is_number(b) and ~jnp.isfinite(b)) for a, b in pairs]
    ok = jnp.stack([jnp.all(a) for a in fine]).all()
    skipped = old[1].skipped
    if nonfinite == "stop":
        ok &= skipped == 0
    new = trained, own._replace(skipped=jnp.zeros_like(skipped)), at
    trained, own, at = jax.tree.map(lambda a, b: lax.select(ok, a, b), new, old)
    return trained, own._replace(skipped=skipped + ~ok), at


def _is_number(a: Array) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.inexact))


def _finite(a: Array) -> Any:
    return jnp.isfinite(a) if _is_number(a) else jnp.asarray(True)


def check_stop(nonfinite: str, arrays: PyTree) -> None:
    """Refuse an error that nobody could raise."""
    if nonfinite == "stop" and any_traced(arrays):
        raise type_error(
            "nonfinite='stop' inside of a transformation of JAX.",
            why="an error needs numbers, which do not exist while jit traces",
            do="train outside of jit, the loop is compiled anyway; or pass nonfinite='skip'",
        )


def raise_stopped(skipped: int, count: int, results: Any) -> None:
    """The error of `nonfinite='stop'`, if updates were left out of so many."""
    if skipped:
        raise NonFiniteError(
            message(
                f"update {count - skipped + 1} of this call is not finite.",
                why="NaN or infinity in its inputs, targets or states, or weights that grew until "
                "it overflowed; it and those after it were left out",
                do="look at its data; the error's `results` go on from the update before, and "
                "nonfinite='skip' leaves out such updates alone",
            ),
            results,
        )


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
            "(nonfinite='skip' leaves out such updates)",
        )
