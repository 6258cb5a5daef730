"""Which rule for which parameter: a search over measured rules, deterministic given its table.

The gradient of a parameter under a rule does not depend on the rules of the others. So one
measurement of every rule alone tells the cosine of any mixture of them: with g of each parameter by
its rule and b that of BPTT,

    cosine = sum <g, b> / (|g| |b|)        sums over the parameters of the mixture

Only what a mixture takes has to be measured. Single steps go with windows of one size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Rule = tuple[str, tuple[tuple[str, Any], ...]]  # its name and options
WHOLE = ("rolling", "eprop")  # are for all parameters or none
GAIN = 1e-4  # of cosine; less is no reason for a dearer rule


@dataclass(frozen=True, slots=True)
class Part:
    """The gradient of one parameter by a rule: beside that of BPTT, its length, its traces."""

    dot: float
    square: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Tried:
    """What was measured of a rule, or of a mixture: rules by parameter.

    Attributes:
        rule: the rule of every parameter, by its name.
        cosine: to the gradient of BPTT on the batch; NaN if it was not measured.
        working: bytes of temporary buffers, as XLA reports them.
        traces: bytes of the traces.
        time: of a gradient, in multiples of BPTT's.
        why: why it was not measured; empty if it was.
        parts: per parameter, if one rule has all of them.
    """

    rule: Mapping[str, Rule]
    cosine: float = math.nan
    working: int = 0
    traces: int = 0
    time: float = math.inf
    why: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def uniform(self) -> Rule | None:
        """The rule of all parameters, if it is one."""
        rules = set(self.rule.values())
        return next(iter(rules)) if len(rules) == 1 else None

    @property
    def bytes(self) -> int:
        """Working memory and traces."""
        return self.working + self.traces

    def fits(self, limits: Limits) -> bool:
        """Whether it was measured, and takes no more than allowed."""
        return not self.why and self.bytes <= limits.memory and self.time <= limits.time


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of working memory and traces, and time in multiples of BPTT's."""

    memory: float = math.inf
    time: float = math.inf


def as_rule(rules: Mapping[str, Rule]) -> dict[str, Any]:
    """What `online` takes: the most frequent rule is that of all others."""
    pairs = {rule: (rule[0], dict(rule[1])) for rule in rules.values()}
    count = lambda rule: sum(r == rule for r in rules.values())
    common = max(pairs, key=lambda rule: (count(rule), str(rule)))
    own = {name: pairs[rule] for name, rule in rules.items() if rule != common}
    return {**own, "*": pairs[common]}


def is_exact(tried: Tried) -> bool:
    """Whether no other gradient could be better by what counts."""
    return tried.cosine >= 1 - GAIN


def window_of(rule: Rule) -> int | None:
    """The steps of its windows."""
    return dict(rule[1]).get("window")


def best(tried: Sequence[Tried], limits: Limits) -> Tried | None:
    """The one that fits with the largest cosine; of equal ones the fastest."""
    fitting = [t for t in tried if t.fits(limits)]
    if not fitting:
        return None
    most = max(t.cosine for t in fitting)
    near = [t for t in fitting if t.cosine >= most - GAIN]
    return min(near, key=lambda t: (t.time, t.bytes, str(sorted(t.rule.items()))))


def mixtures(
    tried: Sequence[Tried], squares: Mapping[str, float], limits: Limits
) -> Iterator[dict[str, Rule]]:
    """Mixtures to measure, the most promising first.

    Args:
        tried: rules that were measured alone.
        squares: per parameter the squared length of BPTT's gradient.
        limits: what a mixture may take.
    """
    alone = [t for t in tried if t.uniform and t.parts and t.uniform[0] not in WHOLE]
    sizes = dict.fromkeys(window_of(t.uniform) for t in alone if t.uniform)
    found: dict[tuple, tuple[float, dict[str, Rule]]] = {}
    for size in sizes:
        allowed = [t for t in alone if t.uniform and window_of(t.uniform) in (None, size)]
        while len(allowed) > 1:
            mixture = _grown(allowed, squares, limits)
            if mixture is None:
                break
            rules, cosine = mixture
            if len(set(rules.values())) > 1:
                found[tuple(sorted(rules.items()))] = cosine, rules
            # Without its dearest rule it may fit where it does not with it.
            dearest = max((t for t in allowed if t.uniform in rules.values()), key=lambda t: t.time)
            allowed = [t for t in allowed if t is not dearest]
    order = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    yield from (rules for _, (_, rules) in order)


def cosine_of(rules: Mapping[str, Part], squares: Mapping[str, float]) -> float:
    """The cosine of a mixture, from the gradients of its parameters."""
    dot = sum(part.dot for part in rules.values())
    lengths = sum(part.square for part in rules.values()) * sum(squares.values())
    return dot / math.sqrt(lengths) if lengths > 0 else 0.0


def _grown(
    allowed: Sequence[Tried], squares: Mapping[str, float], limits: Limits
) -> tuple[dict[str, Rule], float] | None:
    """From the cheapest rule for all, one change after another: the best gain for its cost."""
    base = min(allowed, key=lambda t: (t.time, t.bytes))
    chosen = dict.fromkeys(squares, base)
    parts = lambda chosen: {p: t.parts[p] for p, t in chosen.items()}
    now = cosine_of(parts(chosen), squares)
    while True:
        # Parameters a, b under d_rtrl, cosine 0.80. Moves: a to snap, 0.92 for 30 % of the memory;
        # b to snap, 0.83 for 20 %. Gain for cost: 0.12 / 0.3 and 0.03 / 0.2, so a moves, and all
        # moves are looked at again from there: b may be worth it now, as the cosine is not a sum.
        moves = []
        for name in squares:
            for t in allowed:
                if t is chosen[name]:
                    continue
                new = {**chosen, name: t}
                gain = cosine_of(parts(new), squares) - now
                cost = _cost(new, limits) - _cost(chosen, limits)
                if gain > GAIN / 10 and _bytes(new) <= limits.memory:
                    moves.append((gain / max(cost, 1e-3), name, str(t.uniform), t))
        if not moves:
            break
        _, name, _, t = max(moves, key=lambda m: m[:3])
        chosen[name] = t
        now = cosine_of(parts(chosen), squares)
    rules = {p: t.uniform for p, t in chosen.items() if t.uniform is not None}
    return (rules, now) if len(rules) == len(squares) else None


def _bytes(chosen: Mapping[str, Tried]) -> int:
    """About what a mixture takes: the working memory of its dearest rule, and its own traces."""
    traces = sum(t.parts[p].bytes for p, t in chosen.items())
    return traces + max(t.working for t in chosen.values())


def _cost(chosen: Mapping[str, Tried], limits: Limits) -> float:
    """Its bytes and time, as fractions of what is allowed."""
    time = max(t.time for t in chosen.values())
    memory = limits.memory if math.isfinite(limits.memory) else 1e9
    return _bytes(chosen) / memory + time / (limits.time if math.isfinite(limits.time) else 10.0)
