"""Checks of the arguments of sequence drivers: sequences, step functions, losses, options."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._errors import type_error, value_error
from ..program import PyTree
from ._data import MultiStepData, SingleStepData

Array = jax.Array


def length_of(sequences: tuple[PyTree, ...]) -> int:
    """The number of steps, which all sequences share."""
    wrapped = lambda node: isinstance(node, (SingleStepData, MultiStepData))
    if any(map(wrapped, jax.tree.leaves(sequences, is_leaf=wrapped))):
        raise type_error(
            "a sequence is wrapped in step data.",
            why="the driver slices the arrays itself",
            do="pass the bare arrays and wrap the slices in step_fn",
        )
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(sequences)]
    lengths = {shape[0] for shape in shapes if shape}
    if not sequences:
        what = "no sequence was passed.", "there is nothing to step through"
        do = "pass at least one array with a leading time axis"
    elif any(not jax.tree.leaves(s) for s in sequences):
        what, do = (
            ("an empty pytree in place of a sequence.", "it has no time axis"),
            "leave it out",
        )
    elif () in shapes:
        what = "a sequence holds a scalar.", "it has no time axis; a list is a pytree of scalars"
        do = "pass an array, jnp.asarray(xs); close over what all steps share in step_fn"
    elif len(lengths) > 1:
        what = (
            f"sequences of different lengths {sorted(lengths)}.",
            "they are sliced in lockstep along axis 0",
        )
        do = "bring time to axis 0 and give all the same length"
    elif lengths == {0}:
        what = "a sequence of zero steps.", "a gradient needs at least one step"
        do = "skip empty sequences"
    else:
        return int(lengths.pop())
    raise value_error(what[0], why=what[1], do=do)


def loss_of(result: PyTree, has_aux: bool) -> tuple[Array, PyTree]:
    """The loss, checked, and `aux` of what a step function returned."""
    pair = isinstance(result, (tuple, list)) and len(result) == 2
    if has_aux != pair:
        raise type_error(
            f"step_fn returned {type(result).__name__} with has_aux={has_aux}.",
            why="with has_aux it returns (loss, aux), without it the loss alone",
            do="return (loss, aux) with has_aux=True, else the loss alone",
        )
    loss, aux = result if has_aux else (result, None)
    quantity = isinstance(loss, u.Quantity)
    if quantity or loss is None or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        name = getattr(loss, "dtype", type(loss).__name__)
        kind = f"a quantity in {loss.unit}" if quantity else name
        raise type_error(
            f"the loss is {kind}.",
            why="a gradient needs a real floating number without unit",
            do="divide by a unit, take a real part, or convert to float in step_fn",
        )
    return loss, aux


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise value_error(
            f"unknown {name} {value!r}.",
            why=f"there are {', '.join(choices)}",
            do="choose one of them",
        )
