"""Resetting a learner: states get their initial values, for the same batch size or another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import value_error
from ..graph import Graph, Path, Step
from ..program import PyTree
from ..rules import check_count

Module: Any = brainstate.nn.Module
Shapes = dict[tuple, dict[int, tuple[int, ...]]]  # by path and by number of the leaf
LAST = 1 << 20  # the order of a `reset_state` that comes after those of the model


def shared_batch(graph: Graph, example: PyTree) -> int | None:
    """The leading axis that inputs and hidden states share, if the operators take a batch."""
    step = graph.step
    shapes = [step.entry(leaf).shape for leaf in step.hidden]
    shapes += [leaf.shape for leaf in jax.tree.leaves(example) if leaf.shape]
    leading = {s[0] if s else None for s in shapes}
    fed = [r for r in graph.relations if r.operator.x is not None]
    if len(leading) != 1 or not all(r.operator.is_batched for r in fed):
        return None
    return leading.pop()


def check_batch_size(batch_size: Any) -> None:
    """Refuse what is no number of samples; None is for a model without batch."""
    if batch_size is not None:
        check_count("batch_size", batch_size, "the samples of a batch")


def no_batch() -> ValueError:
    """The error of asking a learner without batch for another one."""
    return value_error(
        "the learner has no batch axis to change.",
        why="inputs and states were compiled without one, so batch_size has nothing to act on",
        do="reset without batch_size, or compile with batched inputs and states",
    )


def with_batch(example: PyTree, new: int) -> PyTree:
    """Shapes of the arguments for another batch size."""

    def resize(a):
        return jax.ShapeDtypeStruct((new, *a.shape[1:]), a.dtype) if a.shape else a

    return jax.tree.map(resize, example)


@contextmanager
def resized_states(states: Mapping[tuple, brainstate.State], old: int, new: int) -> Iterator[None]:
    """States with another leading axis, for as long as the context lasts."""

    def resize(a):
        return jnp.zeros((new, *a.shape[1:]), a.dtype) if a.shape[:1] == (old,) else a

    before = {path: state.value for path, state in states.items()}
    for state in states.values():
        state.value = jax.tree.map(resize, state.value)
    try:
        yield
    finally:
        for path, state in states.items():
            state.value = before[path]


def state_shapes(step: Step) -> Shapes:
    """The shapes of the leaves of every hidden state that carry a derivative."""
    out: Shapes = {}
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
                do="call learner.reset(batch_size=...) to change both; the state must be one that "
                "the `init_state` or `reset_state` of a module makes",
            )


def _text(shapes: dict[int, tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes.values()))


def strengthen(model: brainstate.nn.Module) -> None:
    """Make weakly typed states strong, as a step does: two types would be two compilations."""
    is_weak = lambda leaf: getattr(leaf, "weak_type", False)
    strong = lambda leaf: leaf.astype(leaf.dtype) if is_weak(leaf) else leaf
    for state in brainstate.graph.states(model).values():
        if any(map(is_weak, jax.tree.leaves(state.value))):
            state.value = jax.tree.map(strong, state.value)


def reinitialise(model: brainstate.nn.Module, batch_size: int | None = None) -> None:
    """Give the states of all modules without `reset_state` the values of their `init_state`.

    The state objects stay: compiled programs and mapped models hold on to them. Long-term
    states, such as weights, keep their values.
    """
    nodes = list(brainstate.graph.nodes(model, Module).values())
    maps = [n for n in nodes if isinstance(n, brainstate.nn.Map)]
    mapped = {id(n) for m in maps for n in brainstate.graph.nodes(m.module, Module).values()}
    for node in nodes:
        kind = type(node)
        if kind.reset_state is Module.reset_state and kind.init_state is not Module.init_state:
            _reinitialise(node, None if id(node) in mapped else batch_size, id(node) in mapped)


def _reinitialise(node: brainstate.nn.Module, batch_size: int | None, mapped: bool) -> None:
    held = dict(vars(node))
    old: dict[Path, brainstate.State] = dict(brainstate.graph.states(node).items())
    named = batch_size is not None and _takes_batch_size(node.init_state)
    node.init_state(**({"batch_size": batch_size} if named else {}))
    new: dict[Path, brainstate.State] = dict(brainstate.graph.states(node).items())
    for name in {path[0] for path in old}:
        setattr(node, name, held[name])
    for path, state in old.items():
        initial = new.get(path, state)
        if initial is not state and not isinstance(state, brainstate.LongTermState):
            value = initial.value
            state.value = jax.tree.map(_repeated, value, state.value) if mapped else value


def _takes_batch_size(method: Callable) -> bool:
    """Whether `init_state` has the argument; otherwise the module has its own batch."""
    parameters = inspect.signature(method).parameters
    several = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return several or "batch_size" in parameters


def _repeated(one: PyTree, every: PyTree) -> PyTree:
    """The value of one sample for all of them; unless a module itself has one per sample."""
    whole = jnp.shape(every)
    return jnp.broadcast_to(one, whole) if jnp.shape(one) == whole[1:] else one
