"""What a learner goes on from, as a dict of tensors for `torch.save`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from .._errors import type_error, value_error
from .._online import Carry, Online
from ._arrays import Array, copied, moved, own, places_of, tensors_of
from ._step import State

_RULE, _STEPS = "rule", "steps"


def dict_of(carry: Carry, online: Online) -> dict[str, Any]:
    """The arrays of a carry by name, as tensors of their own, with the rule that they belong to."""
    arrays = own(_named(carry), places_of(carry))
    return {_RULE: _words(online), _STEPS: int(carry.steps), **tensors_of(arrays)}


def loaded(given: Mapping[str, Any], carry: Carry, online: Online, device: torch.device) -> Carry:
    """The carry with other arrays."""
    if not isinstance(given, Mapping) or {_RULE, _STEPS} - {*given}:
        raise type_error(
            "this is no state_dict of a learner.",
            why=f"it has no entries {_RULE!r} and {_STEPS!r}",
            do="pass what learner.state_dict() returned; that of the net goes to "
            "net.load_state_dict",
        )
    tensors = {name: a for name, a in given.items() if isinstance(a, torch.Tensor)}
    places = _named(carry)
    wrong = [f"{name}: not in the dict" for name in places if name not in tensors]
    wrong += [f"{name}: only in the dict" for name in tensors if name not in places]
    if given[_RULE] != _words(online):
        wrong.insert(0, f"rule: {given[_RULE]} in the dict, {_words(online)} here")
    arrays = {name: moved(copied(a), device) for name, a in tensors.items()}
    for name in (name for name in places if name in arrays):
        new, here = _form(arrays[name]), _form(places[name])
        if new != here:
            wrong.append(f"{name}: {new} in the dict, {here} here")
    if wrong:
        raise value_error(
            "the dict belongs to another learner." + "".join(f"\n    {line}" for line in wrong),
            why="every tensor must find its place; nothing was changed",
            do="build net and learner as they were: sizes, rule, options, batch, precision",
        )
    structure = jax.tree.structure(_parts(carry))
    parts = jax.tree.unflatten(structure, [arrays[name] for name in places])
    state = State(parts["state"], parts["inside"])
    return Carry(state, parts["trace"], np.array(given[_STEPS], np.int32))


def _parts(carry: Carry) -> dict[str, Any]:
    return {"state": carry.state.given, "inside": carry.state.inside, "trace": carry.traces}


def _named(carry: Carry) -> dict[str, Array]:
    """The arrays of state and traces by the keys that lead to them."""
    found = jax.tree_util.tree_flatten_with_path(_parts(carry))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): a for path, a in found}


def _words(online: Online) -> str:
    return f"{online.rule}, window={online.window}"


def _form(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"
