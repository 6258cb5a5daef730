"""Arguments that several rules take, checked."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._errors import type_error, value_error

TraceDtype = DTypeLike | None  # None is that of the products in a trace


def check_fraction(name: str, value: Any, *, zero: bool = True) -> float:
    """A number between 0 and 1; 1 is too much, 0 is allowed with `zero`."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not (0 < float(value) < 1 or (zero and value == 0)):
        ends = "[0, 1)" if zero else "(0, 1)"
        why = f"it is the fraction of a trace that a step leaves, in {ends}"
        raise _refusal(number, name, value, why, f"pass a number in {ends}")
    return float(value)


def check_count(name: str, value: Any, what: str) -> int:
    """A positive integer."""
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not integer or value < 1:
        why = f"it counts {what}, one at least"
        raise _refusal(integer, name, value, why, "pass a positive integer")
    return int(value)


def check_axis(axis: Any) -> int | None:
    """An axis, or None."""
    integer = isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)
    if axis is not None and not integer:
        why = "it is the axis of states along which elements are one unit"
        raise _refusal(False, "couple_axis", axis, why, "pass an integer such as -1, or None")
    return None if axis is None else int(axis)


def check_limit(limit: Any) -> int | None:
    """A number of bytes, or None."""
    integer = isinstance(limit, (int, np.integer)) and not isinstance(limit, bool)
    if limit is not None and not (integer and limit >= 0):
        why = "it counts the bytes that traces may need"
        do = "pass a number of bytes such as 4 * 2**30, or None for no limit"
        raise _refusal(integer, "memory_limit", limit, why, do)
    return None if limit is None else int(limit)


def check_choice(name: str, value: Any, choices: dict[str, str]) -> None:
    """Refuse a value that is none of the choices, each with what it means."""
    if value not in choices:
        raise value_error(
            f"{name}={value!r}.",
            why="; ".join(f"{k!r}: {v}" for k, v in choices.items()),
            do=f"choose one of {', '.join(map(repr, choices))}",
        )


def decay_of(value: Any) -> float:
    """The decay that a float is, or that an integer rank stands for."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    rank = number and isinstance(value, numbers.Integral)
    if not number or not (value >= 1 if rank else 0 <= float(value) < 1):
        why = "a float is a decay, an integer a rank r, which stands for (r - 1) / (r + 1)"
        do = "pass a float in [0, 1), or an integer >= 1"
        raise _refusal(number, "decay_or_rank", value, why, do)
    return (int(value) - 1) / (int(value) + 1) if rank else float(value)


def _refusal(right_type: bool, name: str, value: Any, why: str, do: str) -> Exception:
    what = f"{name}={value}." if right_type else f"{name} has type {type(value).__name__}."
    return (value_error if right_type else type_error)(what, why=why, do=do)


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
        f"{name} has type {type(key).__name__}.",
        why="random numbers are drawn from a seed or a key",
        do="pass an integer, or a key of jax.random",
    )


def trace_type(dtype: TraceDtype) -> TraceDtype:
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
