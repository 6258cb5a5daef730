"""A step on a batch: the gradient of BPTT, and what is measured of rules beside it."""

from __future__ import annotations

import sys
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from .._errors import CompilationError, NotSupportedError, check_takes, dotted
from ..program import PyTree
from ..report import factor, size
from ._advice import operations_of, price
from ._assignment import Limits, Part, Rule, Tried, as_rule, cosine_of
from ._blocks import LEAST_STEPS, nbytes, step_bytes
from ._checks import check_loss, length_of
from ._learner import Carry, Online, online
from ._tree import split, strong

ROUNDS = 3  # timed runs of each gradient
HOPELESS = 8.0  # times what is allowed, by the count of operations: not even compiled
OPTIMISTIC = 8.0  # a block may take so much less than is estimated
REFUSED = (CompilationError, NotSupportedError, ValueError, TypeError)


@dataclass(frozen=True, slots=True)
class Reference:
    """The gradient of BPTT, by the trained arrays, and what it takes."""

    grads: list[np.ndarray]
    working: int
    seconds: float
    program: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Gradients:
    """How gradients are asked for: arguments of `Online.grad`.

    With `block_size` windows that are longer are a block each.
    """

    keep_traces: bool = True
    block_size: int | None = None

    def of(self, net: Online, loss: Callable[..., jax.Array]) -> Callable[..., Any]:
        """The gradient of a learner."""
        size = self.block_size and max(self.block_size, net.window or 1)
        return net.grad(loss, keep_traces=self.keep_traces, block_size=size)


@dataclass(frozen=True, slots=True)
class Trial:
    """A step on a batch, its gradient by BPTT, and the programs that were compiled for it."""

    step: Callable[..., PyTree]
    params: PyTree
    state: PyTree
    inputs: tuple[PyTree, ...]
    targets: tuple[PyTree, ...]
    loss: Callable[..., jax.Array]
    arrays: list[str]  # the names of the trained arrays
    owners: list[str]  # and of the parameters that have a rule, of which an array may be a part
    length: int
    reference: Reference
    how: Gradients
    programs: dict[str, Callable[[], Any]] = field(default_factory=dict)
    found: dict[str, Tried] = field(default_factory=dict)  # of these programs
    learners: dict[Any, Online] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: Callable[..., PyTree],
        params: PyTree,
        state: PyTree,
        xs: PyTree,
        ys: PyTree,
        loss: Callable[..., jax.Array],
        groups: Sequence[str] = (),
        how: Gradients | None = None,
    ) -> Trial:
        """The gradient of BPTT is computed, once.

        `groups` are names of parameters with several arrays: all of these have one rule.
        """
        check_loss(loss)
        inputs = xs if type(xs) is tuple else (xs,)
        targets = ys if type(ys) is tuple else (ys,)
        check_takes(
            step,
            ["params", "state", *["an input"] * len(inputs)],
            "it is called as step(params, state, *inputs)",
            "pass such a function, lambda cell, h, x: (cell(x, h), h); or let `braintrace plan "
            "net.py:Net --data batch.npz` choose for a module",
            f"the step {getattr(step, '__name__', type(step).__name__)}",
        )
        layout, _, _ = split(params)
        paths = layout.paths("params")
        arrays = [dotted(paths[i]) for i in layout.trained]
        owner = lambda name: next((g for g in groups if name.startswith((f"{g}.", f"{g}["))), name)
        length = length_of((inputs, targets))
        reference = _reference(step, params, state, inputs, targets, loss)
        names = arrays, list(map(owner, arrays))
        return cls(
            step,
            params,
            state,
            inputs,
            targets,
            loss,
            *names,
            length,
            reference,
            how or Gradients(),
        )

    @property
    def names(self) -> list[str]:
        """Of the parameters, each once."""
        return list(dict.fromkeys(self.owners))

    @property
    def squares(self) -> dict[str, float]:
        """Squared lengths of BPTT's gradient, by parameter."""
        total = dict.fromkeys(self.names, 0.0)
        for name, g in zip(self.owners, self.reference.grads, strict=True):
            total[name] += float(np.vdot(g, g).real)
        return total

    def measured(self, rules: Mapping[str, Rule], limits: Limits) -> Tried:
        """The gradient, memory and first time of rules, or why these were not measured."""
        tried = Tried(dict(rules))
        if (key := _key(rules)) in self.found:
            return self.found[key]
        try:
            net = self._learner(as_rule(rules))
            first = jax.tree.map(lambda a: a[0], self.inputs)
            plan = net._plan(self.params, jax.tree.map(strong, self.state), first).plan
        except REFUSED as error:
            return replace(tried, why=f"refused: {str(error).partition(chr(10))[0]}")
        shapes = plan.trace_shapes
        traces = nbytes(shapes) if self.how.keep_traces else 0
        over = price(plan.graph, net.rule.record, shapes, operations_of(plan.problem))
        if traces > limits.memory:
            return replace(tried, why=f"its traces need {size(traces)}", traces=traces)
        block = min(LEAST_STEPS, self.length) * step_bytes(plan.graph).stored
        if block > OPTIMISTIC * limits.memory:
            return replace(tried, why=f"a block of steps needs about {size(block)}")
        if over > HOPELESS * limits.time:
            return replace(tried, why=f"about {factor(over)} times BPTT by its operations")
        program, arguments = self._compiled(net, net.init(self.params, self.state, *first))
        run = lambda: program(*arguments)
        grads, seconds = _twice(run)
        self.programs[key] = run
        parts = dict.fromkeys(self.names, Part(0.0, 0.0, 0))
        sizes = {dotted(path): p.trace_bytes for path, p in net.report.parameters.items()}
        each = zip(self.arrays, self.owners, grads, self.reference.grads, strict=True)
        for array, name, g, truth in each:
            dot, square = (float(np.vdot(a, g).real) for a in (truth, g))
            p = parts[name]
            parts[name] = Part(p.dot + dot, p.square + square, p.bytes + sizes[array])
        self.found[key] = replace(
            tried,
            cosine=cosine_of(parts, self.squares),
            working=_working(program),
            traces=traces,
            time=seconds / self.reference.seconds,
            parts=parts if tried.uniform else {},
        )
        return self.found[key]

    def cuts(self, rule: Rule) -> bool:
        """Whether the rule cuts a path from a state into an operator within a step."""
        net = self._learner(as_rule({"": rule}))
        plan = next(iter(net._plans.values()), None)
        return plan is not None and bool(plan.graph.links.cut_entries)

    def _learner(self, rule: dict[str, Any]) -> Online:
        """A learner whose traces may have any size; windows of a rule share their analysis."""
        (name, options), *others = rule.values()
        if others:
            return online(self.step, rule, memory_limit=sys.maxsize)
        options = dict(options)  # one rule is no mixture
        window = options.pop("window", None)
        net = online(self.step, name, window=window, memory_limit=sys.maxsize, **options)
        if net.rule.record.replay is None:
            same = name, repr(options), window is None
            net._plans = self.learners.setdefault(same, net)._plans
        return net

    def _compiled(self, net: Online, carry: Carry) -> tuple[Any, tuple]:
        """The gradient of a learner from zero traces, compiled; and its arguments."""
        gradient, begun = self.how.of(net, self.loss), np.zeros((), np.int32)

        def run(params: PyTree, state: PyTree, traces: PyTree, inputs: Any, targets: Any) -> Any:
            at = Carry(state, traces, begun)
            grads, (after, _) = gradient(params, at, inputs, *targets)
            return grads, after.traces if self.how.keep_traces else None

        layout, trained, fixed = split(self.params)
        of_trained = lambda trained, *rest: run(layout.join(trained, fixed), *rest)
        arguments = (trained, carry.state, carry.traces, self.inputs, self.targets)
        return jax.jit(of_trained).lower(*arguments).compile(), arguments

    def timed(self, tried: Sequence[Tried]) -> list[Tried]:
        """The same with times, taken in turns with BPTT so that all meet the same load."""
        keys = {i: _key(t.rule) for i, t in enumerate(tried)}
        runs = {i: self.programs[key] for i, key in keys.items() if key in self.programs}
        seconds: dict[int, list[float]] = {i: [] for i in runs}
        base: list[float] = []
        for _ in range(ROUNDS):
            base.append(_run(self.reference.program)[1])
            for i, run in runs.items():
                seconds[i].append(_run(run)[1])
        ratio = lambda i: min(seconds[i]) / min(base)
        return [replace(t, time=ratio(i)) if i in runs else t for i, t in enumerate(tried)]


def _key(rules: Mapping[str, Rule]) -> str:
    return str(sorted(rules.items()))


def _reference(
    step: Callable[..., PyTree],
    params: PyTree,
    state: PyTree,
    inputs: tuple[PyTree, ...],
    targets: tuple[PyTree, ...],
    loss: Callable[..., jax.Array],
) -> Reference:
    layout, trained, fixed = split(params)
    join = lambda trained: layout.join(trained, fixed)
    total = lambda trained, *along: total_loss(step, loss, join(trained), state, *along)
    arguments = (trained, inputs, targets)
    program = jax.jit(jax.grad(total)).lower(*arguments).compile()
    run = lambda: program(*arguments)
    grads, seconds = _twice(run)
    return Reference(grads, _working(program), seconds, run)


def total_loss(
    step: Callable[..., PyTree],
    loss: Callable[..., jax.Array],
    params: PyTree,
    state: PyTree,
    inputs: PyTree,
    targets: PyTree,
) -> jax.Array:
    """The sum of the losses of a sequence, by a plain loop over its steps."""

    def one(at: PyTree, slices: PyTree) -> tuple[PyTree, jax.Array]:
        at, out = step(params, at, *slices[0])
        return at, loss(out, *slices[1])

    start = jax.tree.map(jax.numpy.asarray, state)
    return jax.lax.scan(one, start, (inputs, targets))[1].sum()


def _run(program: Callable[[], Any]) -> tuple[list[np.ndarray], float]:
    """The gradients of a program, and the seconds that it took."""
    started = clock.perf_counter()
    out = jax.block_until_ready(program())
    seconds = clock.perf_counter() - started
    grads = out[0] if isinstance(out, tuple) else out
    return [np.asarray(g) for g in jax.tree.leaves(grads)], max(seconds, 1e-9)


def _twice(program: Callable[[], Any]) -> tuple[list[np.ndarray], float]:
    """The same, with the time of a second run where the first one may have waited for memory."""
    grads, seconds = _run(program)
    return grads, min(seconds, _run(program)[1])


def _working(program: Any) -> int:
    memory = program.memory_analysis()
    return 0 if memory is None else int(memory.temp_size_in_bytes)
