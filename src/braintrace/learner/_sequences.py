"""Checks of the sequences that a learner is driven along."""

from __future__ import annotations

import jax

from .. import _online
from .._errors import type_error, value_error
from ..program import PyTree
from ._data import MultiStepData, SingleStepData


def length_of(sequences: tuple[PyTree, ...]) -> int:
    """The number of steps, which all sequences share."""
    wrapped = lambda node: isinstance(node, (SingleStepData, MultiStepData))
    if any(map(wrapped, jax.tree.leaves(sequences, is_leaf=wrapped))):
        raise type_error(
            "a sequence is wrapped in step data.",
            why="the driver slices the arrays itself",
            do="pass the bare arrays and wrap the slices in step_fn",
        )
    if any(not jax.tree.leaves(s) for s in sequences):
        raise value_error(
            "an empty pytree in place of a sequence.", why="it has no time axis", do="leave it out"
        )
    return _online.length_of(sequences)
