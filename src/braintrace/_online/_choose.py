"""`braintrace.choose`: the rule for each parameter with the best gradient that one can afford."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from .._errors import value_error
from ..program import PyTree
from ..report import bytes_of, factor, size, table, write
from ..rules import rule_value
from ._assignment import Limits, Part, Rule, Tried, as_rule, best, cosine_of, is_exact, mixtures
from ._progress import ticking
from ._trial import Gradients, Trial

MOST_MIXTURES = 4  # that are measured
MOST_WINDOWS = 3  # lengths of windows of a rule that are measured
OPTIMISTIC = 3.0  # a window may take so much less than its part of BPTT's memory
SAME = 0.9  # part of the bytes of windows twice as long
NO_TRACE: Rule = "no_trace", ()
D_RTRL: Rule = "d_rtrl", ()
SNAPS: list[Rule] = [("snap", (("n", n),)) for n in (1, 2, 3)]
ABOVE: list[Rule] = [  # what the next layer remembers, in filters
    ("eprop", (("filtered", "layers"), ("kappa_filter_decay", decay))) for decay in (0.5, 0.9)
]
REPLAYED: list[Rule] = [("rolling", (("window", k),)) for k in (8, 32)]  # for streams


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule for every parameter, with what was tried to find it.

    Attributes:
        rule: what `braintrace.online` and `compile` take: rules by the names of parameters.
        best: its measurement.
        tried: all of them; the choice follows from these and the limits.
        limits: bytes, and times BPTT's.
        bptt: bytes of the working memory of BPTT, and its seconds.
        length: steps of the batch.
    """

    rule: dict[str, Any]
    best: Tried
    tried: tuple[Tried, ...]
    limits: Limits
    bptt: tuple[int, float]
    length: int

    def __str__(self) -> str:
        head = ("rule", "cosine", "working", "traces", "time", "")
        order = sorted(self.tried, key=lambda t: (bool(t.why), -t.cosine if not t.why else 0.0))
        rows = [head, *map(self._row, order)]
        allowed = f"{size(int(self.limits.memory))}, " if math.isfinite(self.limits.memory) else ""
        allowed += f"x {self.limits.time:g} of BPTT" if math.isfinite(self.limits.time) else ""
        bptt = f"BPTT over {self.length} steps: {size(self.bptt[0])}, {self.bptt[1] * 1e3:.3g} ms"
        wide = max(map(len, self.rule))
        chosen = [f"  {name:{wide}}  {label(rule)}" for name, rule in self.rule.items()]
        about = f"{bptt}. Allowed: {allowed or 'anything'}."
        return "\n".join([*table(rows), "", about, "Chosen:", *chosen])

    @property
    def summary(self) -> str:
        """The rule of each parameter in one line."""
        if len(self.rule) == 1:
            return label(self.rule["*"])
        return "; ".join(f"{name}: {label(rule)}" for name, rule in self.rule.items())

    def _row(self, t: Tried) -> tuple[str, ...]:
        rules = list(dict.fromkeys(map(label, t.rule.values())))
        name = rules[0] if len(rules) == 1 else f"mixture of {' + '.join(rules)}"
        if t.why:
            return name, "", "", "", "", t.why
        mark = "chosen" if t is self.best else "" if t.fits(self.limits) else "over the limit"
        return name, f"{t.cosine:.4f}", size(t.working), size(t.traces), f"x {factor(t.time)}", mark

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rule, and the table that it follows from, as JSON."""
        tried = [
            {**{k: getattr(t, k) for k in ("cosine", "working", "traces", "time", "why")},
             "rule": t.rule,
             "parts": {n: [p.dot, p.square, p.bytes] for n, p in t.parts.items()}}
            for t in self.tried
        ]  # fmt: skip
        about = {"rule": self.rule, "limits": [self.limits.memory, self.limits.time]}
        at = self.tried.index(self.best)
        whole = {**about, "bptt": self.bptt, "length": self.length, "best": at, "tried": tried}
        write(json.dumps(whole, indent=1), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Choice:
        """What `save` wrote."""
        read = json.loads(Path(path).read_text("utf-8"))
        spec = lambda rule: (rule[0], tuple((k, v) for k, v in rule[1]))
        tried = tuple(
            Tried(
                {name: spec(rule) for name, rule in t["rule"].items()},
                **{k: t[k] for k in ("cosine", "working", "traces", "time", "why")},
                parts={name: Part(*part) for name, part in t["parts"].items()},
            )
            for t in read["tried"]
        )
        rule = {name: (given[0], given[1]) for name, given in read["rule"].items()}
        limits, bptt = Limits(*read["limits"]), tuple(read["bptt"])
        return cls(rule, tried[read["best"]], tried, limits, bptt, read["length"])


def label(rule: Any) -> str:
    """A rule as a reader knows it: `snap(n=2), window=8`."""
    name, options = rule[0], dict(rule[1])
    window = options.pop("window", None)
    if name == "rolling":
        return str(rule_value(name, {}, window))
    given = ", ".join(f"{k}={v!r}" for k, v in options.items())
    return (f"{name}({given})" if given else name) + (f", window={window}" if window else "")


def choose(
    step: Callable[..., PyTree],
    params: PyTree,
    state: PyTree,
    xs: PyTree,
    ys: PyTree,
    loss: Callable[..., jax.Array],
    *,
    memory: int | str | None = "2GB",
    time: float | None = 3.0,
    stream: bool = False,
    keep_traces: bool = True,
    progress: bool = False,
) -> Choice:
    """The rules for the parameters of a step whose gradient is closest to BPTT's, within limits.

    Rules are measured on the batch: the cosine of the gradient to that of BPTT, its memory as XLA
    reports it, its time. What cannot be the choice is not compiled, and the table says why. A
    mixture is made of what was measured, measured itself, and chosen only if it is better than the
    best single rule that fits. The same table gives the same choice.

    A cosine belongs to weights: choose again after some updates, and train with what is close.

    Args:
        step: `step(params, state, *inputs) -> (state, out)`, as for `online`.
        params: the parameters.
        state: the initial state.
        xs: the inputs of all steps, with a leading axis of time; a tuple if there are several.
        ys: the targets, likewise.
        loss: `loss(out, y)`, of one step.
        memory: what the temporary buffers and the traces may take, such as '2GB'; None for no
            limit.
        time: what a gradient may take, in multiples of BPTT's time; None for no limit.
        stream: whether weights change at every step: adds `rolling` to the candidates.
        keep_traces: whether learning goes on after the batch, as for `grad`; if it does not, the
            traces that a rule leaves take no memory.
        progress: whether to show a progress bar (needs tqdm).

    Returns:
        The choice: `rule`, to be passed to `online` or `compile`, and the table of what was tried.

    Raises:
        ValueError: no rule fits within the limits, or these are no limits.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> step = lambda w, h, x: (0.9 * h + jnp.tanh(x @ w), h)
        >>> loss = lambda out, y: ((out - y) ** 2).sum()
        >>> xs, ys = jnp.ones((6, 3)), jnp.ones((6, 4))
        >>> w, h = jnp.ones((3, 4)), jnp.zeros(4)
        >>> choice = braintrace.choose(step, w, h, xs, ys, loss, time=None)
        >>> net = braintrace.online(step, choice.rule)
    """
    how: dict[str, Any] = {"stream": stream, "progress": progress, "how": Gradients(keep_traces)}
    return choose_for(step, params, state, xs, ys, loss, memory=memory, time=time, **how)


def choose_for(
    step: Callable[..., PyTree],
    params: PyTree,
    state: PyTree,
    xs: PyTree,
    ys: PyTree,
    loss: Callable[..., jax.Array],
    *,
    memory: int | str | None = None,
    time: float | None = 3.0,
    stream: bool = False,
    progress: bool = False,
    groups: Sequence[str] = (),
    within: Rule | None = None,
    how: Gradients | None = None,
) -> Choice:
    """`choose` for parameters that are groups of arrays, or within the memory that a rule takes."""
    limits = Limits(math.inf if memory is None else bytes_of(memory), _time_of(time))
    trial = Trial.of(step, params, state, xs, ys, loss, groups, how)
    if within is not None:
        taken = trial.measured(dict.fromkeys(trial.names, within), Limits())
        if taken.why:
            raise value_error(
                f"{label(within)} was not measured.",
                why=taken.why,
                do="pass what may be used, memory='2GB'",
            )
        limits = Limits(taken.bytes, limits.time)
    return chosen(trial, limits, stream, progress)


def chosen(trial: Trial, limits: Limits, stream: bool = False, progress: bool = False) -> Choice:
    """The choice for a step on a batch."""
    total = 2 + 2 * MOST_WINDOWS + len(SNAPS) + len(ABOVE) + len(REPLAYED) * stream + MOST_MIXTURES
    with ticking(progress, total) as tick:
        search = _Search(trial, limits, (lambda _: None) if tick is None else tick)
        search.rules(stream)
        search.mixtures()
        search.tick(total - search.ticks)  # for what was not needed
    top = best(search.tried, limits)
    if top is None:
        raise _nothing_fits(search.tried, limits)
    bptt = trial.reference.working, trial.reference.seconds
    return Choice(as_rule(top.rule), top, tuple(search.tried), limits, bptt, trial.length)


@dataclass(slots=True)
class _Search:
    """Rules are measured in an order in which most of them need not be.

    What is exact comes first; if it fits, no other rule has a better gradient. Of the windows of a
    rule only the longest that fit are wanted: their memory grows with their length, so that of one
    tells which others may fit.
    """

    trial: Trial
    limits: Limits
    tick: Callable[[int], None]
    tried: list[Tried] = field(default_factory=list)
    ticks: int = 0

    def rules(self, stream: bool) -> None:
        """Measure the rules that could be the choice, each for all parameters."""
        self._measure(NO_TRACE, Limits())  # the smallest: if it does not fit, nothing does
        self._measure(D_RTRL)
        length = self.trial.length
        longest = self._windows(NO_TRACE, [*_powers_below(length), length])
        self._windows(D_RTRL, [k for k in _powers_below(length) if k <= longest])
        for rule in SNAPS[not self.trial.cuts(D_RTRL) :]:  # without a cut the first is d_rtrl
            if self._found_exact() or not self._measure(rule).fits(self.limits):
                break
        for rule in ABOVE:
            if self._found_exact() or self._measure(rule).why:
                break
        for rule in (r for r in REPLAYED if stream and _window(r) < self.trial.length):
            self._measure(rule)
        self.tried = self.trial.timed(self.tried)

    def mixtures(self) -> None:
        """Measure the mixtures that are better than every rule that fits."""
        squares = self.trial.squares
        promising = list(mixtures(self.tried, squares, self.limits))
        for rules in promising[:MOST_MIXTURES]:
            top = best(self.tried, self.limits)
            alone = {t.uniform: t for t in self.tried}
            expected = cosine_of({p: alone[r].parts[p] for p, r in rules.items()}, squares)
            if top is None or expected > top.cosine + 1e-4:
                self.tried += self.trial.timed([self.trial.measured(rules, self.limits)])
            self._advance()

    def _measure(self, rule: Rule, limits: Limits | None = None) -> Tried:
        rules = dict.fromkeys(self.trial.names, rule)
        tried = self.trial.measured(rules, limits or self.limits)
        if rule not in ABOVE or not tried.why:  # of one layer, there is none above
            self.tried.append(tried)
        self._advance()
        return tried

    def _advance(self) -> None:
        self.ticks += 1
        self.tick(1)

    def _windows(self, rule: Rule, sizes: list[int]) -> int:
        """Measure the longest windows of a rule that fit, of these sizes; their steps, or 0."""
        length, last = self.trial.length, math.inf
        per_step = self.trial.reference.working / OPTIMISTIC / length
        for _ in range(MOST_WINDOWS):
            sizes = [k for k in sizes if k * per_step <= self.limits.memory]
            if not sizes or (sizes[-1] < length and self._found_exact()):
                return 0
            steps = sizes.pop()
            tried = self._measure((rule[0], (("window", steps),)))
            if tried.fits(self.limits):
                return steps
            if tried.why or tried.bytes > SAME * last:  # a block has the same steps, so shorter
                return 0  # windows take no less
            per_step, last = max(per_step, tried.working / 2 / steps), tried.bytes
        return 0

    def _found_exact(self) -> bool:
        return any(t.fits(self.limits) and is_exact(t) for t in self.tried)


def _powers_below(length: int) -> list[int]:
    return [1 << n for n in range(1, length.bit_length()) if 1 << n < length]


def _window(rule: Rule) -> int:
    return dict(rule[1])["window"]


def _nothing_fits(tried: list[Tried], limits: Limits) -> ValueError:
    cheapest = min(tried, key=lambda t: (bool(t.why), t.bytes))
    return value_error(
        f"no rule fits in {size(int(limits.memory))} and {limits.time:g} times BPTT's time."
        if math.isfinite(limits.memory)
        else f"no rule fits in {limits.time:g} times BPTT's time.",
        why=f"the smallest, {label(next(iter(cheapest.rule.values())))}, takes "
        f"{size(cheapest.bytes)} and {factor(cheapest.time)} times BPTT's time on this batch",
        do="allow more memory or time, or pass a smaller batch",
    )


def _time_of(time: Any) -> float:
    if time is None:
        return math.inf
    if isinstance(time, bool) or not isinstance(time, int | float) or not time > 0:
        raise value_error(
            f"time={time!r}.",
            why="it is what a gradient may take, in multiples of BPTT's time",
            do="pass a positive number such as 3.0, or None for no limit",
        )
    return float(time)
