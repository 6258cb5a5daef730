"""The coordinates of a rule: which Jacobian, which layout of the trace, which signal and filter."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .._errors import type_error, value_error

AXES: dict[str, dict[str, str]] = {
    "trace_factorization": {
        "per_param": "one trace entry per weight",
        "io_factorized": "two factors, of inputs and of tails",
        "paired": "two factors, paired in both orders of time",
        "random_projection": "one random outer product for all parameters",
        "kronecker": "one random product of inputs and outputs per operator",
        "everything": "the influence of every parameter on every state",
        "none": "no trace",
    },
    "temporal_recursion": {
        "jacobian": "what the step keeps of its states",
        "scalar_leak": "the number `decay`",
        "none": "nothing",
    },
    "recurrence_scope": {
        "diagonal": "paths within a unit that cross no operator",
        "coupled": "all paths that lead back to the unit",
        "sparse_n": "all paths to the units reached in `sparse_n` - 1 crossings",
    },
    "learning_signal": {
        "symmetric": "the derivative of the loss",
        "random_feedback": "the same, with random operands in the reverse pass",
        "modulatory": "a modulator that comes with the call",
        "target_projection": "a target that comes with the call, through fixed matrices",
        "local_loss": "the gradient of a loss of each group's own",
        "bootstrapped": "the derivative of the loss, and a learned guess for what has no trace",
    },
    "trace_filter": {"none": "no filter", "kappa": "a low-pass filter of decay `kappa`"},
    "update_schedule": {"per_step": "a gradient at every step"},
}
_SOON = {"update_schedule": ("window", "sequence_end")}
_PAIRS = ("io_factorized", "paired")


@dataclass(frozen=True)
class ETraceConfig:
    """A rule, as a choice on each of six axes.

    Every learner has one, `learner.config`; `braintrace.compile(model, config, x)` makes the
    learner of one. Combinations that mean nothing are refused.

    Attributes:
        trace_factorization: how the trace is laid out.
        temporal_recursion: what of the trace is carried on; for two factors a pair (inputs, tails).
        recurrence_scope: which paths between states count.
        learning_signal: what meets the trace.
        trace_filter: whether the trace is filtered once more.
        update_schedule: when there is a gradient.
        decay: number in [0, 1) of a 'scalar_leak'; for two factors a pair.
        kappa: decay in [0, 1) of the filter.
        sparse_n: order of the scope 'sparse_n'.
        window_size: reserved.
        normalized: whether the factors of tails are weighted averages; else leaky sums.
        alphas: weights of the two pairings.
    """

    trace_factorization: str = "per_param"
    temporal_recursion: Any = "jacobian"
    recurrence_scope: str = "diagonal"
    learning_signal: str = "symmetric"
    trace_filter: str = "none"
    update_schedule: str = "per_step"
    decay: Any = None
    kappa: float | None = None
    sparse_n: int | None = None
    window_size: int | None = None
    normalized: bool = True
    alphas: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._check_words()
        self._canonical()
        self._check()

    # ------------------------------------------------------------------------------ questions

    @property
    def is_factorized(self) -> bool:
        """Whether there are two factors."""
        return self.trace_factorization in _PAIRS

    @property
    def include_recurrent_mixing(self) -> bool:
        """Whether paths through operators count."""
        return self.recurrence_scope in ("coupled", "sparse_n")

    @property
    def within_step(self) -> bool:
        """Whether what is stored meets the gradient within a step only."""
        pair = self.trace_factorization == "io_factorized"
        return self.trace_factorization == "none" or (pair and self.recursion_f == "none")

    def _side(self, name: str, side: int) -> Any:
        if not self.is_factorized:
            raise AttributeError(
                f"A trace '{self.trace_factorization}' has no sides: use `{name}`."
            )
        return getattr(self, name)[side]

    recursion_x = property(lambda self: self._side("temporal_recursion", 0))
    recursion_f = property(lambda self: self._side("temporal_recursion", 1))
    decay_x = property(lambda self: self._side("decay", 0))
    decay_f = property(lambda self: self._side("decay", 1))

    def replace(self, **changes: Any) -> ETraceConfig:
        """The same with some choices changed."""
        return replace(self, **changes)

    def describe(self) -> str:
        """The layout of the trace and whatever is not the default, in one line."""
        words = [f"trace_factorization={self.trace_factorization}"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "trace_factorization" and value != f.default:
                words.append(f"{f.name}={value}")
        return ", ".join(words)

    # ----------------------------------------------------------------------------- checking

    def _check_words(self) -> None:
        for axis, choices in AXES.items():
            value = getattr(self, axis)
            chosen = value if axis == "temporal_recursion" and _is_pair(value) else (value,)
            for word in chosen:
                if word in _SOON.get(axis, ()):
                    _refuse(f"{axis}={word!r}", "it is not implemented", _legal(axis))
                if not isinstance(word, str) or word not in choices:
                    _refuse(f"{axis}={value!r}", "there is no such choice", _legal(axis))
        for name in ("decay", "kappa"):
            value = getattr(self, name)
            for number in value if _is_pair(value) else (value,):
                _check_number(name, number)
        if self.sparse_n is not None and (
            isinstance(self.sparse_n, bool) or not isinstance(self.sparse_n, (int, np.integer))
        ):
            raise type_error(
                f"sparse_n={self.sparse_n!r}.",
                why="it counts crossings",
                do="pass an integer >= 1",
            )

    def _canonical(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        if self.is_factorized:
            rule, decay = self.temporal_recursion, self.decay
            tails = rule
            if not _is_pair(rule):
                first = "scalar_leak" if rule == "jacobian" else rule
                tails = (first, "scalar_leak" if self.trace_factorization == "paired" else rule)
            if not _is_pair(decay):
                decay = (decay, decay)
            none = tuple(r == "none" or d == 0 for r, d in zip(tails, decay, strict=True))
            for r, d in zip(tails, decay, strict=True):
                if r == "none" and d not in (None, 0):
                    _refuse(f"decay={d} with the recursion 'none'", "nothing is carried on", "0")
            put(
                "temporal_recursion",
                tuple("none" if n else r for n, r in zip(none, tails, strict=True)),
            )
            put("decay", tuple(0.0 if n else d for n, d in zip(none, decay, strict=True)))
        elif self.temporal_recursion == "scalar_leak" and self.decay == 0:
            put("temporal_recursion", "none")
        if not self.is_factorized and self.temporal_recursion == "none":
            if self.decay not in (None, 0):
                _refuse(
                    f"decay={self.decay} with the recursion 'none'", "nothing is carried on", "0"
                )
            put("decay", 0.0)
        if self.trace_filter == "kappa" and self.kappa == 0:
            put("trace_filter", "none")
            put("kappa", None)
        if self.recurrence_scope == "sparse_n" and self.sparse_n == 1:
            put("recurrence_scope", "coupled")
            put("sparse_n", None)

    def _check(self) -> None:
        kind, rule = self.trace_factorization, self.temporal_recursion
        if _is_pair(rule) != self.is_factorized:
            _refuse(
                f"temporal_recursion={rule!r} with the trace {kind!r}",
                "a pair is for two factors",
                "one of 'jacobian', 'scalar_leak', 'none'",
            )
        if _is_pair(self.decay) != self.is_factorized:
            _refuse(f"decay={self.decay}", "a pair is for two factors", "one number, or None")
        carried = rule[1] if self.is_factorized else rule
        self._check_options(kind, rule, carried)
        if self.is_factorized:
            if rule[0] == "jacobian":
                _refuse(
                    "the recursion 'jacobian' of the inputs",
                    "inputs have no Jacobian between states",
                    "('scalar_leak', 'jacobian')",
                )
            if kind == "paired" and "jacobian" in rule:
                _refuse("paired factors with a Jacobian", "both of them leak", "'scalar_leak'")
            if None in self.decay:
                _refuse("two factors without decay", "each has one", "decay=0.9, or a pair")
        elif kind != "per_param":
            if rule != "jacobian" or self.decay is not None:
                _refuse(f"a recursion of the trace {kind!r}", "it has its own", "'jacobian'")
        elif rule == "jacobian" and self.decay is not None:
            _refuse("decay with 'jacobian'", "the Jacobian decays", "decay=None, or 'scalar_leak'")
        elif rule == "scalar_leak" and self.decay is None:
            _refuse("'scalar_leak' without decay", "it is the leak", "decay=0.9")

    def _check_options(self, kind: str, rule: Any, carried: str) -> None:
        for name, axis in (("kappa", "trace_filter"), ("sparse_n", "recurrence_scope")):
            chosen = getattr(self, axis) == name
            if chosen != (getattr(self, name) is not None):
                _refuse(
                    f"{axis}={getattr(self, axis)!r} with {name}={getattr(self, name)}",
                    "they belong together",
                    f"{axis}={name!r} and {name}=<number>, or neither",
                )
        if self.window_size is not None:
            _refuse("window_size", "windows are chosen with vjp_method and chunk_size", "None")
        if self.trace_filter == "kappa" and kind != "per_param":
            _refuse(
                f"a filter of the trace {kind!r}", "it filters traces of weights", "'per_param'"
            )
        if self.include_recurrent_mixing and carried != "jacobian":
            _refuse(
                f"the scope {self.recurrence_scope!r} with the recursion {carried!r}",
                "it says which part of the Jacobian is kept",
                "temporal_recursion='jacobian'",
            )
        if self.recurrence_scope == "sparse_n":
            if kind != "per_param":
                _refuse(
                    f"sparse_n with the trace {kind!r}",
                    "it widens traces of weights",
                    "'per_param'",
                )
            if self.sparse_n is not None and self.sparse_n < 2:
                _refuse(f"sparse_n={self.sparse_n}", "1 is 'coupled'", "an integer >= 2")
        if kind in ("random_projection", "kronecker", "everything") and (
            self.recurrence_scope != "coupled"
        ):
            _refuse(
                f"the trace {kind!r} with the scope {self.recurrence_scope!r}",
                "it follows all paths",
                "recurrence_scope='coupled'",
            )
        if kind in ("paired", "none") and self.include_recurrent_mixing:
            _refuse(
                f"the trace {kind!r} with the scope {self.recurrence_scope!r}",
                "it follows no path",
                "recurrence_scope='diagonal'",
            )
        replaced = self.learning_signal not in ("symmetric", "bootstrapped")
        if replaced and kind not in ("per_param", "io_factorized"):
            _refuse(
                f"the signal {self.learning_signal!r} with the trace {kind!r}",
                "it meets traces at the states",
                "'per_param' or 'io_factorized'",
            )
        self._check_signal(kind, carried)
        if (self.alphas is not None) != (kind == "paired"):
            _refuse(f"alphas={self.alphas} with the trace {kind!r}", "they weight pairings", "both")
        if not self.normalized and carried == "jacobian" and kind == "io_factorized":
            _refuse(
                "normalized=False with the recursion 'jacobian'",
                "a leaky sum leaks by a number, a Jacobian decays already",
                "temporal_recursion='scalar_leak', or normalized=True",
            )
        if not self.normalized and kind != "io_factorized":
            _refuse(
                f"normalized=False with the trace {kind!r}",
                "it is about factors",
                "'io_factorized'",
            )

    def _check_signal(self, kind: str, carried: str) -> None:
        signal, scope = self.learning_signal, self.recurrence_scope
        if signal in ("modulatory", "local_loss", "target_projection") and kind != "per_param":
            _refuse(
                f"the signal {signal!r} with the trace {kind!r}", "its learner has", "'per_param'"
            )
        plain = kind == "per_param" and carried == "jacobian" and self.trace_filter == "none"
        if signal == "target_projection" and not (plain and scope == "coupled"):
            _refuse(
                "the signal 'target_projection' with other traces",
                "its learner has traces per weight, Jacobian, no filter",
                "recurrence_scope='coupled', the rest as it is by default",
            )
        if signal == "bootstrapped" and not (plain and scope == "diagonal"):
            _refuse(
                "the signal 'bootstrapped' with other traces",
                "its learner has traces per weight, Jacobian, no filter",
                "the rest as it is by default",
            )


ETraceConfig.__module__ = "braintrace"


def check_config(
    learner: str, config: Any, default: ETraceConfig, signals: tuple[str, ...]
) -> ETraceConfig:
    """The coordinates a learner is made with, if it can have them."""
    if config is None:
        return default
    if not isinstance(config, ETraceConfig):
        raise type_error(
            f"config is a {type(config).__name__}.",
            why="it holds the coordinates of a rule",
            do="pass a braintrace.ETraceConfig",
        )
    if config.trace_factorization != default.trace_factorization:
        raise value_error(
            f"{learner} with the trace {config.trace_factorization!r}.",
            why=f"its trace is {default.trace_factorization!r}",
            do="let braintrace.compile(model, config, x) find the class",
        )
    if config.learning_signal not in signals:
        raise value_error(
            f"{learner} with the signal {config.learning_signal!r}.",
            why=f"it has {', '.join(map(repr, signals))}",
            do="let braintrace.compile(model, config, x) find the class",
        )
    return config


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, np.number)):
        raise type_error(
            f"{name}={value!r}.", why="it is a decay", do="pass a number in [0, 1), or None"
        )
    if not 0 <= float(value) < 1:
        _refuse(f"{name}={value}", "a decay outside [0, 1) does not forget", "a number in [0, 1)")


def _legal(axis: str) -> str:
    return "one of " + ", ".join(f"{k!r} ({v})" for k, v in AXES[axis].items())


def _refuse(what: str, why: str, legal: str) -> None:
    raise value_error(f"ETraceConfig: {what}.", why=why, do=f"choose {legal}")
