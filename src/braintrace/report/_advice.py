"""Which rule makes which parameter exact, and what it costs: records and their text."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._errors import dotted, value_error
from ..graph import Path

_UNITS = {"": 1, **{f"{p}B": 1000**i for i, p in enumerate(("", "k", "M", "G", "T"))},
          **{f"{p}iB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), 1)}}  # fmt: skip

NEAR = 2.0  # times one another, estimates of time are alike


@dataclass(frozen=True, slots=True)
class RuleCost:
    """What a rule stores and computes for a model, and which parameters it learns exactly.

    Attributes:
        call: the rule as a user writes it, `snap(n=2)`.
        rule: its value, for `braintrace.online` and `braintrace.compile`.
        exact: the parameters whose gradient is that of back-propagation through time.
        bytes: of its traces; in a window, of what reverse mode keeps.
        time: of a step, relative to the present rule: estimated operations, or measured.
        why: what it follows, or why it was not analysed: then `exact` is None.
        window: steps of a window that takes the place of traces.
        measured: whether the time was measured.
    """

    call: str
    rule: Any
    exact: frozenset[Path] | None
    bytes: int
    time: float
    why: str
    window: int | None = None
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The cheapest rule that makes one parameter exact.

    Attributes:
        parameter: its path.
        cost: the rule with its bytes and time; None if there is none.
        why: in words.
    """

    parameter: Path
    cost: RuleCost | None
    why: str

    def __str__(self) -> str:
        if self.cost is None:
            return f"{dotted(self.parameter)}: none, {self.why}"
        c = self.cost
        cost = f"{size(c.bytes)}, about {factor(c.time)} times the time"
        return f"{dotted(self.parameter)}: {c.call}, {cost} ({self.why})"


@dataclass(frozen=True, slots=True)
class Advice:
    """Rules for a model with their cost, and for every parameter that is not exact the cheapest.

    Nothing is allocated: bytes and exactness come from analyses of the step for each rule. Times
    are estimates, from the operations of the step and the slots of the traces; they tell 2 from 20,
    not 2 from 3. `measured()` compiles and runs a few steps instead. It prints as a table.

    Attributes:
        rules: the present rule first, then the others.
        inexact: the parameters that the present rule does not learn exactly.
        total: how many parameters there are.
        window: back-propagation through time, one window over a whole sequence: it has no traces,
            but `bytes` for every step, an estimate.
        memory_limit: bytes that the traces may take, None for no limit.
        hints: changes of the model that let the present rule keep what it leaves out.
        seconds: what measures a step of one of the rules.
    """

    rules: tuple[RuleCost, ...]
    inexact: tuple[Path, ...]
    total: int
    window: RuleCost
    memory_limit: int | None = None
    hints: tuple[str, ...] = ()
    seconds: Callable[[RuleCost], float | None] | None = None

    def within(self, memory_limit: int | None) -> Advice:
        """The same for traces of at most so many bytes."""
        return replace(self, memory_limit=memory_limit)

    def over(self, steps: int) -> Advice:
        """The same for sequences of so many steps, with one window over each as a further rule."""
        call = f"{self.window.call}, window={steps}"
        window = replace(self.window, call=call, bytes=steps * self.window.bytes, window=steps)
        return replace(self, rules=(*self.rules, window))

    def measured(self, budget: float = 10.0) -> Advice:
        """The same with measured times, the rules that would be recommended first.

        The present rule and each next one is compiled for the shapes of the step and run for a few
        steps, until that took `budget` seconds; other times stay estimates, and the table says so.
        """
        if self.seconds is None:
            return self
        start, costs = time.perf_counter(), list(self.rules)
        unit = self.seconds(costs[0])
        if unit is None:
            return self
        costs[0] = replace(costs[0], time=1.0, measured=True)
        later = [i for i, c in enumerate(costs) if i and self.fits(c)]
        for i in sorted(later, key=lambda i: self._rank(costs[i])):
            if time.perf_counter() - start > budget:
                break
            found = self.seconds(costs[i])
            if found is not None:
                costs[i] = replace(costs[i], time=found / unit, measured=True)
        return replace(self, rules=tuple(costs))

    def fits(self, cost: RuleCost) -> bool:
        """Whether a rule was analysed and its traces are within the limit."""
        limit = self.memory_limit
        return cost.exact is not None and (limit is None or cost.bytes <= limit)

    @property
    def parameters(self) -> tuple[Suggestion, ...]:
        """For every parameter that is not exact, the rule with the smallest traces that is."""
        return tuple(map(self._suggestion, self.inexact))

    @property
    def best(self) -> RuleCost | None:
        """The fastest rule that makes all parameters exact; else the one that makes the most.

        Of traces whose estimated times are too near to tell, the smaller ones are taken.
        """
        first = min(filter(self.fits, self.rules), key=self._rank, default=None)
        if first is None or len(first.exact or ()) < self.total or first.window:
            return first
        near = lambda c: c.time <= NEAR * first.time and not (c.measured and first.measured)
        exact = (c for c in self.rules if self.fits(c) and len(c.exact or ()) == self.total)
        alike = (c for c in exact if c == first or (near(c) and not c.window))
        return min(alike, key=lambda c: c.bytes)

    def _rank(self, cost: RuleCost) -> tuple[float, ...]:
        exact = len(cost.exact or ())
        price = (cost.time, cost.bytes) if exact == self.total else _price(cost)
        return -exact, *price

    def _suggestion(self, path: Path) -> Suggestion:
        exact = sorted((c for c in self.rules if path in (c.exact or ())), key=_price)
        cost = next(filter(self.fits, exact), None)
        if not exact:
            return Suggestion(path, None, "what is left out is outside of what rules follow")
        if cost is None:
            least = f"{exact[0].call} takes {size(exact[0].bytes)}"
            return Suggestion(path, None, f"{least}, the limit is {size(self.memory_limit or 0)}")
        only = "nothing but rtrl: " if len(exact) == 1 and cost.call == "rtrl" else ""
        return Suggestion(path, cost, only + cost.why)

    def __str__(self) -> str:
        rows = [("rule", "memory", "time", "exact", "")]
        for c in self.rules:
            if c.exact is None:
                rows.append((c.call, "-", "-", "-", c.why))
                continue
            count = f"{len(c.exact)} of {self.total}"
            over = "" if self.fits(c) else "over the limit"
            about = " estimated" if self.rules[0].measured and not c.measured else ""
            rows.append((c.call, size(c.bytes), f"x {factor(c.time)}{about}", count, over))
        lines = table(rows)
        if self.inexact:
            each = [
                (dotted(s.parameter), "none" if s.cost is None else s.cost.call, s.why)
                for s in self.parameters
            ]
            head = ("not exact", "cheapest exact rule", "")
            lines += ["", *table([head, *each])]
            lines += ["", self._window()] * (self.window.rule is not self.rules[-1].rule)
        lines += ["", *(f"{hint}." for hint in self.hints)] if self.hints else []
        return "\n".join(lines)

    def _window(self) -> str:
        per_step = self.window.bytes
        largest = max((s.cost.bytes for s in self.parameters if s.cost is not None), default=0)
        limit = largest if self.memory_limit is None else self.memory_limit
        than = "these traces" if self.memory_limit is None else "the limit"
        text = (
            "One window over a whole sequence is exact for all of them, with no traces and about "
        )
        up_to = f": less than {than} up to {limit // per_step:,} steps" if limit > per_step else ""
        return f"{text}{size(per_step)} per step{up_to}."


for _record in (RuleCost, Suggestion, Advice):
    _record.__module__ = "braintrace"

Advise = Callable[[], Advice]


def _price(cost: RuleCost) -> tuple[int, float]:
    return cost.bytes, cost.time


def bytes_of(memory: int | str) -> int:
    """A number of bytes, or a text with a unit: 2GB, 500MB, 1.5GiB."""
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?([A-Za-z]*)", str(memory).strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if found is None or found[2].lower() not in units or not float(found[1]):
        raise value_error(
            f"{memory!r} is not a memory such as 2GB, 500MB or 1.5GiB",
            why="it is a number of bytes, with a unit that is kB, MB, GB, TB or KiB, MiB, GiB, TiB",
            do="pass e.g. '2GB', or a whole number of bytes",
        )
    return int(float(found[1]) * units[found[2].lower()])


def size(nbytes: int) -> str:
    """A number of bytes in the unit that fits."""
    value, units = float(nbytes), iter(("bytes", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    for larger in units:
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:.3g} {unit}"


def factor(value: float) -> str:
    """A factor in two digits: it is an estimate."""
    if value < 10:
        return f"{value:.2g}"
    return f"{round(value, 1 - math.floor(math.log10(value))):,.0f}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; the last column has any width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pairs = [zip(row, widths, strict=True) for row in rows]
    return ["  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in pairs]
