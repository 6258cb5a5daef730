"""Plain containers as JSON, with arrays beside it."""

from __future__ import annotations

from collections.abc import Callable

from .._errors import type_error
from ..program import PyTree


def packed(value: PyTree, put: Callable[[PyTree], PyTree]) -> PyTree:
    """A value of dicts, lists and tuples in words of JSON; `put` takes what is in them."""
    kind = type(value)
    if kind is dict:
        return {"dict": [[_key(k, put), packed(v, put)] for k, v in value.items()]}
    if kind in (list, tuple):
        return {kind.__name__: [packed(v, put) for v in value]}
    if isinstance(value, dict | list | tuple | set | frozenset):
        raise type_error(
            f"extra holds a {kind.__name__}.",
            why="a file without code can bring back plain dicts, lists and tuples only",
            do="turn it into one of these",
        )
    return {"leaf": put(value)}


def unpacked(value: PyTree, get: Callable[[PyTree], PyTree]) -> PyTree:
    """The value again; `get` undoes `put`."""
    ((kind, inside),) = value.items()
    match kind:
        case "dict":
            return {unpacked(k, get): unpacked(v, get) for k, v in inside}
        case "list":
            return [unpacked(v, get) for v in inside]
        case "tuple":
            return tuple(unpacked(v, get) for v in inside)
    return get(inside)


def _key(key: PyTree, put: Callable[[PyTree], PyTree]) -> PyTree:
    if not isinstance(key, str | int | float | tuple | None):
        raise type_error(
            f"extra has a key of type {type(key).__name__}.",
            why="keys are written as plain data",
            do="use strings, numbers or tuples of these",
        )
    return packed(key, put)
