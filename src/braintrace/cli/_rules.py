"""Rules by name and options, as they are written on the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..learner._compile import RULES, parameters_of
from . import _names
from ._names import unknown
from ._parser import BETWEEN

Options = dict[str, Any]  # arguments of a rule by name

BPTT, TRUNCATED, IMMEDIATE = "bptt", "tbptt", "no_trace"
BASELINES = {
    BPTT: "back-propagation through the whole sequence",
    TRUNCATED: "truncated BPTT; window=K, by default as much memory as D_RTRL",
    IMMEDIATE: "the derivative of each step alone",
}
BLOCK = 8

# Options without a default, or whose default is too short for sequences of this length.
DEFAULTS: dict[str, Options] = {
    "pp_prop": {"decay_or_rank": 0.95},
    "eprop": {"kappa_filter_decay": 0.9},
    "rflo": {"random_feedback_key": 0},
    "ottt": {"leak": 0.9},
    "otpe": {"leak": 0.9},
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule or a baseline, and its options."""

    label: str  # as the tables call it
    name: str
    options: Options
    window: int | None = None  # None where there is none, or it follows from memory
    block: int | None = BLOCK  # steps evaluated at once; None lets the library decide


def parse(words: Iterable[str], block: int | None = BLOCK) -> list[Choice]:
    """Read `name`, `name:option=value,option=value` or `all`; between rules blanks or commas.

    `block` is that of rules without an option `block`.
    """
    rules: list[str] = []
    for item in (item for word in words for item in BETWEEN.split(word) if item):
        if "=" in item and ":" not in item.partition("=")[0]:
            if not rules:
                raise ValueError(f"{item!r} is an option without a rule.")
            rules[-1] += ("," if ":" in rules[-1] else ":") + item
        else:
            rules += _names.RULES if item == "all" else [item]
    return [_choice(text, block) for text in dict.fromkeys(rules)]


def _choice(text: str, default: int | None) -> Choice:
    name, _, rest = text.partition(":")
    name = name.lower()
    if name not in BASELINES and name not in RULES:
        raise ValueError(unknown("rule", name, _names.RULES))
    values: Options = {}
    for item in BETWEEN.split(rest) if rest else ():
        option, sign, value = item.partition("=")
        if not sign:
            raise ValueError(f"{text!r}: {item!r} is not option=value.")
        values[option] = _value(value)
    window = _steps(text, "window", values) if name not in (BPTT, IMMEDIATE) else None
    block = _steps(text, "block", values) if name not in BASELINES else None
    _check(name, values)
    options = {**DEFAULTS.get(name, {}), **values}
    if window is not None and name != TRUNCATED:
        options["vjp_method"] = "multi-step"
    return Choice(text, name, options, window, block or default)


def _steps(text: str, option: str, values: Options) -> int | None:
    """Take a number of steps out of the options."""
    steps = values.pop(option, None)
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"{text!r}: {option}={steps!r} is not a positive whole number of steps.")
    return steps


def _check(name: str, options: Options) -> None:
    """Refuse options that the rule does not have."""
    own = {BPTT: [], TRUNCATED: ["window"], IMMEDIATE: []}.get(name, ["window", "block"])
    takes = parameters_of(RULES[name]) if name in RULES else []
    allowed = [p.name for p in takes if p.name != "name"]
    for option in options:
        if option not in allowed:
            raise ValueError(unknown(f"option of {name}", option, [*own, *allowed]))


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
