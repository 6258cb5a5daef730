"""The coordinates of a rule: which Jacobian, which layout of the trace, which signal and filter."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

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
    "trace_filter": {
        "none": "no filter",
        "kappa": "a low-pass filter of decay `kappa`",
        "eligibility": "the same, of the unit's output's derivative times the trace",
        "layers": "the same, before operators that lead to a state: what the next layer remembers",
    },
    "update_schedule": {"per_step": "a gradient at every step"},
}
_SOON = {"update_schedule": ("window", "sequence_end")}
FILTERS = ("eligibility", "layers")  # that stand before what reads a unit
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
        kappa: decay in [0, 1) of the filter; of 'eligibility' also several, of a chain of filters,
            or 'readout', the decay of the leaky read-out.
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
    kappa: Any = None
    sparse_n: int | None = None
    window_size: int | None = None
    normalized: bool = True
    alphas: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self._check_words()
        self._canonical()
        for wrong, what, why, legal in self._refusals():
            if wrong:
                _refuse(what, why, legal)

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

    @property
    def filters(self) -> tuple[float, ...] | str | None:
        """The decays of the filters of the eligibility; 'readout' takes that of the read-out."""
        if self.trace_filter not in FILTERS:
            return None
        return self.kappa if isinstance(self.kappa, str | tuple) else (float(self.kappa),)

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
            words = value if axis == "temporal_recursion" and _is_pair(value) else (value,)
            for word in words:
                if word in _SOON.get(axis, ()):
                    _refuse(f"{axis}={word!r}", "it is not implemented", _legal(axis))
                if not isinstance(word, str) or word not in choices:
                    _refuse(f"{axis}={value!r}", "there is no such choice", _legal(axis))
        for name in ("decay", "kappa"):
            value = getattr(self, name)
            several = _is_pair(value) or isinstance(value, tuple)
            if name == "kappa" and self.trace_filter == "eligibility" and value == "readout":
                continue
            for number in value if several else (value,):
                if number is None:
                    continue
                if isinstance(number, bool) or not isinstance(number, numbers.Real):
                    raise type_error(
                        f"{name}={value!r}.", why="it is a decay", do="pass a number in [0, 1)"
                    )
                if not 0 <= float(number) < 1:
                    why = "a decay outside [0, 1) does not forget"
                    _refuse(f"{name}={value}", why, "a number in [0, 1)")
        n = self.sparse_n
        if n is not None and (isinstance(n, bool) or not isinstance(n, numbers.Integral)):
            raise type_error(
                f"sparse_n={n!r}.", why="it counts crossings", do="pass an integer >= 1"
            )

    def _canonical(self) -> None:
        """Coordinates that mean the same become equal."""
        put = lambda name, value: object.__setattr__(self, name, value)
        rule, decay, pair = self.temporal_recursion, self.decay, self.is_factorized
        if pair and not _is_pair(rule):
            first = "scalar_leak" if rule == "jacobian" else rule
            rule = first, "scalar_leak" if self.trace_factorization == "paired" else rule
        if pair and not _is_pair(decay):
            decay = decay, decay
        rules, decays = (rule, decay) if pair else ((rule,), (decay,))
        new = []
        for r, d in zip(rules, decays, strict=True):
            if r == "none" and d not in (None, 0):
                _refuse(f"decay={d} with the recursion 'none'", "nothing is carried on", "0")
            none = r == "none" or (d == 0 and (pair or r == "scalar_leak"))
            new.append(("none", 0.0) if none else (r, d))
        new_rules, new_decays = zip(*new, strict=True)
        put("temporal_recursion", new_rules if pair else new_rules[0])
        put("decay", new_decays if pair else new_decays[0])
        if isinstance(self.kappa, list):
            put("kappa", tuple(self.kappa))
        if self.trace_filter in ("kappa", *FILTERS) and self.kappa in (0, (0.0,), ()):
            put("trace_filter", "none")
            put("kappa", None)
        if self.recurrence_scope == "sparse_n" and self.sparse_n == 1:
            put("recurrence_scope", "coupled")
            put("sparse_n", None)

    def _refusals(self) -> Iterator[tuple[bool, str, str, str]]:
        """What there can be in no rule: whether it is there, what, why, and what to choose."""
        kind, rule, pair = self.trace_factorization, self.temporal_recursion, self.is_factorized
        signal, scope, decay = self.learning_signal, self.recurrence_scope, self.decay
        # fmt: off
        yield (_is_pair(rule) != pair, f"temporal_recursion={rule!r} with the trace {kind!r}",
               "a pair is for two factors", "one of 'jacobian', 'scalar_leak', 'none'")
        yield (_is_pair(decay) != pair, f"decay={decay}", "a pair is for two factors",
               "one number, or None")
        carried = rule[1] if pair else rule
        for name, axis in (("kappa", "trace_filter"), ("sparse_n", "recurrence_scope")):
            value, choice = getattr(self, name), getattr(self, axis)
            named = (name, *FILTERS) if name == "kappa" else (name,)
            yield ((choice in named) != (value is not None),
                   f"{axis}={choice!r} with {name}={value}",
                   "one needs the other", f"{axis}={name!r} and {name}=<number>, or neither")
        yield (self.window_size is not None, "window_size",
               "windows are set by vjp_method and chunk_size", "None")
        per_weight = kind == "per_param"
        yield (self.trace_filter == "kappa" and isinstance(self.kappa, tuple),
               f"trace_filter='kappa' with kappa={self.kappa}", "it filters once",
               "one number, or trace_filter='eligibility'")
        yield (self.trace_filter in FILTERS and self.temporal_recursion != "jacobian",
               f"a filter of the eligibility with the recursion {rule!r}",
               "it filters what the step keeps of its states", "temporal_recursion='jacobian'")
        yield (self.trace_filter != "none" and not per_weight, f"a filter of the trace {kind!r}",
               "it filters traces of weights", "'per_param'")
        yield (self.include_recurrent_mixing and carried != "jacobian",
               f"the scope {scope!r} with the recursion {carried!r}",
               "it says which entries of the Jacobian count", "temporal_recursion='jacobian'")
        yield (scope == "sparse_n" and not per_weight, f"sparse_n with the trace {kind!r}",
               "it widens traces of weights", "'per_param'")
        yield (self.sparse_n is not None and self.sparse_n < 2, f"sparse_n={self.sparse_n}",
               "1 is 'coupled'", "an integer >= 2")
        everywhere = kind in ("random_projection", "kronecker", "everything")
        yield (everywhere and scope != "coupled", f"the trace {kind!r} with the scope {scope!r}",
               "it follows all paths", "recurrence_scope='coupled'")
        yield (kind in ("paired", "none") and self.include_recurrent_mixing,
               f"the trace {kind!r} with the scope {scope!r}",
               "it follows no path", "recurrence_scope='diagonal'")
        replaced = signal not in ("symmetric", "bootstrapped")
        local_pairs = kind == "paired" and signal == "local_loss"
        replaced = replaced and not local_pairs
        yield (replaced and kind not in ("per_param", "io_factorized"),
               f"the signal {signal!r} with the trace {kind!r}",
               "it meets traces at the states", "'per_param' or 'io_factorized'")
        yield (replaced and signal != "random_feedback" and not per_weight,
               f"the signal {signal!r} with the trace {kind!r}", "its learner has", "'per_param'")
        plain = per_weight and carried == "jacobian" and self.trace_filter == "none"
        for name, only in (("target_projection", "coupled"), ("bootstrapped", "diagonal")):
            yield (signal == name and not (plain and scope == only),
                   f"the signal {name!r} with other traces",
                   "its learner has traces per weight, Jacobian, no filter",
                   f"recurrence_scope={only!r}, the rest as it is by default")
        yield ((self.alphas is not None) != (kind == "paired"),
               f"alphas={self.alphas} with the trace {kind!r}", "they weight pairings", "both")
        two = kind == "io_factorized"
        yield (not self.normalized and carried == "jacobian" and two,
               "normalized=False with the recursion 'jacobian'",
               "a leaky sum leaks by a number, a Jacobian decays already",
               "temporal_recursion='scalar_leak', or normalized=True")
        yield (not self.normalized and not two, f"normalized=False with the trace {kind!r}",
               "it is about factors", "'io_factorized'")
        if pair:
            yield (rule[0] == "jacobian", "the recursion 'jacobian' of the inputs",
                   "inputs have no Jacobian between states", "('scalar_leak', 'jacobian')")
            yield (kind == "paired" and "jacobian" in rule, "paired factors with a Jacobian",
                   "both of them leak", "'scalar_leak'")
            yield (None in decay, "two factors without decay", "each has one",
                   "decay=0.9, or a pair")
            return
        yield (not per_weight and (rule != "jacobian" or decay is not None),
               f"a recursion of the trace {kind!r}", "it has its own", "'jacobian'")
        yield (rule == "jacobian" and decay is not None, "decay with 'jacobian'",
               "the Jacobian decays", "decay=None, or 'scalar_leak'")
        yield (rule == "scalar_leak" and decay is None, "'scalar_leak' without decay",
               "it is the leak", "decay=0.9")
        # fmt: on


ETraceConfig.__module__ = "braintrace"


def check_config(
    learner: str, config: Any, default: ETraceConfig, signals: tuple[str, ...]
) -> ETraceConfig:
    """The coordinates of a learner, if it can have them."""
    if config is None:
        return default
    if not isinstance(config, ETraceConfig):
        raise type_error(
            f"config has type {type(config).__name__}.",
            why="it holds the coordinates of a rule",
            do="pass a braintrace.ETraceConfig",
        )
    do = "let braintrace.compile(model, config, x) find the class"
    layout, signal = config.trace_factorization, config.learning_signal
    if layout != default.trace_factorization:
        why = f"its trace is {default.trace_factorization!r}"
        raise value_error(f"{learner} with the trace {layout!r}.", why=why, do=do)
    if signal not in signals:
        why = f"it has {', '.join(map(repr, signals))}"
        raise value_error(f"{learner} with the signal {signal!r}.", why=why, do=do)
    return config


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _legal(axis: str) -> str:
    return "one of " + ", ".join(f"{k!r} ({v})" for k, v in AXES[axis].items())


def _refuse(what: str, why: str, legal: str) -> None:
    raise value_error(f"ETraceConfig: {what}.", why=why, do=f"choose {legal}")
