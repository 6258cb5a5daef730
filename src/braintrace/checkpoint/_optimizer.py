"""The state of an optimizer in a checkpoint: states inside of an object, or a tree of arrays."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import brainstate
import jax
import numpy as np

from .._errors import value_error
from ..frontend import values_of, weights_of
from ..program import PyTree
from ._contents import Learner, Name, states_in


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What of an optimizer is saved, or what saved values are for.

    `finish` takes a new tree, stores it where it belongs, and returns `Checkpoint.optimizer`.
    """

    kind: str | None  # "states", "tree", or None if there is none
    states: dict[Name, brainstate.State] = field(default_factory=dict)
    tree: PyTree = None  # the state, where that is a tree
    finish: Callable[[PyTree], PyTree] = lambda tree: None


def to_save(holder: Learner, learner: Learner, optimizer: Any) -> Optimizer:
    """What `save` writes: of `optimizer`, of the holder of a state if None, nothing if False."""
    own = holder.optimizer_state
    if optimizer is False or (optimizer is None and own is None):
        return Optimizer(None)
    if optimizer is None:
        return Optimizer("tree", tree=own.value)
    if not _is_transformation(optimizer):
        return _held(learner, optimizer)
    if holder.optimizer is optimizer and own is not None:
        return Optimizer("tree", tree=own.value)
    start = jax.eval_shape(lambda: _start(holder, optimizer))
    if jax.tree.leaves(start):
        raise value_error(
            "the learner has no state of this optimizer.",
            why="only etrace_train and init_optimizer make one in the learner; it belongs to "
            "the very object that was passed to them",
            do="pass that object, or the state that you keep yourself: optimizer=opt_state",
        )
    return Optimizer("tree", tree=start)


def to_load(
    holder: Learner, learner: Learner, optimizer: Any, kind: str | None, path: str | os.PathLike
) -> Optimizer:
    """What the optimizer in a file, of this kind, is for."""
    own = holder.optimizer_state
    if optimizer is False or (optimizer is None and kind is None):
        return Optimizer(None)
    check_passed(path, kind, optimizer is not None or own is not None)
    if own is not None and (optimizer is None or holder.optimizer is optimizer):
        return Optimizer("tree", tree=own.value, finish=lambda tree: _store(holder, tree))
    if not _is_transformation(optimizer):
        return _held(learner, optimizer)

    def adopt(tree: PyTree) -> PyTree:
        holder.init_optimizer(optimizer)
        return _store(holder, tree)

    return Optimizer("tree", tree=_start(holder, optimizer), finish=adopt)


def check_passed(path: str | os.PathLike, kind: str | None, passed: bool) -> None:
    """Refuse an optimizer that is not in the file, or one that is and has no place."""
    if (kind is not None) != passed:
        what = "holds no optimizer, one is passed" if kind is None else "holds an optimizer"
        raise value_error(
            f"{os.fspath(path)} {what}.",
            why="training would continue with another optimizer state",
            do="pass load(path, optimizer=...) what was passed to save, or optimizer=False to "
            "leave the optimizer as it is",
        )


def _held(learner: Learner, optimizer: Any) -> Optimizer:
    """An object with states inside, or a tree."""
    register = getattr(optimizer, "register_trainable_weights", None)
    if callable(register) and not getattr(optimizer, "param_states", None):
        register(learner.param_states)  # its states depend on them
    states = states_under(optimizer, {id(s) for s in states_in(learner).values()})
    if states:
        return Optimizer("states", states, finish=lambda tree: optimizer)
    return Optimizer("tree", tree=optimizer, finish=lambda tree: tree)


def _store(holder: Learner, tree: PyTree) -> PyTree:
    if holder.optimizer_state is not None:  # some keep nothing
        holder.optimizer_state.value = tree
    return tree


def _is_transformation(optimizer: Any) -> bool:
    """Whether it is one of optax, whose state is stored elsewhere."""
    return all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))


def _start(holder: Learner, optimizer: Any) -> PyTree:
    """The state of an optax transformation before the first update, beside the weights."""
    return optimizer.init(values_of(weights_of(None, holder.param_states)))


def states_under(thing: PyTree, apart: set[int]) -> dict[Name, brainstate.State]:
    """The states that an object holds, by name, those with an id in `apart` left out."""
    states: dict[Name, brainstate.State] = {}
    visited = set(apart)

    def walk(name: Name, value: PyTree) -> None:
        if id(value) in visited:
            return
        if isinstance(value, brainstate.State):
            states[name] = value
        visited.add(id(value))
        for key, part in _parts(value):
            walk((*name, key), part)

    walk((), thing)
    return states


def _parts(value: PyTree) -> Iterator[tuple[str, PyTree]]:
    match value:
        case dict():
            yield from ((str(k), v) for k, v in value.items())
        case list() | tuple():
            yield from ((str(i), v) for i, v in enumerate(value))
        case jax.Array() | np.ndarray() | type() | ModuleType() | brainstate.State():
            return
        case _ if hasattr(value, "__dict__") and not inspect.isroutine(value):
            yield from vars(value).items()
