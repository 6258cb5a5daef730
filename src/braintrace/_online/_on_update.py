"""The user's function that is called for every update: between compiled loops, never inside one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._errors import check_takes, type_error
from ..program import PyTree, any_traced
from ._blocks import joined
from ._loop import Stream

OnUpdate = Callable[[int, dict[str, float]], Any]
UPDATES = 256  # in a compiled loop, before the function is called for them


def check_on_update(on_update: OnUpdate | None, arrays: PyTree) -> None:
    """Refuse what cannot be called, and a call inside of a transformation."""
    if on_update is None:
        return
    if not callable(on_update):
        raise type_error(
            f"on_update has type {type(on_update).__name__}.",
            why="it is called as on_update(step, metrics) after every update",
            do="pass a function",
        )
    why = "it gets the number of the update, and a dict with its loss and grad_norm"
    do = "let it take two arguments: def on_update(step, metrics)"
    check_takes(on_update, ["step", "metrics"], why, do, "on_update")
    if any_traced(arrays):
        raise type_error(
            "on_update is passed inside of a transformation of JAX.",
            why="it is called between compiled loops, with numbers, which do not exist while jit "
            "traces",
            do="train outside of jit: the loop is compiled anyway; or leave out on_update",
        )


def run_reported(
    run: Callable[[Stream], PyTree],
    stream: Stream,
    every: int,
    on_update: OnUpdate | None,
    unit: int | None = None,
) -> PyTree:
    """The results of a sequence, with the function called for the updates of one loop while the
    next one runs.

    Args:
        run: from the steps of a loop to the results, the losses first; with a function also to the
            norms of the gradients, per step.
        stream: all steps.
        every: steps per update.
        on_update: the user's function.
        unit: steps that stay together in one loop, a multiple of `every`; default these.
    """
    if on_update is None:
        return run(stream)
    unit = every if unit is None else unit
    size, done, out = unit * max(1, every * UPDATES // unit), 0, []
    waiting: tuple[PyTree, ...] | None = None
    for start in range(0, stream.length, size):
        part = stream.at(start, min(start + size, stream.length))
        results, norms = run(part)
        if waiting is not None:
            done = _report(on_update, done, every, *waiting)
        waiting = results[0], norms, part.mask
        out.append(results)
    if waiting is not None:
        _report(on_update, done, every, *waiting)
    return joined(out)


def _report(
    on_update: OnUpdate, done: int, every: int, losses: PyTree, norms: PyTree, mask: PyTree
) -> int:
    losses = np.asarray(losses)
    weights = np.ones_like(losses) if mask is None else np.asarray(mask)
    starts = np.arange(0, len(losses), every)
    total = np.add.reduceat(np.where(weights == 0, 0, weights * losses), starts)
    counted = np.add.reduceat(weights, starts)
    means = total / np.where(counted == 0, 1, counted)
    pairs = zip(means.tolist(), np.asarray(norms)[starts].tolist(), strict=True)
    for done, (loss, norm) in enumerate(pairs, done + 1):  # noqa: B020
        on_update(done, {"loss": loss, "grad_norm": norm})
    return done
