"""`braintrace.choose`: the rule for each parameter with the best gradient that one can afford."""

from __future__ import annotations

import json
import math
import os
import sys
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._errors import CompilationError, NotSupportedError, dotted, type_error, value_error
from ..program import PyTree
from ..report import bytes_of, factor, size, write
from ..rules import rule_value
from ._advice import operations_of, price
from ._assignment import Limits, Part, Rule, Tried, best, cosine_of, mixtures
from ._blocks import nbytes
from ._checks import length_of
from ._learner import Carry, Online, online
from ._progress import ticking
from ._tree import split, strong

ROUNDS = 3  # timed runs of each gradient
MOST_MIXTURES = 4  # that are measured
HOPELESS = 8.0  # times what is allowed, by the count of operations: not even compiled
REFUSED = (CompilationError, NotSupportedError, ValueError, TypeError)


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
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        cells = lambda row: [c.ljust(w) for c, w in zip(row, (*widths, 0), strict=True)]
        lines = ["  ".join(cells(row)).rstrip() for row in rows]
        allowed = f"{size(int(self.limits.memory))}, " if math.isfinite(self.limits.memory) else ""
        allowed += f"x {self.limits.time:g} of BPTT" if math.isfinite(self.limits.time) else ""
        bptt = f"BPTT over {self.length} steps: {size(self.bptt[0])}, {self.bptt[1] * 1e3:.3g} ms"
        wide = max(map(len, self.rule))
        chosen = [f"  {name:{wide}}  {label(rule)}" for name, rule in self.rule.items()]
        about = f"{bptt}. Allowed: {allowed or 'anything'}."
        return "\n".join([*lines, "", about, "Chosen:", *chosen])

    def _row(self, t: Tried) -> tuple[str, ...]:
        rules = list(dict.fromkeys(map(label, t.rule.values())))
        name = rules[0] if len(rules) == 1 else f"mixture of {', '.join(rules)}"
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
    return str(rule_value(name, options)) + (f", window={window}" if window else "")


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
    progress: bool = False,
) -> Choice:
    """The rules for the parameters of a step whose gradient is closest to BPTT's, within limits.

    Every candidate is measured on the batch: the cosine of its gradient to that of BPTT, its memory
    as XLA reports it, its time. A mixture is made of what was measured, measured itself, and chosen
    only if it is better than the best single rule that fits. The same table gives the same choice.

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
    limits = Limits(math.inf if memory is None else bytes_of(memory), _time_of(time))
    job = _Job.of(step, params, state, xs, ys, loss)
    reference = job.bptt()
    candidates = list(candidates_of(job.length, stream))
    with ticking(progress, len(candidates) + MOST_MIXTURES) as tick:
        ticked = (lambda: None) if tick is None else (lambda: tick(1))
        tried = []
        for rule in candidates:
            tried.append(job.measured(dict.fromkeys(job.names, rule), limits, reference))
            ticked()
        tried = job.timed(tried, reference)
        top = best(tried, limits)
        for rules in list(mixtures(tried, reference.squares, limits))[:MOST_MIXTURES]:
            parts = {p: _alone(tried, rule).parts[p] for p, rule in rules.items()}
            if top is None or cosine_of(parts, reference.squares) > top.cosine + 1e-4:
                (mixed,) = job.timed([job.measured(rules, limits, reference)], reference)
                tried.append(mixed)
                top = best(tried, limits)
            ticked()
    if top is None:
        cheapest = min(tried, key=lambda t: (bool(t.why), t.bytes))
        raise value_error(
            f"no rule fits in {size(int(limits.memory))} and {limits.time:g} times BPTT's time."
            if math.isfinite(limits.memory)
            else f"no rule fits in {limits.time:g} times BPTT's time.",
            why=f"the smallest, {label(next(iter(cheapest.rule.values())))}, takes "
            f"{size(cheapest.bytes)} and {factor(cheapest.time)} times BPTT's time on this batch",
            do="allow more memory or time, or pass a smaller batch",
        )
    bptt = reference.working, reference.seconds
    return Choice(as_rule(top.rule), top, tuple(tried), limits, bptt, job.length)


def candidates_of(length: int, stream: bool) -> Iterator[Rule]:
    """Rules that are measured on a sequence of this length."""
    sizes = [k for k in (2, 8, 32, 128, 512) if k < length] + [length]
    yield from (("no_trace", ()), ("d_rtrl", ()))
    yield from (("snap", (("n", n),)) for n in (1, 2, 3))
    for k in sizes:
        yield "no_trace", (("window", k),)
        if k < length:
            yield "d_rtrl", (("window", k),)
    if stream:
        yield from (("rolling", (("window", k),)) for k in (8, 32) if k < length)


def as_rule(rules: Mapping[str, Rule]) -> dict[str, Any]:
    """What `online` takes: the most frequent rule is that of all others."""
    pairs = {rule: (rule[0], dict(rule[1])) for rule in rules.values()}
    if len(pairs) == 1 and next(iter(pairs))[0] == "rolling":
        return {"*": next(iter(pairs.values()))}
    count = lambda rule: sum(r == rule for r in rules.values())
    common = max(pairs, key=lambda rule: (count(rule), str(rule)))
    own = {name: pairs[rule] for name, rule in rules.items() if rule != common}
    return {**own, "*": pairs[common]}


def _alone(tried: Sequence[Tried], rule: Rule) -> Tried:
    return next(t for t in tried if t.uniform == rule)


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


@dataclass(frozen=True, slots=True)
class _Reference:
    """The gradient of BPTT, per parameter, and what it takes."""

    grads: dict[str, np.ndarray]
    working: int
    seconds: float
    program: Callable[[], Any]

    @property
    def squares(self) -> dict[str, float]:
        """Squared lengths."""
        return {name: float(np.vdot(g, g).real) for name, g in self.grads.items()}


@dataclass(frozen=True, slots=True)
class _Job:
    """A step on a batch, and the programs that were compiled for it."""

    step: Callable[..., PyTree]
    params: PyTree
    state: PyTree
    inputs: tuple[PyTree, ...]
    targets: tuple[PyTree, ...]
    loss: Callable[..., jax.Array]
    names: list[str]
    length: int
    programs: dict[str, Callable[[], Any]]

    @classmethod
    def of(
        cls,
        step: Callable[..., PyTree],
        params: PyTree,
        state: PyTree,
        xs: PyTree,
        ys: PyTree,
        loss: Callable[..., jax.Array],
    ) -> _Job:
        if not callable(loss):
            raise type_error(
                f"the loss has type {type(loss).__name__}.",
                why="it is a function loss(out, *targets), of one step",
                do="pass a function, lambda out, y: jnp.mean((out - y) ** 2)",
            )
        inputs = xs if type(xs) is tuple else (xs,)
        targets = ys if type(ys) is tuple else (ys,)
        layout, _, _ = split(params)
        paths = layout.paths("params")
        names = [dotted(paths[i]) for i in layout.trained]
        args = (step, params, state, inputs, targets, loss, names)
        return cls(*args, length_of((inputs, targets)), {})

    def bptt(self) -> _Reference:
        """The reference; it is run once to warm up."""
        layout, trained, fixed = split(self.params)

        def total(trained: list, inputs: Any, targets: Any) -> jax.Array:
            params = layout.join(trained, fixed)

            def one(at: PyTree, slices: PyTree) -> tuple[PyTree, jax.Array]:
                at, out = self.step(params, at, *slices[0])
                return at, self.loss(out, *slices[1])

            start = jax.tree.map(jax.numpy.asarray, self.state)
            return jax.lax.scan(one, start, (inputs, targets))[1].sum()

        arguments = (trained, self.inputs, self.targets)
        program = jax.jit(jax.grad(total)).lower(*arguments).compile()
        grads, seconds = _run(lambda: program(*arguments))
        return _Reference(
            dict(zip(self.names, grads, strict=True)),
            _working(program),
            seconds,
            lambda: program(*arguments),
        )

    def measured(self, rules: Mapping[str, Rule], limits: Limits, reference: _Reference) -> Tried:
        """The gradient, memory and first time of rules, or why these were not measured."""
        tried = Tried(dict(rules))
        rule = as_rule(rules)
        try:
            net = _learner(self.step, rule)
            first = jax.tree.map(lambda a: a[0], self.inputs)
            plan, _ = net._plan(self.params, jax.tree.map(strong, self.state), first)
        except REFUSED as error:
            return replace(tried, why=f"refused: {str(error).partition(chr(10))[0]}")
        traces, shapes = nbytes(plan.trace_shapes), plan.trace_shapes
        over = price(plan.graph, net.rule.record, shapes, operations_of(plan.problem))
        if traces > limits.memory:
            return replace(tried, why=f"its traces need {size(traces)}", traces=traces)
        if over > HOPELESS * limits.time:
            return replace(tried, why=f"about {factor(over)} times BPTT by its operations")
        carry = net.init(self.params, self.state, *first)
        program, arguments = self._compiled(net, carry)
        run = lambda: program(*arguments)
        grads, seconds = _run(run)
        self.programs[str(sorted(rules.items()))] = run
        parts = {}
        reports = {dotted(path): p for path, p in net.report.parameters.items()}
        for name, g in zip(self.names, grads, strict=True):
            dot = float(np.vdot(reference.grads[name], g).real)
            parts[name] = Part(dot, float(np.vdot(g, g).real), reports[name].trace_bytes)
        return replace(
            tried,
            cosine=cosine_of(parts, reference.squares),
            working=_working(program),
            traces=traces,
            time=seconds / reference.seconds,
            parts=parts if tried.uniform else {},
        )

    def _compiled(self, net: Online, carry: Carry) -> tuple[Any, tuple]:
        """The gradient of a learner from zero traces, compiled; and its arguments."""
        gradient, begun = net.grad(self.loss), np.zeros((), np.int32)

        def run(params: PyTree, state: PyTree, traces: PyTree, inputs: Any, targets: Any) -> Any:
            at = Carry(state, traces, begun)
            grads, (after, _) = gradient(params, at, inputs, *targets)
            return grads, after.traces

        layout, trained, fixed = split(self.params)
        of_trained = lambda trained, *rest: run(layout.join(trained, fixed), *rest)
        arguments = (trained, carry.state, carry.traces, self.inputs, self.targets)
        return jax.jit(of_trained).lower(*arguments).compile(), arguments

    def timed(self, tried: Sequence[Tried], reference: _Reference) -> list[Tried]:
        """The same with times, taken in turns with BPTT so that all meet the same load."""
        keys = {i: str(sorted(t.rule.items())) for i, t in enumerate(tried)}
        runs = {i: self.programs[key] for i, key in keys.items() if key in self.programs}
        seconds: dict[int, list[float]] = {i: [] for i in runs}
        base: list[float] = []
        for _ in range(ROUNDS):
            base.append(_run(reference.program)[1])
            for i, run in runs.items():
                seconds[i].append(_run(run)[1])
        ratio = lambda i: min(seconds[i]) / min(base)
        return [replace(t, time=ratio(i)) if i in runs else t for i, t in enumerate(tried)]


def _learner(step: Callable[..., PyTree], rule: dict[str, Any]) -> Online:
    """A learner whose traces may have any size: what is too large is not run."""
    (name, options), *others = rule.values()
    if not others:  # one rule is no mixture
        options = dict(options)
        window = options.pop("window", None)
        return online(step, name, window=window, memory_limit=sys.maxsize, **options)
    return online(step, rule, memory_limit=sys.maxsize)


def _run(program: Callable[[], Any]) -> tuple[list[np.ndarray], float]:
    """The gradients of a program, and the seconds that it took."""
    started = clock.perf_counter()
    out = jax.block_until_ready(program())
    seconds = clock.perf_counter() - started
    grads = out[0] if isinstance(out, tuple) else out
    return [np.asarray(g) for g in jax.tree.leaves(grads)], max(seconds, 1e-9)


def _working(program: Any) -> int:
    memory = program.memory_analysis()
    return 0 if memory is None else int(memory.temp_size_in_bytes)
