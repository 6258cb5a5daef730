"""The rule 'auto': the fastest exact assignment that fits, else the longest windows that do.

Without data nothing is measured: exactness is read from certificates, bytes from shapes, and times
from counts of operations (`_advice`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from .._errors import dotted, value_error
from ..report import Advice, RuleCost, bytes_of, size
from ..rules import LearningRule, check_count, d_rtrl, no_trace, rule_value
from ._advice import Problem, advise, analysed
from ._blocks import nbytes

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rule may take: bytes of traces and of a window, and the steps of a sequence."""

    memory: int
    length: int | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Wanted:
        """From the options of the rule 'auto'."""
        unknown = sorted(set(options) - {"memory", "length"})
        if unknown:
            raise value_error(
                f"'auto' with {', '.join(unknown)}.",
                why="it takes what may be used, memory='2GB', and the steps of a sequence, length",
                do="leave it out, or name a rule that takes it",
            )
        length = options.get("length")
        steps = None if length is None else check_count("length", length, "steps of a sequence")
        return cls(bytes_of(options.get("memory", sys.maxsize)), steps)


def automatic(problem: Problem, wanted: Wanted) -> tuple[LearningRule, int | None]:
    """The rule of each parameter, and the steps of windows."""
    advice = advise(problem, d_rtrl())
    exact = [c for c in advice.rules if c.exact and len(c.exact) == advice.total]
    exact += _mixed(problem, advice)
    per_step = advice.window.bytes
    if wanted.length is not None:
        exact.append(replace(advice.window, bytes=per_step * wanted.length))
    fitting = [c for c in exact if c.bytes <= wanted.memory]
    if fitting:
        fastest = min(fitting, key=lambda c: (c.time, c.bytes))
        windows = fastest.rule.name == "no_trace"
        return fastest.rule, wanted.length if windows else None
    present = advice.rules[0]
    for rule, traces in ((present.rule, present.bytes), (no_trace(), 0)):
        steps = (wanted.memory - traces) // per_step
        steps = steps if wanted.length is None else min(steps, wanted.length)
        if steps >= 2:
            return rule, 1 << (int(steps).bit_length() - 1)
    raise value_error(
        f"no rule fits in {size(wanted.memory)}.",
        why=f"windows of two steps take about {size(2 * per_step)}, and no exact rule is smaller",
        do="allow more memory, make the batch smaller, or use 'no_trace' or 'pp_prop'",
    )


def _mixed(problem: Problem, advice: Advice) -> list[RuleCost]:
    """The cheapest exact rule of every parameter, if each has one and they are not all the same."""
    names = [dotted(leaf.path) for leaf in problem.step.params]
    costs = {dotted(s.parameter): s.cost for s in advice.parameters if s.cost is not None}
    if not costs or len(costs) < len(advice.parameters):
        return []
    rules = {name: costs[name].rule for name in dict.fromkeys(names) if name in costs}
    mixture = rule_value({**rules, "*": d_rtrl()}, {})
    _, shapes = analysed(problem, mixture)
    time = max(cost.time for cost in costs.values())
    everything = frozenset(leaf.path for leaf in problem.step.params)
    return [RuleCost(str(mixture), mixture, everything, nbytes(shapes), time, "")]
