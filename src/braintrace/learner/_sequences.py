"""What the drivers are given: sequences, masks, windows, losses and weights, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._errors import dotted, message
from ..rules import check_count
from ._data import MultiStepData, SingleStepData


def text(what: str, why: str, do: str) -> str:
    """An error: what, why, what to do."""
    return message(what, why=why, do=do)


def length_of(sequences: tuple[Any, ...]) -> int:
    if not sequences:
        raise ValueError(
            text(
                "no sequence was given.",
                "there is nothing to step through",
                "pass at least one array with a leading time axis",
            )
        )
    for s in sequences:
        for node in jax.tree.leaves(
            s, is_leaf=lambda x: isinstance(x, (SingleStepData, MultiStepData))
        ):
            if isinstance(node, (SingleStepData, MultiStepData)):
                raise TypeError(
                    text(
                        "a sequence is wrapped in step data.",
                        "the driver slices the arrays itself",
                        "pass the bare arrays and wrap the slices in step_fn",
                    )
                )
    leaves = [leaf for s in sequences for leaf in jax.tree.leaves(s)]
    if not leaves or any(not jax.tree.leaves(s) for s in sequences):
        raise ValueError(
            text("an empty pytree was given as a sequence.", "it has no time axis", "leave it out")
        )
    shapes = [np.shape(leaf) for leaf in leaves]
    if any(not s for s in shapes):
        raise ValueError(
            text(
                "a sequence holds a scalar.",
                "it has no time axis",
                "close over it in step_fn instead",
            )
        )
    lengths = {s[0] for s in shapes}
    if len(lengths) > 1:
        raise ValueError(
            text(
                f"sequences of different lengths {sorted(lengths)}.",
                "they are sliced in lockstep along axis 0",
                "bring time to axis 0 and give all the same length",
            )
        )
    length = lengths.pop()
    if length == 0:
        raise ValueError(
            text(
                "a sequence of zero steps.",
                "a gradient needs at least one step",
                "skip empty sequences",
            )
        )
    return int(length)


def check_takes(step_fn: Callable[..., Any], given: Sequence[str], why: str, do: str) -> None:
    """Refuse a step function that cannot be called with what is given, in words."""
    try:
        signature = inspect.signature(step_fn)
    except ValueError:  # not known of a built-in function
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        what = f"step_fn{signature} is called with {', '.join(given)}: {error}."
        raise TypeError(text(what, why, do)) from None


def loss_of(found: Any, has_aux: bool) -> tuple[Any, Any]:
    pair = isinstance(found, (tuple, list)) and len(found) == 2
    if has_aux != pair:
        raise TypeError(
            text(
                f"step_fn returned {type(found).__name__} with has_aux={has_aux}.",
                "with has_aux it returns (loss, aux), without it the loss alone",
                "return what has_aux announces",
            )
        )
    loss, aux = found if has_aux else (found, None)
    real = loss is not None and not isinstance(loss, u.Quantity)
    if not real or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        kind = f"a quantity in {loss.unit}" if isinstance(loss, u.Quantity) else type(loss).__name__
        kind = getattr(loss, "dtype", kind) if not isinstance(loss, u.Quantity) else kind
        raise TypeError(
            text(
                f"the loss is {kind}.",
                "a gradient needs a real floating number without unit",
                "divide by a unit, take a real part, or convert to float in step_fn",
            )
        )
    return loss, aux


def chunk_of(chunk_size: Any) -> int:
    """Steps per window."""
    return count_of("chunk_size", chunk_size, "steps") or 1


def count_of(name: str, value: Any, what: str) -> Any:
    """A positive integer, or None."""
    return None if value is None else check_count(name, value, what)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            text(
                f"unknown {name} {value!r}.",
                f"known are {', '.join(choices)}",
                "choose one of them",
            )
        )


def floating(params: Any) -> dict:
    """The parameters that have a gradient; counters and indices do not."""
    leaves = lambda s: jax.tree.leaves(s.value)
    return {
        path: s
        for path, s in params.items()
        if all(jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in leaves(s))
    }


def weights_of(weights: Any, params: Any) -> Any:
    """The states to differentiate, checked; None stands for all floating ones of `params`.

    Raises:
        TypeError: what is given are no states.
        ValueError: none are given, or one is no weight.
    """
    weights = floating(params) if weights is None else weights
    items = [weights] if isinstance(weights, (brainstate.State, str)) else weights
    items = list(items.values()) if hasattr(items, "values") else items
    listed = isinstance(items, (list, tuple))
    if not listed or not items or not all(isinstance(w, brainstate.State) for w in items):
        names = [w for w in items if isinstance(w, str)] if listed else []
        raise (ValueError if listed and not items else TypeError)(
            text(
                f"weights is {weights!r}.",
                "it holds the states to differentiate",
                "pass a State, a list or a dict of them, or nothing for all parameters; "
                + _choices(params, names),
            )
        )
    bad = {
        name: w
        for name, w in named_states(weights, {}).items()
        if not isinstance(w, brainstate.ParamState) or not floating({name: w})
    }
    if bad:
        kinds = (f"{dotted(n)} (a {type(w).__name__} of {_kinds(w)})" for n, w in bad.items())
        raise ValueError(
            text(
                f"no weight: {', '.join(kinds)}.",
                "a weight is a brainstate.ParamState of floating numbers; other states change "
                "from step to step or have no gradient",
                _choices(params, map(dotted, bad)),
            )
        )
    return weights


def check_read(weights: Mapping[Any, Any], params: Any, read: Iterable[brainstate.State]) -> None:
    """Refuse weights, by name, that neither the model has nor a step function reads."""
    known = {id(s) for s in (*params.values(), *read)}
    bad = [name for name, s in weights.items() if id(s) not in known]
    if bad:
        raise ValueError(
            text(
                f"weights holds {', '.join(map(dotted, bad))}, which nothing reads.",
                "it is no parameter of the model, and step_fn does not use it: its gradient would "
                "be zero",
                _choices(params, map(dotted, bad)),
            )
        )


def _kinds(state: brainstate.State) -> str:
    return ", ".join(str(jnp.result_type(a)) for a in jax.tree.leaves(state.value)) or "nothing"


def _choices(params: Any, names: Iterable[str]) -> str:
    """What may be meant: the parameters of the model, those like the given names first."""
    known = [dotted(path) for path in floating(params)]
    near = [m for n in names for m in get_close_matches(n, known, n=1)]
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}choose among learner.param_states: {', '.join(known)}"


def states_of(weights: Any) -> tuple[list[brainstate.State], Callable[[list[Any]], Any]]:
    """The states in `weights`, and how to put values in their places."""
    if isinstance(weights, brainstate.State):
        return [weights], lambda found: found[0]
    if isinstance(weights, (list, tuple)):
        return list(weights), type(weights)
    return list(weights.values()), lambda found: dict(zip(weights, found, strict=True))


def named_states(weights: Any, paths: Mapping[Any, brainstate.State]) -> dict[Any, Any]:
    """The states in `weights` by their path; those that are no part of the model by their key."""
    known = {id(s): path for path, s in paths.items()}
    states, _ = states_of(weights)
    keys = (
        list(weights) if hasattr(weights, "keys") else [("weights", i) for i in range(len(states))]
    )
    own = [k if isinstance(k, tuple) else (k,) for k in keys]
    return {known.get(id(s), k): s for s, k in zip(states, own, strict=True)}


def leaves_of(weights: Any, tree: Any) -> list[Any]:
    """The arrays of something shaped like the values of `weights`, in the order of the states."""
    if isinstance(weights, brainstate.State):
        return jax.tree.leaves(tree)
    parts = tree if isinstance(weights, (list, tuple)) else [tree[k] for k in weights]
    return [a for part in parts for a in jax.tree.leaves(part)]


def tree_of(weights: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `leaves_of`."""
    states, rebuild = states_of(weights)
    items = iter(leaves)
    trees: list[Any] = [jax.tree.structure(s.value) for s in states]
    return rebuild([t.unflatten([next(items) for _ in range(t.num_leaves)]) for t in trees])


def write_leaves(weights: Any, leaves: Sequence[Any]) -> None:
    """Store new arrays in the states of `weights`."""
    states, _ = states_of(weights)
    items = iter(leaves)
    for s in states:
        tree: Any = jax.tree.structure(s.value)
        s.value = tree.unflatten([next(items) for _ in range(tree.num_leaves)])


def values_of(weights: Any) -> Any:
    """The values of the states in `weights`, in their places."""
    states, rebuild = states_of(weights)
    return rebuild([s.value for s in states])
