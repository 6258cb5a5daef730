"""The state of an optimizer in a checkpoint: the learner's, that of an object, or a tree."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import brainstate
import jax
import numpy as np

from .._errors import value_error
from ..program import PyTree
from ._names import Named, named, renewed
from ._swap import swap_states

OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Part:
    """Named values of an optimizer.

    `assign` takes new ones and returns `Checkpoint.optimizer`; `undo` takes that back.
    """

    values: Named
    assign: Callable[[Named], Any]
    undo: Callable[[], Any]


def part_of(learner: Any, own: Named | None, optimizer: Any, saving: bool) -> Part | None:
    """What of an optimizer is saved, or what saved values are for; of the learner's own if None."""
    if optimizer is False or (optimizer is None and own is None):
        return None
    if own is not None and (optimizer is None or learner.optimizer is optimizer):
        return Part(own, partial(_put, learner), lambda: learner.assign(own))
    learner.check_optimizer(optimizer)
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return _held(learner, optimizer)
    start = optimizer.init(weights_of(learner))
    if saving and jax.tree.leaves(start):
        raise value_error(
            "the learner has no state of this optimizer.",
            why="only etrace_train and init_optimizer make one in the learner; it belongs to "
            "the very object that was passed to them",
            do="pass that object, or the state that you keep yourself: optimizer=opt_state",
        )
    before = {k: getattr(learner, k) for k in ("optimizer", "optimizer_state", "optimized")}

    def adopt(values: Named) -> PyTree:
        learner.init_optimizer(optimizer)
        return _put(learner, values) if values else start

    return Part(named(OPTIMIZER, start), adopt, lambda: vars(learner).update(before))


def check_passed(path: str | os.PathLike, saved: bool, passed: bool) -> None:
    """Refuse an optimizer that is not in the file, or one that is and has no place."""
    if saved != passed:
        what = "holds an optimizer" if saved else "holds no optimizer, one is passed"
        raise value_error(
            f"{os.fspath(path)} {what}.",
            why="training would continue with another optimizer state",
            do="pass load(path, optimizer=...) what was passed to save, or optimizer=False to "
            "leave the optimizer as it is",
        )


def _put(learner: Any, values: Named) -> PyTree:
    learner.assign(values)
    return learner.optimizer_state.value


def _nothing() -> None:
    """A tree is returned, and put nowhere."""


def _held(learner: Any, optimizer: Any) -> Part:
    """An object with states or variables inside, or a tree."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(optimizer, nnx.Optimizer):
        tree = jax.tree.map(lambda a: a, nnx.state(optimizer))  # a copy

        def update(values: Named) -> Any:
            nnx.update(optimizer, renewed(OPTIMIZER, tree, values))
            return optimizer

        return Part(named(OPTIMIZER, tree), update, lambda: nnx.update(optimizer, tree))
    register = getattr(optimizer, "register_trainable_weights", None)
    if callable(register) and not getattr(optimizer, "param_states", None):
        register(learner.param_states)  # its states depend on them
    learned = [*getattr(learner, "states", dict)().values(), brainstate.random.DEFAULT]
    states = states_under(optimizer, {id(s) for s in learned})
    if not states:
        return Part(named(OPTIMIZER, optimizer), partial(renewed, OPTIMIZER, optimizer), _nothing)
    values = {k: v for name, state in states.items() for k, v in named(name, state.value).items()}

    def assign(new: Named) -> Any:
        swap_states(states, {k: renewed(k, s.value, new) for k, s in states.items()})
        return optimizer

    return Part(values, assign, lambda: assign(values))


def weights_of(learner: Any) -> PyTree:
    """The weights that an optimizer of a learner changes."""
    from .. import frontend

    return {p: s.value for p, s in frontend.floating(learner.param_states).items()}


def states_under(thing: PyTree, apart: set[int]) -> dict[str, brainstate.State]:
    """The states that an object holds, by name, those with an id in `apart` left out."""
    states: dict[str, brainstate.State] = {}
    visited, ends = set(apart), (jax.Array, np.ndarray, type, ModuleType)

    def walk(name: str, value: PyTree) -> None:
        if id(value) in visited or isinstance(value, ends) or inspect.isroutine(value):
            return
        visited.add(id(value))
        if isinstance(value, brainstate.State):
            states[name] = value
            return
        inside = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        for key, part in (
            inside if isinstance(inside, dict) else getattr(value, "__dict__", {})
        ).items():
            walk(f"{name}/{key}", part)

    walk(OPTIMIZER, thing)
    return states
