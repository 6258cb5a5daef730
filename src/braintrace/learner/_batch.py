"""The batch axis of a compiled learner: finding it, changing it, and noticing that it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import value_error
from ..frontend import ETraceGraph

Shapes = dict[tuple, dict[int, tuple[int, ...]]]  # by path and by number of the leaf


def shared_batch(graph: ETraceGraph, example: Any) -> int | None:
    """The leading axis that inputs and hidden states share, if the operators take a batch."""
    step = graph.module_info.step
    shapes = [step.entry(leaf).shape for leaf in step.hidden]
    shapes += [leaf.shape for leaf in jax.tree.leaves(example) if leaf.shape]
    leading = {s[0] if s else None for s in shapes}
    fed = [r for r in graph.hidden_param_op_relations if r.operator.x is not None]
    if len(leading) != 1 or not all(r.primitive.batched for r in fed):
        return None
    return leading.pop()


def no_batch() -> ValueError:
    """The error of asking a learner without batch for another one."""
    return value_error(
        "the learner has no batch axis to change.",
        why="inputs and states were compiled without one, so batch_size has nothing to act on",
        do="reset without batch_size, or compile with batched inputs and states",
    )


def with_batch(example: Any, old: int, new: int) -> Any:
    """Shapes of the arguments for another batch size."""

    def resize(a):
        return jax.ShapeDtypeStruct((new, *a.shape[1:]), a.dtype) if a.shape else a

    return jax.tree.map(resize, example)


@contextmanager
def resized_states(states: Mapping[tuple, brainstate.State], old: int, new: int) -> Iterator[None]:
    """States with another leading axis, for as long as the context lasts."""

    def resize(a):
        return jnp.zeros((new, *a.shape[1:]), a.dtype) if a.shape[:1] == (old,) else a

    kept = {path: state.value for path, state in states.items()}
    for state in states.values():
        state.value = jax.tree.map(resize, state.value)
    try:
        yield
    finally:
        for path, state in states.items():
            state.value = kept[path]


def state_shapes(graph: ETraceGraph) -> Shapes:
    """The shapes of the leaves of every hidden state that carry a derivative."""
    out: Shapes = {}
    step = graph.module_info.step
    for leaf in step.hidden:
        out.setdefault(leaf.path, {})[leaf.index] = step.entry(leaf).shape
    return out


def check_states(states: Mapping[tuple, brainstate.State], expected: Shapes) -> None:
    """Refuse states whose shape is not the one the traces belong to."""
    for path, shapes in expected.items():
        if path not in states:
            continue
        leaves = jax.tree.leaves(states[path].value)
        now = {i: jnp.shape(leaf) for i, leaf in enumerate(leaves) if i in shapes}
        if now != shapes:
            raise value_error(
                f"state {'.'.join(map(str, path))} has shape {_text(now)}, the traces belong "
                f"to {_text(shapes)}.",
                why="the model's states were initialised for another batch size than the "
                "learner's traces",
                do="call learner.reset(batch_size=...) to change both together",
            )


def _text(shapes: dict[int, tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes.values()))
