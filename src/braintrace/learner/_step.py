"""The user's step function as the body of the loop over a sequence.

It is traced with a placeholder where it calls the learner. What it does before and after the call
depends on no state of the model, so it is evaluated for all calls of a block at once; the engine
runs a block of steps in between. A step function for which that is not so (it feeds the learner its
own results, calls it twice or inside of a transformation) is traced with the real call, and its
calls are taken one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._online import Mode, Position, StepBytes, Weights, step_bytes, stored_bytes
from ..engine import (
    BlockResult,
    StepValues,
    TimeAxes,
    Values,
    evaluate_all_steps,
    needed,
    run_block,
    unroll,
)
from ..frontend import Marker, Operands, Split, Traced, operands
from ..graph import HiddenParamOpRelation as Relation
from ..program import Atom, PyTree, Var, evaluate, fingerprint
from ..rules import Rule

Array = jax.Array


@dataclass(frozen=True, slots=True)
class Cells:
    """The arrays of states that a step function touches, by number, whatever its window.

    `changed` are those that a call changes, `trained` those of the weights.
    """

    changed: tuple[int, ...]
    trained: tuple[int, ...]

    def values(self, weights: Weights, at: Position) -> list[Array]:
        """The arrays of all cells, to be differentiated by the weights."""
        values = list(weights.fixed["cells"])
        for i, value in zip(self.trained, weights.trained, strict=True):
            values[i] = value
        for i, value in zip(self.changed, at.states, strict=True):
            # A weight that a call changes: its value is the state's, its derivative the weight's.
            own = values[i] - lax.stop_gradient(values[i]) if i in self.trained else None
            values[i] = value if own is None else value + own
        return values


@dataclass(frozen=True, eq=False)
class _Body:
    """A traced step function and its rule.

    `numbers` are the cells of the leaves of the traced function, `place` is that of its constants.
    """

    traced: Traced
    record: Rule
    own_signal: bool
    cells: Cells
    numbers: tuple[int, ...]
    place: int


NOT_COUNTED = StepBytes(1)  # calls that are taken one by one


@dataclass(frozen=True, eq=False)
class CallBody(_Body):
    """A step function traced with its real calls of the learner; traces are among its states."""

    relations: tuple[Relation, ...] = ()
    one_by_one: bool = True
    adds_constants: bool = True
    step_bytes: StepBytes = NOT_COUNTED
    call_steps: int = 1

    def run(
        self, record: Rule, weights: Weights, at: Position, arrays: PyTree, mode: Mode
    ) -> tuple[PyTree, Array, Position]:
        traced, n = self.traced, len(self.traced.results)
        values = self.cells.values(weights, at)
        flat = [a[0] for a in jax.tree.leaves(arrays)]
        consts = weights.fixed["consts"][self.place]
        outs = evaluate(traced.program, consts, [*flat, *(values[i] for i in self.numbers)])
        new = dict(zip(self.numbers, outs[n:], strict=True))
        states = [new.get(i, values[i]) for i in self.cells.changed]
        results = jax.tree.unflatten(traced.out_tree, [jnp.expand_dims(a, 0) for a in outs[:n]])
        return results, results[0], Position(states, at.traces, at.count + 1)


@dataclass(frozen=True, eq=False)
class SplitBody(_Body):
    """A step function around its one learner call, evaluated for many calls at once."""

    split: Split
    one_by_one: bool
    single: bool

    @property
    def key(self) -> Hashable:
        """What the compiled loop depends on."""
        s = self.split
        program = fingerprint(self.traced.program, self.traced.consts)
        states = (s.hidden, s.others, s.outer, s.call.params["mapped"])
        cells = (self.cells, self.numbers)
        return program, self.marker, states, cells, self.one_by_one, self.single

    @property
    def marker(self) -> Marker:
        return self.split.call.params["marker"]

    @property
    def call_steps(self) -> int:
        return self.marker.length or 1

    @property
    def is_mapped(self) -> bool:
        """Whether the learner is mapped over samples."""
        return any(self.split.call.params["mapped"] or ())

    @property
    def relations(self) -> Sequence[Relation]:
        return () if self.is_mapped else self.marker.graph.relations

    @property
    def adds_constants(self) -> bool:
        return self.split.penalised

    @cached_property
    def step_bytes(self) -> StepBytes:
        call = self.split.call
        params = {a for a in operands(call, call.inputs).params if isinstance(a, Var)}
        samples = call.outputs[0].shape[0] if self.is_mapped and call.outputs else 1
        outside = stored_bytes(self.traced.program, params)
        return step_bytes(self.marker.graph) * samples + outside

    def run(
        self, record: Rule, weights: Weights, at: Position, arrays: PyTree, mode: Mode
    ) -> tuple[PyTree, Array, Position]:
        traced, program, split = self.traced, self.traced.program, self.split
        sequences = jax.tree.leaves(arrays)
        count, size = sequences[0].shape[0], self.marker.length or 1
        consts, cells = weights.fixed["consts"][self.place], self.cells.values(weights, at)
        states = [cells[i] for i in self.numbers]
        entering, last = self._own_states(*lax.stop_gradient((consts, states)), sequences, count)

        def values_with(outs: Sequence[Array] | None, index: Array | None) -> StepValues:
            pick = (lambda a: a) if index is None else (lambda a: a[index])
            values = self._arguments(consts, [pick(a) for a in sequences])
            for i, leaf in enumerate(traced.leaves):
                if i in entering:
                    values.add(leaf.entry, pick(entering[i]), True)
                elif i not in split.hidden and i not in split.others:
                    values.add(leaf.entry, states[i], False)
            if outs is not None:
                for var, value in zip(split.call.outputs, outs, strict=True):
                    values.add(var, value, True)
            return values

        steps = mode.substitute
        if steps is not None and self.single and size > 1:
            steps = (steps[:, None] * size + jnp.arange(size)).reshape(-1)
        ran = self._engine(
            record, values_with(None, None), states, at.traces, replace(mode, substitute=steps)
        )

        def finished(outs: Sequence[Array], after: Values, index: Array | None) -> list[Array]:
            values = values_with(self._per_call(outs, after), index)
            for kind, leaves in (("hidden", split.hidden), ("others", split.others)):
                for i, value in zip(leaves, getattr(ran.before, kind), strict=True):
                    value = value[::size]
                    values.add(
                        traced.leaves[i].entry, value if index is None else value[index], True
                    )
            evaluate_all_steps(needed(program, traced.results, values), values, count)
            return [_all(values, a, count) for a in traced.results]

        results = finished(ran.outs, ran.after, None)
        counted = results
        if mode.substitute is not None:
            counted = finished(*ran.credited, mode.substitute)
        new = dict(last)
        for leaves, exits in ((split.hidden, ran.after.hidden), (split.others, ran.after.others)):
            new |= {i: value[-1] for i, value in zip(leaves, exits, strict=True)}
        by_cell = {self.numbers[i]: value for i, value in new.items()}
        changed = [by_cell.get(i, cells[i]) for i in self.cells.changed]
        position = Position(changed, ran.traces, lax.stop_gradient(at.count + count))
        return jax.tree.unflatten(traced.out_tree, results), counted[0], position

    def _arguments(self, consts: Sequence[Array], sequences: Sequence[Array]) -> StepValues:
        values = StepValues()
        for var, value in zip(self.traced.program.consts, consts, strict=True):
            values.add(var, value, False)
        for var, value in zip(self.traced.arguments, sequences, strict=True):
            values.add(var, value, True)
        return values

    def _own_states(
        self, consts: Sequence[Array], states: Sequence[Array], sequences: PyTree, count: int
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """The step function's own states: before every call, and at the end."""
        traced, outer = self.traced, self.split.outer
        if not outer:
            return {}, {}
        values = self._arguments(consts, sequences)
        for i, leaf in enumerate(traced.leaves):
            if i not in outer:
                values.add(leaf.entry, states[i], False)
        carried = [(traced.leaves[i].entry, traced.leaves[i].exit) for i in outer]
        last = unroll(traced.program, values, carried, [states[i] for i in outer], count)
        entering = {i: _all(values, traced.leaves[i].entry, count) for i in outer}
        return entering, dict(zip(outer, last, strict=True))

    def _engine(
        self,
        record: Rule,
        values: StepValues,
        states: Sequence[Array],
        traces: list[PyTree],
        mode: Mode,
    ) -> BlockResult:
        """The block of steps, for one learner or for all samples of a mapped one."""
        call, marker, size = self.split.call, self.marker, self.marker.length or 1
        count = next(iter(values.timed.values())).shape[0]
        inputs = operands(call, call.inputs)
        early = (*inputs.consts, *inputs.args, *inputs.extra)
        evaluate_all_steps(needed(self.traced.program, early, values), values, count)

        def read(atom: Atom, per_step: bool = False) -> tuple[Any, bool]:
            if isinstance(atom, Var) and atom in values.timed:
                value = values.timed[atom]
                if per_step:
                    return value.reshape((count * size, *value.shape[2:])), True
                return (value if size == 1 else jnp.repeat(value, size, axis=0)), True
            value = values.shared[atom] if isinstance(atom, Var) else atom.value
            if per_step:  # the same sequence in every window
                return jnp.tile(value, (count, *(1,) * (jnp.ndim(value) - 1))), True
            return value, False

        windows = marker.length is not None
        entries = {leaf.entry: i for i, leaf in enumerate(self.traced.leaves)}
        consts = [read(a) for a in inputs.consts]
        args = [read(a, windows and t) for a, t in zip(inputs.args, marker.timed, strict=True)]
        extra = [read(a, windows and t) for a, t in zip(inputs.extra, marker.extra, strict=True)]
        kinds = (consts, args, extra)
        arrays = Values(
            tuple(v for v, _ in consts),
            tuple(v for v, _ in args),
            tuple(states[entries[a]] for a in inputs.params if isinstance(a, Var)),
            tuple(states[i] for i in self.split.hidden),
            tuple(states[i] for i in self.split.others),
            tuple(v for v, _ in extra),
        )
        timed = [tuple(t for _, t in kind) for kind in kinds]
        window = None if self.single else size
        axes = TimeAxes(count * size, timed[0], timed[1], window, timed[2], marker.names)

        if self.is_mapped:
            mode = replace(mode, later=False)

        def run(arrays: Values, traces: list[PyTree]) -> BlockResult:
            return run_block(marker.graph, record, arrays, traces, axes, **mode.options)

        if not self.is_mapped:
            return run(arrays, traces)
        return _for_samples(run, arrays, traces, operands(call, call.params["mapped"]), timed)

    def _per_call(self, outs: Sequence[Array], after: Values) -> list[Array]:
        """Results and new states of the learner, one entry per call of it."""
        if self.marker.length is None:
            return [*outs, *after.hidden, *after.others]
        size = self.marker.length
        split = [a.reshape((-1, size, *a.shape[1:])) for a in outs]
        return [*split, *(a[size - 1 :: size] for a in (*after.hidden, *after.others))]


def _for_samples(
    run: Callable[..., BlockResult],
    arrays: Values,
    traces: list[PyTree],
    mapped: Operands,
    timed: Any,
) -> BlockResult:
    """A block of steps for every sample: their axis is the first, or the second after time."""
    place = lambda flags, times: tuple(
        (1 if t else 0) if f else None for f, t in zip(flags, times, strict=True)
    )
    never = lambda flags: place(flags, [False] * len(flags))
    axes = Values(
        place(mapped.consts, timed[0]),
        place(mapped.args, timed[1]),
        never(mapped.params),
        never(mapped.hidden),
        never(mapped.others),
        place(mapped.extra, timed[2]),
    )

    def one(arrays: Values, traces: list[PyTree]) -> PyTree:
        ran = run(arrays, traces)
        states = [(v.hidden, v.others) for v in (ran.before, ran.after, ran.credited[1])]
        return (ran.outs, ran.credited[0], states), ran.traces

    (outs, credited, states), traces = jax.vmap(one, (axes, 0), (1, 0))(arrays, traces)

    def put(hidden: Sequence[Array], others: Sequence[Array]) -> Values:
        # A state that all samples share is the same for each of them.
        shared = lambda new, flags: tuple(
            a if f else a[:, 0] for a, f in zip(new, flags, strict=True)
        )
        new = shared(hidden, mapped.hidden), shared(others, mapped.others)
        return replace(arrays, hidden=new[0], others=new[1])

    before, after, counted = (put(*pair) for pair in states)
    return BlockResult(outs, before, after, traces, (credited, counted))


def _all(values: StepValues, atom: Atom, count: int) -> PyTree:
    """A value with its axis of calls."""
    if isinstance(atom, Var) and atom in values.timed:
        return values.timed[atom]
    value = values.shared[atom] if isinstance(atom, Var) else jnp.asarray(atom.value)
    return jnp.broadcast_to(value, (count, *value.shape))
