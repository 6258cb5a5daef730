"""What the drivers are given: sequences, masks, windows, losses and weights, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._errors import message
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
