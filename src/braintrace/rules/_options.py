"""Arguments that several rules take, checked."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import message, type_error, value_error


def check_fraction(name: str, value: Any, *, zero: bool = True) -> float:
    """A number between 0 and 1; 1 is too much, 0 is allowed with `zero`."""
    ends = "[0, 1)" if zero else "(0, 1)"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(
            f"{name} is a {type(value).__name__}.",
            why="it is the fraction of a trace that a step leaves",
            do=f"pass a number in {ends}",
        )
    number = float(value)
    if not (0 < number < 1 or (zero and number == 0)):
        raise value_error(
            f"{name}={value}.",
            why=f"it is the fraction of a trace that a step leaves, in {ends}",
            do=f"pass a number in {ends}",
        )
    return number


def key_of(name: str, key: Any) -> Any:
    """A JAX key from a seed or a key."""
    if key is None:
        raise value_error(
            f"random feedback without {name}.",
            why="the random operands are drawn from it once and stay the same",
            do=f"pass {name}=0, or a key of jax.random",
        )
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return jax.random.PRNGKey(int(key))
    if isinstance(key, (jax.Array, np.ndarray)):
        return jnp.asarray(key)
    raise type_error(
        f"{name} is a {type(key).__name__}.",
        why="random numbers are drawn from a seed or a key",
        do="pass an integer, or a key of jax.random",
    )


def decay_of(value: Any) -> float:
    """The decay that a float is, or that an integer rank stands for."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(
            f"decay_or_rank is a {type(value).__name__}.",
            why="a float is a decay, an integer a rank",
            do="pass a float in [0, 1) or an integer >= 1",
        )
    if isinstance(value, numbers.Integral):
        if value < 1:
            raise value_error(
                f"decay_or_rank={value}.",
                why="an integer is a rank r, which stands for the decay (r - 1) / (r + 1)",
                do="pass an integer >= 1, or a float in [0, 1)",
            )
        return (int(value) - 1) / (int(value) + 1)
    return check_fraction("decay_or_rank", value)


def trace_type(dtype: Any) -> Any:
    """The storage type of traces, None for that of their products."""
    if dtype is None:
        return None
    try:
        floating = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype) is not None
    except TypeError:
        floating = False
    if not floating:
        raise type_error(
            f"trace_dtype={dtype!r} is not a floating type.",
            why="a trace holds derivatives",
            do="pass e.g. jnp.bfloat16 or jnp.float32",
        )
    return jnp.dtype(dtype)


def check_count(name: str, value: Any, what: str) -> int:
    """A positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise type_error(
            f"{name} is a {type(value).__name__}.",
            why=f"it counts {what}",
            do="pass a positive integer",
        )
    if value < 1:
        raise value_error(
            f"{name}={value}.",
            why=f"it counts {what}, one at least",
            do="pass a positive integer",
        )
    return int(value)


def check_limit(limit: Any) -> int | None:
    """A number of bytes, or None."""
    whole = isinstance(limit, (int, np.integer)) and not isinstance(limit, bool)
    if limit is not None and not (whole and limit >= 0):
        raise (ValueError if whole else TypeError)(
            message(
                f"memory_limit={limit!r}.",
                why="it counts the bytes that traces may need",
                do="pass a number of bytes such as 4 * 2**30, or None for no limit",
            )
        )
    return None if limit is None else int(limit)
