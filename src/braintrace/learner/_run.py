"""A learner, a step function and a sequence as one compiled loop: states in, states out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._online import (
    OnUpdate,
    Options,
    Position,
    Stream,
    Updates,
    Weights,
    run_gradient,
    run_outputs,
    run_reported,
    run_updates,
)
from ..engine import places_of
from ..frontend import (
    Split,
    StateTree,
    Traced,
    leaves_of,
    states_of,
    values_of,
    write_leaves,
    write_weights,
)
from ..program import PyTree, fingerprint, is_traced
from ._optimizers import Optimizer
from ._step import CallBody, Cells, SplitBody

Array = jax.Array
Cell = tuple[brainstate.State, int]  # one array of a state
NOT_COUNTED = np.zeros((), np.int32)


@dataclass(frozen=True, eq=False, slots=True)
class SequenceRun:
    """A step function over a sequence, and the states that it reads and writes.

    `bodies` are by the size of a window; `split` says that many of their calls may be evaluated at
    once, the traces being apart from other states.
    """

    learner: Any
    weights: StateTree
    stream: Stream
    window: int | None
    bodies: Mapping[int | None, SplitBody | CallBody]
    states: list[Cell]
    cells: Cells
    split: bool

    def outputs(self, options: Options) -> PyTree:
        """What the step function returns, along time; the states move on."""
        run = lambda *loop, own: (None, *run_outputs(*loop))
        return self._call("outputs", options, run)[1]

    def gradient(self, options: Options) -> tuple[list[Array], Any]:
        """The gradients by all arrays of the weights, and what the step function returns."""
        return self._call("gradient", options, lambda *loop, own: run_gradient(*loop))

    def train(
        self, options: Options, optimizer: Optimizer, every: int, on_update: OnUpdate | None
    ) -> PyTree:
        """Update the weights every so many steps; returns what the step function returns."""
        changed = {cell: j for j, cell in enumerate(self.cells.changed)}
        both = [(k, changed[i]) for k, i in enumerate(self.cells.trained) if i in changed]

        def run(bodies, weights, at, stream, options, own):
            own, consts = own

            def update(grads, trained, own, at):
                old, states = list(trained), list(at.states)
                for k, j in both:  # a weight that the step function changes, too
                    old[k] = states[j]
                new, own = optimizer(consts, grads, old, own)
                for k, j in both:
                    states[j] = new[k]
                return new, own, replace(at, states=states)

            updates = Updates(update, every)
            trained, own, at, results = run_updates(
                bodies, weights, at, stream, options, updates, own
            )
            return (trained, own), at, results

        key = ("train", every, fingerprint(optimizer.program, optimizer.consts))
        own = self._whole(optimizer.own)

        def loop(stream: Stream) -> PyTree:
            nonlocal own
            steps, arrays = replace(self, stream=stream), (own, optimizer.consts)
            at = replace(options, own_places=places_of(own))
            (trained, own), results = steps._call(key, at, run, arrays)
            write_weights(self.weights, trained)
            optimizer.write(own)
            return results

        results = run_reported(loop, self.stream, every, on_update)
        self.learner._losses.add(results[0], self.stream.mask, every)
        return results

    def _call(
        self, key: Hashable, options: Options, run: Callable[..., PyTree], own: PyTree = ()
    ) -> tuple[PyTree, PyTree]:
        """Compile the loop once for all that it depends on, and run it on the present arrays."""
        learner, bodies = self.learner, self.bodies
        fresh = self.split and is_fresh(learner)
        trained = leaves_of(self.weights, values_of(self.weights))
        places = places_of(trained)
        options = replace(
            options, window=self.window, fresh=fresh, places=places, per_call=self._per_call()
        )

        def loop(trained, fixed, states, count, stream, own, traces):
            at = Position(states, traces, count)
            return run(bodies.__getitem__, Weights(trained, fixed), at, stream, options, own=own)

        etraces = list(learner.etraces.values()) if self.split else []
        if self.split:
            keys = (body.key for body in bodies.values() if isinstance(body, SplitBody))
            # A write may be refused inside of a transformation: the traces must outlive the loop.
            mapped = any(map(is_traced, jax.tree.leaves(self.stream)))
            donated = 6 if only_ours(etraces) and not mapped else None
            compiled = learner.executor.compiled((key, options, *keys), loop, donated)
        else:  # a program of real calls has no fingerprint that is cheap
            compiled = jax.jit(loop)
        values = [jax.tree.leaves(state.value)[i] for state, i in self.states]
        states = [values[i] for i in self.cells.changed]
        away = {*self.cells.changed, *self.cells.trained}
        fixed = {
            "consts": [body.traced.consts for body in bodies.values()],
            "cells": [None if i in away else value for i, value in enumerate(values)],
        }
        count = learner.running_index.value if self.split else NOT_COUNTED
        computed, at, results = compiled(
            trained,
            fixed,
            states,
            self._whole(jnp.asarray(count)),
            self.stream,
            own,
            [t.value for t in etraces],
        )
        if self.split:
            learner.last_run = replace(learner.last_run, loops=compiled.__wrapped__.loops)
        write_leaves([self.states[i] for i in self.cells.changed], at.states)
        for state, value in zip(etraces, at.traces, strict=True):
            state.value = value
        if self.split:
            learner.running_index.value = at.count
        return computed, results

    def _whole(self, tree: PyTree) -> PyTree:
        placement = self.learner.placement
        return tree if placement is None else placement.whole(tree)

    def _per_call(self) -> frozenset[int]:
        """Results of a window without an axis of its steps."""
        return frozenset(
            i
            for size, body in self.bodies.items()
            for i, atom in enumerate(body.traced.results)
            if size is not None and atom.shape[:1] != (size,)
        )


def sequence_run(
    learner: Any,
    weights: StateTree,
    stream: Stream,
    window: int | None,
    traced: Mapping[int | None, Traced],
    splits: Mapping[int | None, Split] | None,
    one_by_one: bool,
) -> SequenceRun:
    """The run of a sequence, from the traced step functions of all windows.

    Without `splits` these make real calls, and the traces are states like others.
    """
    states: list[Cell] = []
    number: dict[tuple[int, int], int] = {}

    def cell(state: brainstate.State, index: int) -> int:
        key = (id(state), index)
        if key not in number:
            number[key] = len(states)
            states.append((state, index))
        return number[key]

    numbers = {
        size: tuple(cell(leaf.state, leaf.index) for leaf in t.leaves) for size, t in traced.items()
    }
    trained = tuple(
        cell(state, i)
        for state in states_of(weights)[0]
        for i in range(len(jax.tree.leaves(state.value)))
    )
    changed: dict[int, None] = {}
    for size, t in traced.items():
        written = (i for i, leaf in enumerate(t.leaves) if leaf.written)
        places = written if splits is None else splits[size].changed
        changed |= dict.fromkeys(numbers[size][i] for i in places)
    cells = Cells(tuple(changed), trained)
    rule, own_signal = learner.rule, learner._has_own_signal
    single = learner.vjp_method == "single-step"
    bodies: dict[int | None, SplitBody | CallBody] = {}
    for place, (size, t) in enumerate(traced.items()):
        common = (t, rule, own_signal, cells, numbers[size], place)
        if splits is None:
            bodies[size] = CallBody(*common)
        else:
            bodies[size] = SplitBody(*common, splits[size], one_by_one, single)
    return SequenceRun(learner, weights, stream, window, bodies, states, cells, splits is not None)


def is_fresh(learner: Any) -> bool:
    """Whether the traces are zero, as far as that is certain while tracing.

    Without a trace it is looked up in the loop, so that one program serves both.
    """
    index = learner.running_index.value
    leaves = [a for s in learner.etraces.values() for a in jax.tree.leaves(s.value)]
    return isinstance(index, np.ndarray) and any(map(is_traced, leaves)) and bool(index == 0)


def only_ours(states: Iterable[brainstate.State]) -> bool:
    """Whether nobody else holds the arrays of these states, so that their memory may be reused."""
    unshared = brainstate.ShortTermState({"": jnp.zeros(())})
    most = _holders(unshared)
    return all(held <= limit for s in states for held, limit in zip(_holders(s), most, strict=True))


def _holders(state: brainstate.State) -> tuple[int, int]:
    value = state.value
    leaves = jax.tree.leaves(value)
    return sys.getrefcount(value), max(map(sys.getrefcount, leaves), default=0)
