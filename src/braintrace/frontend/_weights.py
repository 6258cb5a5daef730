"""The states to differentiate: one, a list or a dict of them, and the arrays in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import PyTreeDef

from .._errors import dotted, type_error, value_error
from ..graph import Path
from ..program import PyTree
from ._brainstate import States, assign, writes_of

StateTree: TypeAlias = Any  # a State, a list or a dict of them


def floating(params: States) -> dict:
    """The parameters that have a gradient; counters and indices do not."""
    leaves = lambda s: jax.tree.leaves(s.value)
    return {
        path: s
        for path, s in params.items()
        if all(jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in leaves(s))
    }


def weights_of(weights: StateTree, params: States) -> PyTree:
    """The states to differentiate, checked; None stands for all floating ones of `params`."""
    weights = floating(params) if weights is None else weights
    items = [weights] if isinstance(weights, (brainstate.State, str)) else weights
    items = list(items.values()) if hasattr(items, "values") else items
    listed = isinstance(items, (list, tuple))
    if not listed or not items or not all(isinstance(w, brainstate.State) for w in items):
        names = [w for w in items if isinstance(w, str)] if listed else []
        raise (value_error if listed and not items else type_error)(
            f"weights is {weights!r}.",
            why="it holds the states to differentiate",
            do="pass a State, a list or a dict of them, or nothing for all parameters; "
            + _choices(params, names),
        )
    bad = {
        name: w
        for name, w in named_states(weights, {}).items()
        if not isinstance(w, brainstate.ParamState) or not floating({name: w})
    }
    if bad:
        kinds = (f"{dotted(n)} (a {type(w).__name__} of {_kinds(w)})" for n, w in bad.items())
        raise value_error(
            f"no weight: {', '.join(kinds)}.",
            why="a weight is a brainstate.ParamState of floating numbers; other states change "
            "from step to step or have no gradient",
            do=_choices(params, map(dotted, bad)),
        )
    return weights


def check_read(
    weights: States,
    params: States,
    read: Iterable[brainstate.State],
) -> None:
    """Refuse weights, by name, that neither the model has nor a step function reads."""
    used = {id(s) for s in (*params.values(), *read)}
    bad = [name for name, s in weights.items() if id(s) not in used]
    if bad:
        raise value_error(
            f"weights holds {', '.join(map(dotted, bad))}, which nothing reads.",
            why="it is no parameter of the model, and step_fn does not use it: its gradient would "
            "be zero",
            do=_choices(params, map(dotted, bad)),
        )


def _kinds(state: brainstate.State) -> str:
    return ", ".join(str(jnp.result_type(a)) for a in jax.tree.leaves(state.value)) or "nothing"


def _choices(params: States, names: Iterable[str]) -> str:
    """What may be meant: the parameters of the model, those like the names first."""
    names_of_all = [dotted(path) for path in floating(params)]
    near = [m for n in names for m in get_close_matches(n, names_of_all, n=1)]
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}choose among learner.param_states: {', '.join(names_of_all)}"


def states_of(
    weights: StateTree,
) -> tuple[list[brainstate.State], Callable[[list[PyTree]], PyTree]]:
    """The states in `weights`, and how to put values in their places."""
    if isinstance(weights, brainstate.State):
        return [weights], lambda values: values[0]
    if isinstance(weights, (list, tuple)):
        return list(weights), type(weights)
    return list(weights.values()), lambda values: dict(zip(weights, values, strict=True))


def named_states(weights: StateTree, paths: States) -> dict[Path, brainstate.State]:
    """The states in `weights` by their path; those that are no part of the model by their key."""
    path_of = {id(s): path for path, s in paths.items()}
    states, _ = states_of(weights)
    keys = (
        list(weights) if hasattr(weights, "keys") else [("weights", i) for i in range(len(states))]
    )
    own = [k if isinstance(k, tuple) else (k,) for k in keys]
    return {path_of.get(id(s), k): s for s, k in zip(states, own, strict=True)}


def leaves_of(weights: StateTree, tree: PyTree) -> list[PyTree]:
    """The arrays of something shaped like the values of `weights`, in the order of the states."""
    return [a for part in states_in(weights, tree) for a in jax.tree.leaves(part)]


def states_in(weights: StateTree, tree: PyTree) -> list[PyTree]:
    """The parts of something shaped like the values of `weights`, one for each state."""
    if isinstance(weights, brainstate.State):
        return [tree]
    return list(tree) if isinstance(weights, (list, tuple)) else [tree[k] for k in weights]


def tree_of(weights: StateTree, leaves: Sequence[Array]) -> PyTree:
    """The inverse of `leaves_of`."""
    states, rebuild = states_of(weights)
    items = iter(leaves)
    trees: list[PyTreeDef] = [jax.tree.structure(s.value) for s in states]
    return rebuild([t.unflatten([next(items) for _ in range(t.num_leaves)]) for t in trees])


def write_weights(weights: StateTree, leaves: Sequence[Array]) -> None:
    """Store new arrays in the states of `weights`."""
    states, _ = states_of(weights)
    places = [(s, i) for s in states for i in range(len(jax.tree.leaves(s.value)))]
    assign(writes_of(places, leaves))


def values_of(weights: StateTree) -> PyTree:
    """The values of the states in `weights`, in their places."""
    states, rebuild = states_of(weights)
    return rebuild([s.value for s in states])
