"""How the arrays of a block lie in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TimeAxes:
    """How a block is laid out in time.

    `consts` and `args` say which of these have a leading axis of `length` steps. `window` is the
    number of steps in which reverse mode is complete, None for single steps with recurrent entries
    cut. `extra` says the same of what the rule is given besides, and `names` is its structure.
    """

    length: int
    consts: tuple[bool, ...]
    args: tuple[bool, ...]
    window: int | None
    extra: tuple[bool, ...] = ()
    names: Any = None


def chosen_of(arrays: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [a for a, f in zip(arrays, flags, strict=True) if f]


def merged(arrays: Sequence[Any], flags: Sequence[bool], chosen: Sequence[Any]) -> tuple[Any, ...]:
    items = iter(chosen)
    return tuple(next(items) if f else a for a, f in zip(arrays, flags, strict=True))


def first_of(arrays: Sequence[Any], flags: Sequence[bool]) -> tuple[Any, ...]:
    return merged(arrays, flags, [a[0] for a in chosen_of(arrays, flags)])
