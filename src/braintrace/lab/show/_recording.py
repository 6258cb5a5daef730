"""The record of a learner that was stepped through a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from jax import Array

from ..._errors import dotted, value_error

PyTree: TypeAlias = Any  # of arrays
Path = tuple[Any, ...]
Name = str | Path  # a path, or its keys joined by dots
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TraceRecord:
    """The eligibility trace of one parameter over time.

    Attributes:
        norm: its length after every step, over all samples, (T,).
        entries: some of its entries after every step, (T, n).
        labels: which these are: the array of the trace, and the index in it.
    """

    norm: Array
    entries: Array
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The record of a learner, step by step, by `record`. Leading axes count the steps.

    Attributes:
        length: the number of steps.
        outputs: what the learner returned.
        states: the states after each step, by path.
        groups: the paths of states that share their traces.
        traces: the eligibility traces after each step, by the path of the parameter.
        losses: the loss of each step; None without a `step_fn`.
        signals: the learning signal `∂L_t/∂h_t`, by the path of the state; empty without a
            `step_fn`.
        gradients: the length of the online gradient of each step, by the path of the parameter;
            empty without a `step_fn`.
    """

    length: int
    outputs: PyTree
    states: Mapping[Path, PyTree]
    groups: tuple[tuple[Path, ...], ...]
    traces: Mapping[Path, TraceRecord]
    losses: Array | None
    signals: Mapping[Path, Array]
    gradients: Mapping[Path, Array]


def path_of(name: Name) -> Path:
    """A path as users write it: a tuple of keys, or one name with dots."""
    return tuple(name.split(".")) if isinstance(name, str) else tuple(name)


def lookup(items: Mapping[Path, T], name: Name, kind: str, where: str = "the recording") -> T:
    """The item at a path."""
    named = {dotted(path): value for path, value in items.items()}
    keyed = {dotted(tuple(path)): value for path, value in items.items()}
    wanted = dotted(path_of(name))
    if wanted not in named and wanted not in keyed:
        raise value_error(
            f"{where} has no {kind} {wanted!r}.",
            why=f"there are {', '.join(named)}" if named else "there are none",
            do="name one of these" if named else "see braintrace.show.record for what is recorded",
        )
    return named[wanted] if wanted in named else keyed[wanted]
