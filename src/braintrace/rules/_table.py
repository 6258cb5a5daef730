"""The table of rules. What a rule is called, takes, stores and stands for is read from here.

A row names the function that returns the rule; its arguments, their defaults and its docstring are
the options. `braintrace.online` and `compile`, the learner classes, the command line, and the
tables of the README and of `docs/rules.md` (by a test) follow from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._errors import meant, message, type_error
from . import _family as family
from . import _modulated as modulated
from . import _reward as reward
from ._config import ETraceConfig
from ._learning_rule import LearningRule, learning_rule
from ._mixture import mixture


@dataclass(frozen=True, slots=True)
class Row:
    """A rule, stated once."""

    name: str
    make: Callable[..., LearningRule] | None  # checks its options; None if there is a learner only
    learner: str | None  # its published class for brainstate modules
    trace: str  # what it stores, in words
    signal: str  # what meets the trace, in words
    source: str  # where it comes from
    aliases: tuple[str, ...] = ()


_LOSS = "the loss"
_OSTL = "Bohnstingl et al., *Online spatio-temporal learning in deep neural networks*, 2022"

# fmt: off
ROWS = (
    Row("d_rtrl", family.d_rtrl, "D_RTRL", "one entry per weight and state of its neuron", _LOSS,
        "diagonal RTRL: Mozer, *A focused backpropagation algorithm for temporal pattern "
        "recognition*, 1989; Zucchet et al., *Online learning of long-range dependencies*, 2023; "
        "for any model: Wang et al., *Nature Communications* 17:1745, 2026"),
    Row("pp_prop", family.pp_prop, "pp_prop", "two filtered factors: inputs, and outputs × states",
        _LOSS, "Wang et al., *Nature Communications* 17:1745, 2026", ("es_d_rtrl", "esd_rtrl")),
    Row("eprop", family.eprop, "EProp",
        "as `D_RTRL`, with another low-pass filter (κ), of the trace or of the eligibility",
        "the loss, random or adaptive feedback",
        "Bellec et al., *A solution to the learning dilemma for recurrent networks of spiking "
        "neurons*, 2020"),
    Row("rflo", family.rflo, "RFLO", "as `D_RTRL`, or with a single leak", "random feedback",
        "Murray, *Local online learning in recurrent networks with random feedback*, 2019"),
    Row("ostl_recurrent", family.ostl_recurrent, "OSTLRecurrent", "as `SnAp(1)`", _LOSS, _OSTL),
    Row("ostl_feedforward", family.ostl_feedforward, "OSTLFeedforward",
        "as `pp_prop`, with almost no memory", _LOSS, _OSTL),
    Row("ottt", family.ottt, "OTTT", "filtered inputs", _LOSS,
        "Xiao et al., *Online training through time for spiking neural networks*, 2022"),
    Row("otpe", family.otpe, "OTPE", "one entry per weight with a single leak, or two factors",
        _LOSS, "Summe et al., *Estimating post-synaptic effects for online training of "
        "feed-forward SNNs*, 2023"),
    Row("osttp", modulated.osttp, "OSTTP", "as `OSTLRecurrent`", "projected targets",
        "Ortner et al., *Online spatio-temporal learning with target projection*, 2023"),
    Row("snap", family.snap, "SnAp",
        "one entry per weight and unit reached in `n - 1` operator crossings", _LOSS,
        "Menick et al., *Practical real time recurrent learning with a sparse approximation*, "
        "2021"),
    Row("rtrl", family.rtrl, "RTRL", "parameters × states; exact for every model it accepts", _LOSS,
        "Williams and Zipser, *A learning algorithm for continually running fully recurrent "
        "neural networks*, 1989"),
    Row("three_factor", modulated.three_factor, "ThreeFactor", "as `D_RTRL`",
        "a modulator, passed with the call",
        "Frémaux and Gerstner, *Neuromodulated spike-timing-dependent plasticity, and theory of "
        "three-factor learning rules*, 2016"),
    Row("r_stdp", reward.r_stdp, None, "coincidences of inputs and outputs, which decay",
        "a modulator, passed with the call",
        "Izhikevich, *Solving the distal reward problem through linkage of STDP and dopamine "
        "signaling*, 2007"),
    Row("reward_eprop", reward.reward_eprop, None, "as `eprop(filtered='eligibility')`",
        "a modulator, passed with the call",
        "Bellec et al., *A solution to the learning dilemma for recurrent networks of spiking "
        "neurons*, 2020"),
    Row("decolle", modulated.decolle, "DECOLLE", "as `D_RTRL`", "a local loss per layer",
        "Kaiser et al., *Synaptic plasticity dynamics for deep continuous local learning*, 2020"),
    Row("stllr", family.stllr, "STLLR",
        "filtered inputs and sensitivities, causal and anti-causal pairs", _LOSS,
        "Apolinario and Roy, *S-TLLR: STDP-inspired temporal local learning rule for spiking "
        "neural networks*, 2023"),
    Row("tess", modulated.tess, None, "as `STLLR`", "a local loss per layer",
        "Apolinario, Roy and Frenkel, *TESS: a scalable temporally and spatially local learning "
        "rule for spiking neural networks*, 2025"),
    Row("rolling", family.rolling, None, "the last inputs, and the states before them", _LOSS,
        "Williams and Peng, *An efficient gradient-based algorithm for on-line training of "
        "recurrent network trajectories*, 1990"),
    # What it learns besides the model is a brainstate module.
    Row("dni", None, "DNI", "as `D_RTRL`; synthetic gradients for parameters without a trace",
        _LOSS, "Jaderberg et al., *Decoupled neural interfaces using synthetic gradients*, 2017"),
    Row("uoro", family.uoro, "UORO", "a random rank-one estimate of RTRL's: unbiased, noisy", _LOSS,
        "Tallec and Ollivier, *Unbiased online recurrent optimization*, 2018"),
    Row("kf_rtrl", family.kf_rtrl, "KFRTRL",
        "a random product per operator, an estimate of RTRL's: unbiased, less noisy", _LOSS,
        "Mujika et al., *Approximating real-time recurrent learning with random Kronecker "
        "factors*, 2018"),
    Row("no_trace", family.no_trace, "NoTrace", "none: the baseline", _LOSS, ""),
)
# fmt: on
BY_NAME = {name: row for row in ROWS for name in (row.name, *row.aliases)}
RULES = {row.name: row.make for row in ROWS if row.make is not None}


def rule_value(rule: Any, options: dict[str, Any], window: int | None = None) -> LearningRule:
    """A rule from its name and options, from its coordinates, from rules by name, or as it is.

    `window` is for the rules of a mixture that do not state one, and for rules that have one.
    """
    if isinstance(rule, Mapping):
        if options:
            raise type_error(
                f"a mixture with the options {', '.join(options)}.",
                why="they could be for any of its rules",
                do="pass them with their rule: {'cell': ('snap', {'n': 2})}",
            )
        return mixture(rule, window, rule_value=rule_value)
    if isinstance(rule, str):
        name = rule.strip().lower()
        row = BY_NAME.get(name)
        if row is None or row.make is None:
            raise ValueError(unknown_rule(rule))
        parameters = inspect.signature(row.make).parameters
        if window is not None and "window" in parameters:
            options = {"window": window, **options}
        check_options(name, list(parameters.values()), options)
        return row.make(**options)
    if not isinstance(rule, LearningRule | ETraceConfig):
        kind = rule.__name__ if isinstance(rule, type) else type(rule).__name__
        raise type_error(
            f"{kind} is not a rule.",
            why="a rule is a name, a value of braintrace.rules, a dict of these by the names of "
            "parameters, or an ETraceConfig",
            do=f"pass one of {', '.join(sorted(RULES))}",
        )
    if isinstance(rule, ETraceConfig):
        return learning_rule(rule, how=options)
    if options:
        raise type_error(
            f"{rule.name} as a value, with the options {', '.join(options)}.",
            why="a value has its options already",
            do=f"pass them to braintrace.rules.{rule.name}(...)",
        )
    return rule


def unknown_rule(name: str) -> str:
    """The message about a name that no rule has."""
    names = {n for n, row in BY_NAME.items() if row.make is not None}
    close = meant(name.strip().lower(), names)
    return message(
        f"unknown rule {name!r}.",
        why=f"the rules are {', '.join(sorted(RULES))}",
        do="choose one of them" if close is None else f"did you mean {close!r}?",
    )


def check_options(
    name: str, parameters: list[inspect.Parameter], options: dict[str, Any], where: str = ""
) -> None:
    """Refuse options that are not among the parameters of a rule, and those that are missing."""
    names = [p.name for p in parameters]
    unknown = sorted(set(options) - set(names))
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if unknown or missing:
        what = [f"unknown option(s) {', '.join(unknown)}"] if unknown else []
        what += [f"missing option(s) {', '.join(missing)}"] if missing else []
        raise type_error(
            f"{name}: {'; '.join(what)}.",
            why=f"its options are {', '.join(names) or 'none'}",
            do=f"pass these by name{where}",
        )
