"""What can be done with an analysed step and the arrays of a call, whoever holds these.

One step, a sequence, its gradient, or training along it: each is compiled once for equal options.
`online` takes its arrays from pytrees, a learner of modules from their states.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..engine import places_of
from ..program import PyTree, is_traced
from ._checks import named_errors
from ._finite import Guarded, LossWatch
from ._loop import (
    Mode,
    Options,
    Position,
    RunInfo,
    Stream,
    Updates,
    Weights,
    run_gradient,
    run_outputs,
    run_updates,
    samples_at_once,
)
from ._on_update import OnUpdate, run_reported
from ._plan import Plan
from ._sequence import Loss, bodies_of, ended, run_steps

DONATED = 4  # the argument of a compiled loop that holds the traces


@dataclass(frozen=True, slots=True)
class Call:
    """An analysed step with arrays: those of one step, or of a sequence.

    `donate` says that nobody else holds the traces, so that their memory may be reused.
    """

    plan: Plan
    weights: Weights
    at: Position
    stream: Stream
    donate: bool = False

    def _run(
        self,
        owner: Callable,
        key: Hashable,
        loop: Callable[..., PyTree],
        own: PyTree = None,
        most: Callable[[Position, Stream], int] | None = None,
    ) -> tuple[PyTree, RunInfo]:
        """Compile `loop(weights, at, stream, own)` once, and run it.

        `most` is how many samples of a `vmap` it runs for at once.
        """

        def run(weights: Weights, at: Position, stream: Stream, own: PyTree, traces: PyTree):
            return loop(weights, replace(at, traces=traces), stream, own)

        donated = DONATED if self.donate else None
        at_once: Any = None
        if most is not None:
            at_once = lambda _, at, stream, own, traces: most(replace(at, traces=traces), stream)
        call: Any = self.plan.compile(owner, (key, donated), run, donated, at_once)
        at = replace(self.at, traces=None)
        with named_errors():
            results = call(self.weights, at, self.stream, own, self.at.traces)
        reason = self._one_by_one
        return results, RunInfo(reason is None, reason, loops=call.__wrapped__.loops)

    @property
    def _one_by_one(self) -> str | None:
        """Why steps are taken one by one; None if many are at once."""
        plan, record = self.plan, self.plan.rule.record
        if plan.attach is not None:
            return f"{plan.rule.name} looks at the end of every call"
        if plan.passed is not None and plan.passed.reads_states:
            return f"what the step passes to {plan.rule.name} depends on a state"
        if record.one_by_one:
            return "a step of the rule needs the trace of the step before"
        if self.stream.mask is not None and record.per_parameter:
            return "the rule goes back through all steps of a block"
        return None

    def one(self, window: int | None) -> tuple[Position, list[Array]]:
        """One step; its results."""
        plan = self.plan

        def one(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
            arrays = jax.tree.map(lambda a: jnp.expand_dims(a, 0), stream.arrays)
            ran, at = run_steps(plan, plan.rule.record, weights, at, arrays, window, Mode())
            return at, [a[0] for a in ran.outs]

        return self._run(Call.one, window, one)[0]

    def scan(self, options: Options) -> tuple[Position, list[Array], RunInfo]:
        """The results of all steps."""
        plan = self.plan

        def run(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
            return run_outputs(bodies_of(plan, None, stream), weights, at, stream, options)

        (at, outs), info = self._run(Call.scan, options, run)
        return at, outs, info

    def gradient(
        self, owner: Callable, loss: Loss, options: Options
    ) -> tuple[list[Array], Position, PyTree, RunInfo]:
        """The gradient of the summed losses; `owner` is what it is compiled once for."""
        plan = self.plan
        options = replace(options, places=places_of(self.weights.trained))

        def run(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
            bodies = bodies_of(plan, loss, stream)
            grads, at, results = run_gradient(bodies, weights, at, stream, options)
            return grads, at if options.keep else ended(plan, at), results

        def most(at: Position, stream: Stream) -> int:
            return samples_at_once(bodies_of(plan, loss, stream), options, at, stream)

        (grads, at, results), info = self._run(owner, options, run, most=most)
        return grads, at, results, info

    def train(
        self,
        owner: Callable,
        key: Hashable,
        loss: Loss,
        options: Options,
        updates: Updates,
        own: PyTree,
        on_update: OnUpdate | None,
        watch: LossWatch,
    ) -> tuple[list[Array], PyTree, Position, PyTree, RunInfo]:
        """Change the weights every so many steps; returns them, the optimizer's state, the rest.

        `owner` and `key` are what it is compiled once for.
        """
        plan, now, infos, guards = self.plan, self, [], options.nonfinite != "warn"
        recorder: Any = options.recorder
        own = Guarded(own, jnp.zeros((), jnp.int32)) if guards else own
        options = replace(
            options,
            norms=on_update is not None,
            places=places_of(self.weights.trained),
            own_places=places_of(own),
        )

        def run(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
            bodies = bodies_of(plan, loss, stream, recorder)
            return run_updates(bodies, weights, at, stream, options, updates, own)

        def loop(stream: Stream) -> PyTree:
            nonlocal own, now
            part = replace(now, stream=stream)
            ran, info = part._run(owner, (key, updates.every, options), run, own)
            trained, own, at, results = ran
            now = replace(now, weights=replace(now.weights, trained=trained), at=at)
            infos.append(info)
            return results

        unit = updates.every if recorder is None else max(updates.every, recorder.every)
        results = run_reported(loop, self.stream, updates.every, on_update, unit)
        if not guards:
            watch.add(results[0], self.stream.mask, updates.every)
            return now.weights.trained, own, now.at, results, infos[-1]
        known = (
            None if is_traced(own.skipped) else own.skipped
        )  # a placeholder must not outlive jit
        return now.weights.trained, own.own, now.at, results, replace(infos[-1], left_out=known)
