"""A learning rule as a value, made without a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

from ..engine import ExitCotangents, Rule
from ..graph import MOST_ENTRIES, Credit, HiddenGroup
from ._config import ETraceConfig
from ._signal import OfGroup

Groups = Sequence[HiddenGroup]
P = ParamSpec("P")


def _accept(groups: Groups, *_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True, eq=False)
class LearningRule:
    """A learning rule as a value: what `braintrace.online` runs on a step.

    The functions of `braintrace.rules` make these, for example `braintrace.rules.d_rtrl()`.

    Attributes:
        name: its name.
        config: its coordinates.
        record: the functions that the engine runs.
        crossings: operators that a trace is followed through; None keeps to paths without any.
        memory_limit: bytes that its traces may take, None for no limit.
        most_entries: entries that the Jacobian of one operator's trace may have.
        takes: keyword arguments of a call that are for the rule.
        no_windows: why it refuses windows, None if it does not.
        signal: its own signal of one hidden group, see `by_group`; None if it takes the loss's.
        values: arrays that its signal reads, the same at every step.
        options: what it was made with.
        check_groups: refuses hidden groups that do not fit the rule.
        check_call: refuses a call that does not give the rule what it needs.
    """

    name: str
    config: ETraceConfig
    record: Rule
    crossings: int | None = None
    memory_limit: int | None = None
    most_entries: int = MOST_ENTRIES
    takes: tuple[str, ...] = ()
    no_windows: str | None = None
    signal: OfGroup | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    check_groups: Callable[[Groups], None] = _accept
    check_call: Callable[[Groups, Mapping[str, Any]], None] = _accept


def stated(make: Callable[P, LearningRule]) -> Callable[P, LearningRule]:
    """A function that makes a rule, which then has its name and the options that it got."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> LearningRule:
        bound = inspect.signature(make).bind(*args, **kwargs)
        bound.apply_defaults()
        return replace(make(*args, **kwargs), name=make.__name__, options=bound.arguments)

    return made


def credit_of(record: Rule, config: ETraceConfig | None, windows: bool) -> Credit:
    """Where the cotangents of a loss meet what the rule stores."""
    replaced = config is not None and config.learning_signal != "symmetric"
    random = record.complete and record.approximates is not None
    if replaced or random or record.signal is not None:
        return Credit.OTHER
    if record.complete or windows:
        return Credit.FULL
    if config is not None and config.within_step:
        return Credit.STEP
    return {None: Credit.CUT, ExitCotangents.UNCUT: Credit.UNCUT}.get(
        record.exit_cotangents, Credit.EXITS
    )
