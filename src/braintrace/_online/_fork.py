"""A process that is a fork of one in which JAX runs: it has none of its threads, and would wait."""

from __future__ import annotations

import os

from .._errors import error

_state = {"started": False, "forked": False}


def _after_fork() -> None:
    _state["forked"] = _state["started"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_process() -> None:
    """Refuse to compute in a fork; JAX has started in this process from now on."""
    if _state["forked"]:
        raise error(RuntimeError)(
            "this process is a fork of one in which JAX was running.",
            why="the threads of JAX are not copied, so that a computation would wait for ever",
            do="start processes with multiprocessing.get_context('spawn'), or fork before the "
            "first computation",
        )
    _state["started"] = True
