"""A rule for every parameter, by patterns on the names that a report prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from .._errors import type_error, value_error
from ..engine import Part
from ..engine import mixture as mixture_record
from ..graph import HiddenGroup
from ._learning_rule import LearningRule, Share
from ._options import check_count

EVERY = "*"  # the pattern of the parameters that no other one is for
_FORMS = (
    "a rule is a name, a value of braintrace.rules, or a pair of one of these and its options, "
    "('d_rtrl', {'window': 8})"
)


def mixture(
    assignment: Mapping[str, Any],
    window: int | None = None,
    *,
    rule_value: Callable[[Any, dict[str, Any]], LearningRule],
) -> LearningRule:
    """One learning rule from a rule for each pattern.

    Args:
        assignment: rules by pattern; a pattern is a name ('gru'), which stands for what is in it,
            too, or has wildcards ('gru.*.weight'). '*' is for what no other pattern is for.
        window: steps per window of the rules that do not say it.
        rule_value: makes a rule of a name or value and options.
    """
    if not assignment:
        raise value_error(
            "the rule is an empty dict.",
            why="it maps names of parameters to their rules",
            do="pass {'*': 'd_rtrl'}, or the rule itself",
        )
    given: dict[str, Share] = {}
    for pattern, rule in assignment.items():
        if not isinstance(pattern, str):
            raise type_error(
                f"the pattern {pattern!r} has type {type(pattern).__name__}.",
                why="parameters are named by text, as report prints them",
                do="pass e.g. {'cell.*': 'd_rtrl', '*': 'no_trace'}",
            )
        given[pattern] = _share(pattern, rule, window, rule_value)
    if set(given) == {EVERY}:
        only = given[EVERY]
        return replace(only.rule, window=only.window or only.rule.window)
    for pattern, share in given.items():
        _check_share(pattern, share.rule)
    shares = _joined(
        [*(s for p, s in given.items() if p != EVERY), *filter(None, [given.get(EVERY)])]
    )
    sizes = {s.window: s for s in shares if s.window is not None}
    if len(sizes) > 1:
        first, second = list(sizes.values())[:2]
        raise value_error(
            f"windows of {first.window} steps for {', '.join(first.patterns)} and of "
            f"{second.window} for {', '.join(second.patterns)}.",
            why="a block is cut into windows once, and all rules that have any share them",
            do="give both the same window, or leave one out, which takes single steps",
        )
    windowed = next(iter(sizes.values()), None)
    forward = next((s for s in shares if s.rule.record.one_by_one and s.window is None), None)
    if windowed is not None and forward is not None:
        raise value_error(
            f"{forward.rule} for {', '.join(forward.patterns)} in single steps and windows of "
            f"{windowed.window} for {', '.join(windowed.patterns)}.",
            why="the first goes through the steps one by one and meets the loss at each, a window "
            "is differentiated as a whole",
            do="give both the same window, or neither",
        )
    values: dict[str, Any] = {}
    for s in shares:
        if clash := sorted(k for k, v in s.rule.values.items() if values.get(k, v) is not v):
            other = next(o for o in shares if clash[0] in o.rule.values)
            raise value_error(
                f"{other.rule.name} for {', '.join(other.patterns)} and {s.rule.name} for "
                f"{', '.join(s.patterns)} both have {', '.join(clash)}.",
                why="these arrays are passed to a step by name, and they differ",
                do="use one of the two for all these parameters",
            )
        values |= s.rule.values
    shown = ", ".join(f"{'|'.join(s.patterns)}: {s}" for s in shares)
    return LearningRule(
        "mixture",
        shares[-1].rule.config,
        mixture_record([Part(s.rule.record, s.window is not None) for s in shares]),
        takes=tuple(dict.fromkeys(name for s in shares for name in s.rule.takes)),
        values=values,
        options={p: str(s) for p, s in given.items()},
        call=f"{{{shown}}}",
        shares=tuple(shares),
        window=next(iter(sizes), None),
    )


def _share(pattern: str, rule: Any, window: int | None, rule_value: Callable) -> Share:
    """A rule, or a pair of a rule and options, for a pattern."""
    options: dict[str, Any] = {}
    if isinstance(rule, tuple):
        if len(rule) != 2 or not isinstance(rule[1], Mapping):
            raise type_error(
                f"the rule of {pattern!r} is {rule!r}.",
                why=_FORMS,
                do="write ('snap', {'n': 2, 'window': 8})",
            )
        rule, options = rule[0], dict(rule[1])
    size = options.pop("window", window)
    size = None if size is None else check_count("window", size, "steps")
    if isinstance(rule, Mapping) or (isinstance(rule, LearningRule) and rule.shares):
        raise type_error(
            f"the rule of {pattern!r} is a mixture.", why=_FORMS, do="write its rules here"
        )
    value = rule_value(rule, options, size)
    if size is not None and value.no_windows is not None:
        raise value_error(
            f"{value.name} for {pattern} has no windows (window={size}).",
            why=f"{value.no_windows}; inside a window reverse mode is the only signal",
            do="give it the window None",
        )
    return Share((pattern,), value, size)


def _check_share(pattern: str, value: LearningRule) -> None:
    """Refuse a rule that is for all parameters or none."""
    if value.record.replay is not None:
        raise value_error(
            f"{value} for {pattern} in a mixture.",
            why="it computes the losses again, at other states than the rules beside it",
            do=f"use a window: ('no_trace', {{'window': {value.window}}}); or {value.name} alone",
        )
    if value.config.filters is not None or value.rate is not None:
        raise value_error(
            f"{value} for {pattern}.",
            why="its filter stands in the step, before the read-outs, and would be there for all "
            "parameters",
            do="use it for all; or read out with nn.FilteredReadout, where d_rtrl is e-prop",
        )


def _joined(shares: Sequence[Share]) -> list[Share]:
    """Equal rules as one, so that rules over all their parameters follow them together."""
    out: dict[Any, Share] = {}
    for s in shares:
        same = (s.rule.name, repr(dict(s.rule.options)) if s.rule.call else id(s.rule), s.window)
        old = out.pop(same, None)
        out[same] = s if old is None else replace(old, patterns=(*old.patterns, *s.patterns))
    return list(out.values())


def shares_of(
    rule: LearningRule, names: Sequence[str], all_used: bool = True
) -> list[frozenset[int]]:
    """For each rule of a mixture, the numbers of its parameters among these names.

    `all_used` refuses a pattern that no name fits.
    """
    patterns = [p for s in rule.shares for p in s.patterns if p != EVERY]
    found = [[p for p in patterns if _fits(name, p)] for name in names]
    known = ", ".join(dict.fromkeys(names))
    unused = [p for p in patterns if not any(p in of for of in found)]
    if unused and all_used:
        raise value_error(
            f"no parameter is named {', '.join(map(repr, unused))}.",
            why=f"the parameters are {known}",
            do="name one of these; * stands for any text, and a name for all that is in it",
        )
    several = {name: of for name, of in zip(names, found, strict=True) if len(of) > 1}
    if several:
        listed = "; ".join(
            f"{name} by {' and '.join(map(repr, of))}" for name, of in several.items()
        )
        raise value_error(
            f"{len(several)} parameter(s) have several rules: {listed}.",
            why="each has one rule, and the order of the patterns does not count",
            do="make the patterns apart; '*' alone stands for what no other one fits",
        )
    default = next((i for i, s in enumerate(rule.shares) if EVERY in s.patterns), None)
    left = [name for name, of in zip(names, found, strict=True) if not of]
    if left and default is None:
        raise value_error(
            f"no rule for {', '.join(dict.fromkeys(left))}.",
            why=f"the patterns are {', '.join(patterns)}",
            do="add a pattern for these, or '*', which stands for what no other one fits",
        )
    of_pattern = {p: i for i, s in enumerate(rule.shares) for p in s.patterns}
    chosen = [of_pattern[of[0]] if of else default for of in found]
    return [
        frozenset(n for n, i in enumerate(chosen) if i == share)
        for share in range(len(rule.shares))
    ]


def _fits(name: str, pattern: str) -> bool:
    inside = name.startswith((f"{pattern}.", f"{pattern}["))
    return name == pattern or inside or fnmatchcase(name, pattern)


def check_calls(
    rule: LearningRule, groups: Sequence[Sequence[HiddenGroup]], extra: Mapping[str, Any]
) -> None:
    """Refuse a call that does not give a rule, or a part of a mixture, what it needs."""
    rules = [s.rule for s in rule.shares] or [rule]
    for own, of in zip(rules, groups, strict=True):
        own.check_call(of, extra)
