"""A task as it is used here: its sequences with their shapes, checked, and how a score is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..._errors import type_error, value_error
from ...program import PyTree
from ..tasks import Measure, Task

Batch = tuple[PyTree, PyTree]  # inputs and targets, (T, B, ...) each

_METHODS = ("batch", "validation", "test", "loss", "score")
_ATTRIBUTES = ("chance", "higher_is_better")


@dataclass(frozen=True, slots=True)
class Sequences:
    """A task with batches of one size; `validation` and `test` are made when they are asked for."""

    name: str
    title: str
    metric: Measure
    threshold: float | None
    length: int
    mask: Array  # weights of the steps, (T,)
    shapes: Batch  # of a batch of training
    draw: Callable[[Array], Batch]  # a batch of training, of a key
    loss: Callable[[PyTree, PyTree], Array]
    score: Callable[[PyTree, PyTree], Array]
    split: Callable[[str, int], Batch]  # at most so many sequences of 'validation' or 'test'
    update_every: int
    streaming: bool
    judge: Callable[[PyTree, PyTree], PyTree] | None = None  # of a task of rewards, see `Task`

    @property
    def x(self) -> PyTree:
        """Zeros of the shape of one step's input."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), self.shapes[0])


def sequences_of(task: Task, size: int) -> Sequences:
    """Read a task; everything that a user can get wrong is refused here, or at the first step."""
    _check_names(task)
    draw = jax.jit(lambda key: task.batch(key, size))
    name = getattr(task, "name", type(task).__name__)
    shapes = _pair(name, "batch", jax.eval_shape(draw, jax.random.key(0)))
    length = int(jax.tree.leaves(shapes)[0].shape[0])
    _check_axes(name, "batch", shapes, length, size)
    mask = jnp.asarray(getattr(task, "mask", jnp.ones(length)), float)
    if mask.shape != (length,) or not float(mask.sum()) > 0:
        raise value_error(
            f"the mask of {name} has shape {mask.shape} and the sum {float(mask.sum()):g}.",
            why=f"it weighs the losses of the {length} steps of a sequence",
            do="give it one number per step; what differs between samples is part of the targets",
        )

    def split(which: str, count: int) -> Batch:
        batch = _pair(name, which, jax.jit(lambda: getattr(task, which)(count))())
        _check_axes(name, which, batch, length, None)
        return batch

    metric = Measure(
        getattr(task, "metric", "score"),
        getattr(task, "form", "{:.3g}"),
        getattr(task, "scale", 1),
        bool(task.higher_is_better),
        chance=float(task.chance),
    )
    title, threshold = getattr(task, "title", name), getattr(task, "threshold", None)
    loss, score = _scalar(name, "loss", task.loss), _scalar(name, "score", task.score)
    streaming = getattr(task, "streaming", False)
    every = getattr(task, "update_every", 1 if streaming else length)
    return Sequences(
        *(name, title, metric, threshold, length, mask, shapes, draw, loss, score, split),
        *(every, streaming, getattr(task, "judge", None)),
    )


def samples_of(arrays: PyTree) -> int:
    """The number of samples."""
    return int(jax.tree.leaves(arrays)[0].shape[1])


def _scalar(name: str, what: str, function: Callable[..., Array]) -> Callable[..., Array]:
    """A loss or score that is refused unless it is one real number."""

    def checked(outputs: PyTree, targets: PyTree) -> Array:
        value = function(outputs, targets)
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise type_error(
                f"{name}.{what} returns {jnp.result_type(value)}{list(jnp.shape(value))}.",
                why="it is one floating number, the mean over the samples",
                do=f"add .mean() to what `{what}` returns",
            )
        return value

    return checked


def _check_names(task: Any) -> None:
    missing = [n for n in _METHODS if not callable(getattr(task, n, None))]
    missing += [n for n in _ATTRIBUTES if not hasattr(task, n)]
    if missing:
        kind = task.__name__ if isinstance(task, type) else type(task).__name__
        raise type_error(
            f"the task {kind} has no {', '.join(missing)}.",
            why="a task has sequences of three splits, a loss, a score and its chance level, see "
            "braintrace.tasks.Task",
            do="pass an instance that has them" + ("; this is a class" * isinstance(task, type)),
        )


def _pair(name: str, which: str, value: Any) -> Batch:
    if not isinstance(value, tuple) or len(value) != 2 or not all(map(jax.tree.leaves, value)):
        raise type_error(
            f"{name}.{which} returns a {type(value).__name__}.",
            why="sequences are a pair of inputs and targets",
            do="return (xs, ys), arrays whose first axes are time and samples",
        )
    return value


def _check_axes(name: str, which: str, batch: Batch, length: int, size: int | None) -> None:
    shapes = [jnp.shape(a) for a in jax.tree.leaves(batch)]
    samples = size or (shapes[0][1] if len(shapes[0]) > 1 else 0)
    if any(shape[:2] != (length, samples) for shape in shapes):
        found = ", ".join(str(shape) for shape in shapes)
        raise value_error(
            f"{name}.{which} returns arrays of the shapes {found}.",
            why=f"the first axes of all are time and samples, here ({length}, {samples or 'B'})",
            do="put time first: jnp.swapaxes(a, 0, 1); repeat what a sequence has once",
        )
