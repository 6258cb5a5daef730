"""What can be done with an analysed step and the arrays of a call, whoever holds these.

One step, a sequence, its gradient, or training along it: each is compiled once for equal options.
`online` takes its arrays from pytrees, a learner of modules from their states; from there on, where
they lie, how they are run, and the progress that is shown is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..engine import check_surroundings, places_of, put
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
from ._progress import ticking
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

    def placed(self, timed: bool = True) -> Call:
        """The same with arrays where they belong on a mesh; steps may be `timed`, along axis 0."""
        places, graph, trained = self.plan.placement, self.plan.graph, self.weights.trained
        check_surroundings(places, (trained, self.at.states, self.stream.arrays.inputs))
        if places is None:
            return self
        kinds = zip(self.at.states, (graph.step.stored, graph.step.others), strict=True)
        states = tuple(tuple(put(list(a), places.states(graph, k))) for a, k in kinds)
        weights = replace(self.weights, trained=put(list(trained), places.params(graph)))
        at = replace(self.at, states=states, count=places.whole(self.at.count))
        arrays = self.stream.arrays
        arrays = put(arrays, places.arrays(graph, arrays, int(timed)))
        return replace(self, weights=weights, at=at, stream=replace(self.stream, arrays=arrays))

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
        plan, now = self.plan, self.placed(timed=False)

        def one(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
            arrays = jax.tree.map(lambda a: jnp.expand_dims(a, 0), stream.arrays)
            ran, at = run_steps(plan, plan.rule.record, weights, at, arrays, window, Mode())
            return at, [a[0] for a in ran.outs]

        return now._run(Call.one, window, one)[0]

    def scan(self, options: Options) -> tuple[Position, list[Array], RunInfo]:
        """The results of all steps."""
        plan, now = self.plan, self.placed()

        def run(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
            return run_outputs(bodies_of(plan, None, stream), weights, at, stream, options)

        (at, outs), info = now._run(Call.scan, options, run)
        return at, outs, info

    def gradient(
        self, owner: Callable, loss: Loss, options: Options, progress: bool = False
    ) -> tuple[list[Array], Position, PyTree, RunInfo]:
        """The gradient of the summed losses; `owner` is what it is compiled once for."""
        options.checked()
        plan, now = self.plan, self.placed()
        with ticking(progress, self._count(options)) as tick:
            how = replace(options, tick=tick, places=places_of(now.weights.trained))

            def run(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
                bodies = bodies_of(plan, loss, stream)
                grads, at, results = run_gradient(bodies, weights, at, stream, how)
                return grads, at if how.keep else ended(plan, at), results

            def most(at: Position, stream: Stream) -> int:
                return samples_at_once(bodies_of(plan, loss, stream), how, at, stream)

            (grads, at, results), info = now._run(owner, how, run, most=most)
        return grads, at, results, info

    def _count(self, options: Options) -> int:
        """The number of calls in a sequence."""
        return -(-self.stream.length // (options.window or 1))

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
        progress: bool = False,
    ) -> tuple[list[Array], PyTree, Position, PyTree, RunInfo]:
        """Change the weights every so many steps; returns them, the optimizer's state, the rest.

        `owner` and `key` are what it is compiled once for.
        """
        plan, now, guards = self.plan, self.placed(), options.nonfinite != "warn"
        infos: list[RunInfo] = []
        recorder: Any = options.recorder
        own = Guarded(own, jnp.zeros((), jnp.int32)) if guards else own
        options = replace(
            options,
            norms=on_update is not None,
            places=places_of(now.weights.trained),
            own_places=places_of(own),
        )

        def run(weights: Weights, at: Position, stream: Stream, own: PyTree) -> PyTree:
            bodies = bodies_of(plan, loss, stream, recorder)
            return run_updates(bodies, weights, at, stream, how, updates, own)

        def loop(stream: Stream) -> PyTree:
            nonlocal own, now
            part = replace(now, stream=stream)
            ran, info = part._run(owner, (key, updates.every, how), run, own)
            trained, own, at, results = ran
            now = replace(now, weights=replace(now.weights, trained=trained), at=at)
            infos.append(info)
            return results

        unit = updates.every if recorder is None else max(updates.every, recorder.every)
        with ticking(progress, self._count(options)) as tick:
            how = replace(options, tick=tick)
            results = run_reported(loop, now.stream, updates.every, on_update, unit)
        if not guards:
            watch.add(results[0], self.stream.mask, updates.every)
            return now.weights.trained, own, now.at, results, infos[-1]
        known = None if is_traced(own.skipped) else own.skipped  # placeholders must not outlive jit
        return now.weights.trained, own.own, now.at, results, replace(infos[-1], left_out=known)
