"""Wrappers that say whether an argument holds one step or a sequence of steps."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from .._errors import value_error
from ..program import PyTree

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SingleStepData:
    """An argument of one step; in a window it is reused at every step."""

    data: PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class MultiStepData:
    """An argument whose leading axis counts the steps of a window."""

    data: PyTree


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a learner call without their wrappers.

    `step` are the arguments of the first step, `leaves` all arrays in the same order, `timed`
    says which of them have a leading axis of `length` steps (None: a plain step).
    """

    step: PyTree
    leaves: tuple[Array, ...]
    timed: tuple[bool, ...]
    length: int | None


def unwrap(arguments: PyTree) -> Call:
    """Separate wrappers from data; all sequences must have the same, positive length."""

    def wrapped(x: PyTree) -> bool:
        return isinstance(x, (SingleStepData, MultiStepData))

    nodes = jax.tree.leaves(arguments, is_leaf=wrapped)
    lengths = {
        x.shape[0] if getattr(x, "ndim", 0) else None
        for n in nodes
        if isinstance(n, MultiStepData)
        for x in jax.tree.leaves(n.data)
    }
    if None in lengths:
        raise value_error(
            "MultiStepData holds a scalar.",
            why="its leading axis must count the steps of the window",
            do="wrap an argument that is the same at every step in SingleStepData",
        )
    if len(lengths) > 1:
        raise value_error(
            f"sequences of different lengths in one call: {sorted(map(str, lengths))}.",
            why="all MultiStepData arguments advance in lockstep",
            do="give them the same number of steps",
        )
    length = next(iter(lengths)) if lengths else None
    if length == 0:
        raise value_error(
            "a sequence of zero steps.",
            why="a window needs at least one step",
            do="skip the call when there is nothing to learn from",
        )
    timed = [isinstance(n, MultiStepData) for n in nodes for _ in jax.tree.leaves(n)]

    def first(n: PyTree) -> PyTree:
        if isinstance(n, MultiStepData):
            return jax.tree.map(first_entry, n.data)
        return n.data if isinstance(n, SingleStepData) else n

    step = jax.tree.map(first, arguments, is_leaf=wrapped)
    return Call(step, tuple(jax.tree.leaves(arguments)), tuple(timed), length)


def first_entry(x: PyTree) -> PyTree:
    """The first entry along axis 0; of a shape, that of one entry."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return x[0]
