"""A learning rule as a value, without a model: its coordinates and the record they stand for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

from ..engine import ExitCotangents, Rule
from ..graph import MOST_ENTRIES, Credit, HiddenGroup, RateLoss
from ._config import ETraceConfig
from ._factored import factored
from ._full_influence import full_influence
from ._immediate import paired, untraced
from ._kept import leak
from ._kronecker import kronecker
from ._options import TraceDtype, key_of, trace_type
from ._per_weight import per_weight
from ._rank_one import rank_one
from ._signal import OfGroup, by_group, random_feedback, with_signal

Groups = Sequence[HiddenGroup]
P = ParamSpec("P")


def _accept(groups: Groups, *_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Share:
    """One rule of a mixture: the names of its parameters, and the steps of its windows.

    Attributes:
        patterns: names of parameters, as `fnmatch` has them.
        rule: their rule.
        window: steps in which nothing is cut, None for single steps.
    """

    patterns: tuple[str, ...]
    rule: LearningRule
    window: int | None = None

    def __str__(self) -> str:
        return f"{self.rule}" if self.window is None else f"{self.rule}, window={self.window}"


@dataclass(frozen=True, slots=True, eq=False)
class LearningRule:
    """A learning rule as a value: what `braintrace.online` runs on a step.

    The functions of `braintrace.rules` return these, for example `braintrace.rules.d_rtrl()`.

    Attributes:
        name: its name.
        config: its coordinates.
        record: the functions that the engine runs.
        crossings: operators that a trace is followed through; None keeps to paths without any.
        memory_limit: bytes that its traces may take, None for no limit.
        most_entries: entries that the Jacobian of one operator's trace may have.
        couple_axis: the axis of states along which elements are one unit, None for none.
        takes: keyword arguments of a call that are for the rule.
        no_windows: why it refuses windows, None if it does not.
        signal: its own signal of one hidden group, see `by_group`; None if it takes the loss's.
        values: arrays that its signal reads, the same at every step.
        options: the arguments of the function that returned it.
        call: that call as a user writes it, e.g. `snap(n=2)`; `str` of the rule.
        check_groups: refuses hidden groups that do not fit the rule.
        check_call: refuses a call that does not give the rule what it needs.
        shares: the rules of a mixture, each for its parameters; empty for one rule.
        window: steps of the windows that it states itself, None if it does not.
        rate: the regularisation of firing rates in its step, None for none.
    """

    name: str
    config: ETraceConfig
    record: Rule
    crossings: int | None = None
    memory_limit: int | None = None
    most_entries: int = MOST_ENTRIES
    couple_axis: int | None = None
    takes: tuple[str, ...] = ()
    no_windows: str | None = None
    signal: OfGroup | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    call: str = ""
    check_groups: Callable[[Groups], None] = _accept
    check_call: Callable[[Groups, Mapping[str, Any]], None] = _accept
    shares: tuple[Share, ...] = ()
    window: int | None = None
    rate: RateLoss | None = None

    def __str__(self) -> str:
        return self.call or self.name


def rule_of(
    config: ETraceConfig,
    *,
    key: Any = None,
    scale: float = 1.0,
    adaptive: bool = False,
    eps: float = 1e-12,
    trace_dtype: TraceDtype = None,
    most: float | None = None,
) -> Rule:
    """The record with these coordinates.

    `key` is for random operands, which have a `scale` and are added to the weights if `adaptive`,
    or signs; `eps` is added to the norms of
    random products, `most` bounds the traces.
    """
    trace_dtype = trace_type(trace_dtype)
    kind = config.trace_factorization
    if kind == "random_projection":
        return rank_one(key_of("projection_key", key), eps)
    if kind == "kronecker":
        return kronecker(key_of("key", key), eps)
    if kind == "everything":
        return full_influence()
    if kind == "none":
        return untraced()
    if kind == "paired":
        assert config.alphas is not None
        return paired(config.decay_x, config.decay_f, *config.alphas, trace_dtype)
    how: dict[str, Any] = {}
    if config.learning_signal == "random_feedback":
        how["feedback"] = random_feedback(key_of("random_feedback_key", key), scale, adaptive)
    if config.include_recurrent_mixing:
        how["exit_cotangents"] = ExitCotangents.UNCUT
    if config.is_factorized:
        x, f = config.decay
        leaky = not config.normalized  # leaky sums: the leak of the tails is their Jacobian
        if leaky or config.recursion_f == "scalar_leak":
            decay = f if leaky else 1.0
            how |= {"kept": leak(decay), "exit_cotangents": ExitCotangents.DETACHED}
        return factored(x, 1.0 if leaky else f, trace_dtype, plain=leaky, **how)
    if config.filters is not None:
        how |= {"words": "the derivative of every unit's output times its trace: it is filtered"}
    if config.temporal_recursion != "jacobian":
        how |= {"kept": leak(config.decay), "exit_cotangents": ExitCotangents.DETACHED}
    return per_weight(
        trace_dtype, kappa=config.kappa if config.trace_filter == "kappa" else 0.0, most=most, **how
    )


def crossings_of(config: ETraceConfig) -> int | None:
    """How many crossings the traces are followed through; None keeps to paths without any."""
    if config.trace_factorization not in ("per_param", "io_factorized"):
        return None
    return {"diagonal": None, "coupled": 0}.get(config.recurrence_scope, (config.sparse_n or 1) - 1)


def learning_rule(
    config: ETraceConfig, signal: OfGroup | None = None, *, how: Mapping[str, Any], **fields: Any
) -> LearningRule:
    """The value with these coordinates; `how` are arguments of `rule_of`."""
    record = rule_of(config, **how)
    if signal is not None:
        record = with_signal(record, by_group(signal))
    name, crossings = config.trace_factorization, crossings_of(config)
    return LearningRule(name, config, record, crossings, signal=signal, **fields)


def stated(make: Callable[P, LearningRule]) -> Callable[P, LearningRule]:
    """A function that returns a rule, which then has its name and options."""

    name, signature = make.__name__, inspect.signature(make)

    @functools.wraps(make)
    def rule(*args: P.args, **kwargs: P.kwargs) -> LearningRule:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _call(name, list(signature.parameters.values()), bound.arguments)
        return replace(make(*args, **kwargs), name=name, options=bound.arguments, call=call)

    return rule


def _call(name: str, parameters: list[inspect.Parameter], options: Mapping[str, Any]) -> str:
    """A call with its first argument by position, and the others that are not the default."""
    first = [p for p in parameters[:1] if p.kind is not p.KEYWORD_ONLY]
    shown = [p.name for p in parameters if p in first or repr(options[p.name]) != repr(p.default)]
    return f"{name}({', '.join(f'{k}={options[k]!r}' for k in shown)})" if shown else name


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
