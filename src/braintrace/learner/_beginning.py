"""How states begin: again by what made them, and with the types that they keep."""

from __future__ import annotations

import inspect
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

Module: Any = brainstate.nn.Module
LAST = 1 << 20  # the order of a `reset_state` that comes after those of the model


def strengthen(model: Any) -> None:
    """Make weakly typed states strong, as a step does: two types would be two compilations."""
    for state in model.states().values():
        if any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state.value)):
            state.value = jax.tree.map(_strong, state.value)


def _strong(leaf: Any) -> Any:
    return leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def begin_again(model: Any, batch_size: int | None = None) -> None:
    """Give the states of all modules without `reset_state` the values of their `init_state`.

    The state objects stay: compiled programs and mapped models hold on to them. What is made to
    last, such as weights, keeps its value.
    """
    nodes = list(model.nodes(Module).values())
    maps = [n for n in nodes if isinstance(n, brainstate.nn.Map)]
    mapped = {id(n) for m in maps for n in m.module.nodes(Module).values()}
    for node in nodes:
        kind = type(node)
        if kind.reset_state is Module.reset_state and kind.init_state is not Module.init_state:
            _begin(node, None if id(node) in mapped else batch_size, id(node) in mapped)


def _begin(node: Any, batch_size: int | None, mapped: bool) -> None:
    held = dict(vars(node))
    old: dict[Any, Any] = dict(node.states().items())
    named = batch_size is not None and _takes_batch_size(node.init_state)
    node.init_state(**({"batch_size": batch_size} if named else {}))
    new: dict[Any, Any] = dict(node.states().items())
    for name in {path[0] for path in old}:
        setattr(node, name, held[name])
    for path, state in old.items():
        made = new.get(path, state)
        if made is not state and not isinstance(state, brainstate.LongTermState):
            state.value = jax.tree.map(_repeated, made.value, state.value) if mapped else made.value


def _takes_batch_size(method: Any) -> bool:
    """A module that does not take one makes its states for the batch that it knows."""
    parameters = inspect.signature(method).parameters
    several = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return several or "batch_size" in parameters


def _repeated(one: Any, every: Any) -> Any:
    """The value of one sample for all of them; a module may have made all of them itself."""
    whole = jnp.shape(every)
    return jnp.broadcast_to(one, whole) if jnp.shape(one) == whole[1:] else one
