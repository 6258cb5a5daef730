"""Rules by name and options, as they are written on the command line, and baselines."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..._errors import type_error, unknown
from ...rules import BY_NAME, LearningRule, rule_value

BETWEEN = re.compile(r",(?![^(\[]*[)\]])")  # commas outside of brackets
Options = dict[str, Any]  # arguments of a rule by name

BPTT, REMATERIALISED, TRUNCATED = "bptt", "remat", "tbptt"
ROLLING, IMMEDIATE, AUTO = "rolling", "no_trace", "auto"
BASELINES = {
    BPTT: "back-propagation through the whole sequence",
    REMATERIALISED: "the same; only every √T-th state is stored, what is between is computed again",
    TRUNCATED: "truncated BPTT in windows one after the other; window=K, by default as much memory "
    "as D_RTRL",
    ROLLING: "truncated BPTT that ends at the present: the last window=K inputs (default 8) "
    "again, with the weights of now",
    IMMEDIATE: "the derivative of each step alone",
    AUTO: "what braintrace.choose takes for the first batch, in memory=2GB, by default that of "
    "D_RTRL, and time=3 times BPTT's",
}
NAMES = (*BASELINES, *(name for name, row in BY_NAME.items() if name == row.name not in BASELINES))
BLOCK = 8

# Options without a default, or whose default is too short for sequences of this length.
DEFAULTS: dict[str, Options] = {
    "pp_prop": {"decay_or_rank": 0.95},
    "ottt": {"leak": 0.9},
    "otpe": {"leak": 0.9},
    "r_stdp": {"post": (1, 1.0)},  # the voltage of the cell `alif`, after its adaptation
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule or a baseline, and its options."""

    label: str  # as the tables call it
    name: str
    options: Options
    window: int | None = None  # None where there is none, or it follows from memory
    block: int | None = BLOCK  # steps evaluated at once; None lets the library decide
    value: LearningRule | None = None  # a rule that has no name here, or was chosen

    @property
    def of_rule(self) -> Options:
        """What is passed with its name."""
        return self.options if self.value is None else {}


def choices_of(rules: Iterable[str | LearningRule | Mapping[str, Any]]) -> list[Choice]:
    """Rules as words or as values; a dict is a mixture."""
    choices: dict[str, Choice] = {}
    for rule in rules if not isinstance(rules, str) else [rules]:
        if isinstance(rule, Mapping):
            rule = rule_value(rule, {})
        if isinstance(rule, LearningRule):
            parsed = [Choice(rule.call, rule.name, {}, rule.window, value=rule)]
        elif isinstance(rule, str):
            parsed = parse(rule.split())
        else:
            raise type_error(
                f"a rule has type {type(rule).__name__}.",
                why="rules are words such as 'd_rtrl:window=8', values of braintrace.rules or "
                "dicts of these",
                do="pass a list of these",
            )
        choices |= {choice.label: choice for choice in parsed}
    return list(choices.values())


def parse(words: Iterable[str], block: int | None = BLOCK) -> list[Choice]:
    """Read `name`, `name:option=value,option=value` or `all`; between rules blanks or commas.

    `parameters=name:option=value,parameters=name` is a mixture. `block` is that of rules without an
    option `block`.
    """
    rules: list[str] = []
    mixtures: dict[str, Choice] = {}
    for word in words:
        if _starts_share(word):
            mixtures[word] = _mixture(word, block)
            rules.append(word)
            continue
        _read(word, rules)
    return [mixtures.get(text) or _choice(text, block) for text in dict.fromkeys(rules)]


def _read(word: str, rules: list[str]) -> None:
    """Add the rules of a word, and the options of the last one."""
    for item in (item for item in BETWEEN.split(word) if item):
        if "=" in item and ":" not in item.partition("=")[0]:
            if not rules:
                raise ValueError(f"{item!r} is an option without a rule.")
            rules[-1] += ("," if ":" in rules[-1] else ":") + item
        else:
            rules += NAMES if item == "all" else [item]


def _starts_share(item: str) -> bool:
    """Whether this is `parameters=rule`, and no option of a rule."""
    pattern, sign, rule = item.partition("=")
    name = BETWEEN.split(rule)[0].partition(":")[0].lower()
    return bool(sign) and ":" not in pattern and (name in BY_NAME or name in BASELINES)


def _mixture(word: str, block: int | None) -> Choice:
    """`parameters=rule,parameters=rule:option=value`."""
    given: dict[str, str] = {}
    for item in BETWEEN.split(word):
        if not _starts_share(item):
            last = next(reversed(given))
            given[last] += ("," if ":" in given[last] else ":") + item
            continue
        pattern, _, rule = item.partition("=")
        if pattern in given:
            raise ValueError(f"{word!r}: {pattern} has two rules.")
        given[pattern] = rule
    rules: dict[str, Any] = {}
    for pattern, text in given.items():
        choice = _choice(text, block)
        if choice.name in BASELINES and choice.name != IMMEDIATE:
            raise ValueError(f"{word!r}: {choice.name} has no traces and no part in a mixture.")
        windows = {} if choice.window is None else {"window": choice.window}
        rules[pattern] = (choice.name, {**choice.options, **windows})
    value = rule_value(rules, {})
    return Choice(word, value.name, {}, value.window, block, value)


def _choice(text: str, default: int | None) -> Choice:
    name, _, rest = text.partition(":")
    name = name.lower()
    if name not in BASELINES and name not in BY_NAME:
        raise ValueError(unknown("rule", name, NAMES))
    values: Options = {}
    for item in BETWEEN.split(rest) if rest else ():
        option, sign, value = item.partition("=")
        if not sign:
            raise ValueError(f"{text!r}: {item!r} is not option=value.")
        values[option] = _value(value)
    without = (BPTT, REMATERIALISED, IMMEDIATE, AUTO)
    window = None if name in without else _steps(text, "window", values)
    block = _steps(text, "block", values) if name not in BASELINES else None
    if name not in BASELINES and values.get("vjp_method") in ("single-step", "multi-step"):
        if values.pop("vjp_method") == "multi-step":
            window = window or 1
    _check(name, values)
    if name == ROLLING and window is None:
        text, window = f"{ROLLING}:window={BLOCK}", BLOCK
    return Choice(text, name, {**DEFAULTS.get(name, {}), **values}, window, block or default)


def _steps(text: str, option: str, values: Options) -> int | None:
    """Take a number of steps out of the options."""
    steps = values.pop(option, None)
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"{text!r}: {option}={steps!r} is not a positive whole number of steps.")
    return steps


def _check(name: str, options: Options) -> None:
    """Refuse options that the rule does not have."""
    windows = ["window"]
    own = {BPTT: [], REMATERIALISED: [], TRUNCATED: windows, ROLLING: windows, IMMEDIATE: []}
    make = BY_NAME[name].make if name in BY_NAME else None
    allowed = [] if make is None else list(inspect.signature(make).parameters)
    if name == AUTO:
        own, allowed = {AUTO: []}, ["memory", "time"]
    for option in options:
        if option not in allowed:
            names = [*own.get(name, ["window", "block"]), *allowed]
            raise ValueError(unknown(f"option of {name}", option, names))


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
