"""The user's step around a learner, split so that many of them run side by side.

A step function is traced with a placeholder where it calls the learner. What it does before and
after the call depends on no state of the model, so it is evaluated for all steps of a block at
once; the learner's own block of steps stands in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._errors import message
from .._jaxpr import (
    Equation,
    Misplaced,
    Placeholder,
    Program,
    Var,
    cannot_be_mapped,
    deep_equations,
)
from ..engine import StepValues, TimeAxes, Values, evaluate_all_steps, needed, unroll
from ..engine import run_block as run_engine
from ..frontend import Traced, trace_function
from ..graph import Graph, affine_equations, bits_of, reach
from ._data import Call

placeholder = Placeholder("braintrace_learner")


@dataclass(frozen=True, slots=True)
class Marker:
    """What a placeholder stands for."""

    graph: Graph
    timed: tuple[bool, ...]
    length: int | None
    extra: tuple[bool, ...]
    names: Any

    def shapes(self) -> tuple[Any, ...]:
        """Shapes of results and of new states, per step or per window."""
        step = self.graph.step
        lead = () if self.length is None else (self.length,)
        outs = step.program.outputs
        results = [jax.ShapeDtypeStruct((*lead, *o.shape), o.dtype) for o in outs[: step.n_outs]]
        states = [outs[leaf.output] for leaf in (*step.hidden, *step.others)]
        return (*results, *(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in states))


def stand_in(
    mapped: bool | None,
    graph: Graph,
    call: Call,
    values: Values,
    extra: tuple[bool, ...],
    names: Any,
) -> tuple[list[Any], Values]:
    """Results and new states of a learner call that is put in later."""
    marker = Marker(graph, call.timed, call.length, extra, names)
    states = (*values.params, *values.hidden, *values.others)
    given = (*values.consts, *values.args, *states, *values.extra)
    flat = [a if hasattr(a, "dtype") else jnp.asarray(a) for a in given]
    step, first = graph.step, len(values.consts) + len(values.args) + len(values.params)
    n, k = step.n_outs, len(step.hidden)
    leaves = enumerate((*step.hidden, *step.others))
    same = tuple((n + i, first + i) for i, leaf in leaves if step.exit(leaf) is step.entry(leaf))
    out = placeholder.bind(*flat, marker=marker, outs=marker.shapes(), mapped=mapped, same=same)
    new = Values(
        values.consts, values.args, values.params, tuple(out[n : n + k]), tuple(out[n + k :])
    )
    return out[:n], new


@dataclass(frozen=True, eq=False, slots=True)
class Around:
    """A traced step function and the one learner call in it.

    `hidden` and `others` are numbers of the state leaves that the learner owns, `outer` of those
    that the step function itself changes. `penalised`: whether a backward rule around the call adds
    a constant to its cotangent.
    """

    traced: Traced
    call: Equation
    marker: Marker
    inputs: Values
    hidden: tuple[int, ...]
    others: tuple[int, ...]
    outer: tuple[int, ...]
    penalised: bool

    @property
    def window(self) -> int:
        return self.marker.length or 1

    @property
    def program(self) -> Program:
        return self.traced.program


def trace_step(step_fn: Callable[..., Any], slices: Sequence[Any], called: list) -> Traced | None:
    """Trace a step function with a placeholder; None if that cannot stand where the learner does.

    `called` gets an entry by every call of the learner.

    Raises:
        ValueError: the step function never calls the learner.
    """
    try:
        traced = trace_function(step_fn, *slices)
    except Misplaced:
        return None
    calls = any(e.primitive is placeholder for e in deep_equations(traced.program))
    if not calls and not called:  # a function that was traced before calls nothing again
        raise ValueError(
            message(
                "step_fn does not call the learner.",
                why="what it differentiates has no traces: the model by itself knows one step",
                do="call the learner in it, `learner(x)` in place of `model(x)`",
            )
        )
    return traced


def around(traced: Traced, private: Collection[int]) -> Around | None:
    """The step function around its learner call; None if its steps cannot be run side by side.

    `private` are the ids of the learner's own states, which a placeholder does not touch.
    """
    if any(id(leaf.state) in private for leaf in traced.leaves):
        return None
    equations = list(deep_equations(traced.program))
    calls = [e for e in equations if e.primitive is placeholder]
    if len(calls) != 1 or calls[0] not in traced.program.equations:
        return None
    if any(e.effects for e in equations) or any(map(cannot_be_mapped, traced.program.equations)):
        return None
    if calls[0].params["mapped"]:
        return None
    return _split(traced, calls[0])


def slots(call: Equation) -> Values:
    """What a placeholder takes."""
    marker: Marker = call.params["marker"]
    step = marker.graph.step
    sizes = [
        len(step.program.consts),
        step.n_args,
        len(step.params),
        len(step.hidden),
        len(step.others),
        len(marker.extra),
    ]
    parts, at = [], 0
    for n in sizes:
        parts.append(call.inputs[at : at + n])
        at += n
    return Values(*parts)


def _split(traced: Traced, call: Equation) -> Around | None:
    marker: Marker = call.params["marker"]
    step = marker.graph.step
    if marker.graph.effects or marker.graph.unmapped:  # effects happen once and in order
        return None
    inputs = slots(call)
    number = {leaf.entry: i for i, leaf in enumerate(traced.leaves)}
    owned = [
        number.get(a, -1) if isinstance(a, Var) else -1 for a in (*inputs.hidden, *inputs.others)
    ]
    states = call.outputs[step.n_outs :]
    if -1 in owned or len(set(owned)) != len(owned):
        return None
    if any(traced.leaves[i].exit is not o for i, o in zip(owned, states, strict=True)):
        return None
    outer = tuple(i for i, s in enumerate(traced.leaves) if s.written and i not in owned)
    trained = [number.get(a, -1) if isinstance(a, Var) else -1 for a in inputs.params]
    if -1 in trained or set(trained) & set(outer):
        return None
    # What the step function feeds the learner, or keeps for itself, must not depend on the model.
    seeds = dict.fromkeys(call.outputs, 1) | {traced.leaves[i].entry: 1 for i in owned}
    without = Program(
        traced.program.consts,
        traced.program.inputs,
        tuple(e for e in traced.program.equations if e is not call),
        traced.program.outputs,
    )
    late = reach(without, seeds, differentiable=False)
    given = (*inputs.consts, *inputs.args, *inputs.extra, *(traced.leaves[i].exit for i in outer))
    if any(bits_of(a, late) for a in given):
        return None
    n, penalised = len(step.hidden), bool(affine_equations(without, without.outputs))
    hidden, others = tuple(owned[:n]), tuple(owned[n:])
    return Around(traced, call, marker, inputs, hidden, others, outer, penalised)


# ----------------------------------------------------------------------------------- evaluation


def run_block(
    plan: Around,
    rule: Any,
    consts: Sequence[Any],
    sequences: Sequence[Any],
    states: Sequence[Any],
    traces: Sequence[Any],
    *,
    single: bool,
    keep: bool,
    fresh: Any,
    chosen: Any = None,
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Run a step function over a block.

    Returns:
        `(results, credited, states, traces)`: results of the step function stacked over its
        calls, the same to differentiate, all states after the block, and the traces.
    """
    traced, program = plan.traced, plan.program
    count = jax.tree.leaves(sequences)[0].shape[0]
    still = lax.stop_gradient((list(consts), list(states)))
    entering, last = _outer(plan, *still, sequences, count)

    def known_with(outs: Sequence[Any] | None, index: Any) -> StepValues:
        known = StepValues()
        pick = (lambda a: a) if index is None else (lambda a: a[index])
        for var, value in zip(program.consts, consts, strict=True):
            known.add(var, value, False)
        for var, value in zip(traced.arguments, sequences, strict=True):
            known.add(var, pick(value), True)
        for i, leaf in enumerate(traced.leaves):
            if i in entering:
                known.add(leaf.entry, pick(entering[i]), True)
            elif i not in plan.hidden and i not in plan.others:
                known.add(leaf.entry, states[i], False)
        if outs is not None:
            for var, value in zip(plan.call.outputs, outs, strict=True):
                known.add(var, value, True)
        return known

    before = known_with(None, None)
    values, axes = _arguments(plan, before, states, count, single)
    steps = chosen
    if chosen is not None and single and plan.window > 1:
        steps = (chosen[:, None] * plan.window + jnp.arange(plan.window)).reshape(-1)
    graph = plan.marker.graph
    ran = run_engine(graph, rule, values, traces, axes, keep=keep, fresh=fresh, chosen=steps)

    def finished(outs: Sequence[Any], after: Values, index: Any) -> list[Any]:
        known = known_with(_per_call(plan, outs, after), index)
        for kind, numbers in (("hidden", plan.hidden), ("others", plan.others)):
            for i, value in zip(numbers, getattr(ran.before, kind), strict=True):
                value = value[:: plan.window]
                known.add(traced.leaves[i].entry, value if index is None else value[index], True)
        evaluate_all_steps(needed(program, traced.results, known), known, count)
        return [_all(known, a, count) for a in traced.results]

    results = finished(ran.outs, ran.after, None)
    credited = results if chosen is None else finished(*ran.credited, chosen)
    new = list(states)
    for i, value in last.items():
        new[i] = value
    for numbers, arrays in ((plan.hidden, ran.after.hidden), (plan.others, ran.after.others)):
        for i, value in zip(numbers, arrays, strict=True):
            new[i] = value[-1]
    return results, credited, new, ran.traces


def _outer(
    plan: Around, consts: Sequence[Any], states: Sequence[Any], sequences: Any, count: int
) -> tuple[dict[int, Any], dict[int, Any]]:
    """The step function's own states: before every step, and at the end."""
    if not plan.outer:
        return {}, {}
    traced, known = plan.traced, StepValues()
    for var, value in zip(plan.program.consts, consts, strict=True):
        known.add(var, value, False)
    for var, value in zip(traced.arguments, sequences, strict=True):
        known.add(var, value, True)
    for i, leaf in enumerate(traced.leaves):
        if i not in plan.outer:
            known.add(leaf.entry, states[i], False)
    carried = [(traced.leaves[i].entry, traced.leaves[i].exit) for i in plan.outer]
    last = unroll(plan.program, known, carried, [states[i] for i in plan.outer], count)
    found = {i: _all(known, traced.leaves[i].entry, count) for i in plan.outer}
    return found, dict(zip(plan.outer, last, strict=True))


def _all(known: StepValues, atom: Any, count: int) -> Any:
    """A value with its axis of steps."""
    if isinstance(atom, Var) and atom in known.timed:
        return known.timed[atom]
    value = known.shared[atom] if isinstance(atom, Var) else jnp.asarray(atom.value)
    return jnp.broadcast_to(value, (count, *value.shape))


def _arguments(
    plan: Around, known: StepValues, states: Sequence[Any], count: int, single: bool
) -> tuple[Values, TimeAxes]:
    """What the learner is called with in a block, and how it lies in time."""
    size, length = plan.window, count * plan.window
    given = (*plan.inputs.consts, *plan.inputs.args, *plan.inputs.extra)
    evaluate_all_steps(needed(plan.program, given, known), known, count)

    def read(atom: Any, per_step: bool) -> tuple[Any, bool]:
        if isinstance(atom, Var) and atom in known.timed:
            value = known.timed[atom]
            if per_step:
                return value.reshape((length, *value.shape[2:])), True
            return (value if size == 1 else jnp.repeat(value, size, axis=0)), True
        value = known.shared[atom] if isinstance(atom, Var) else atom.value
        if per_step:  # the same sequence in every window
            return jnp.tile(value, (count, *(1,) * (jnp.ndim(value) - 1))), True
        return value, False

    windows = plan.marker.length is not None
    consts = [read(a, False) for a in plan.inputs.consts]
    args = [
        read(a, windows and timed)
        for a, timed in zip(plan.inputs.args, plan.marker.timed, strict=True)
    ]
    extra = [
        read(a, windows and timed)
        for a, timed in zip(plan.inputs.extra, plan.marker.extra, strict=True)
    ]
    entries = {leaf.entry: i for i, leaf in enumerate(plan.traced.leaves)}
    values = Values(
        tuple(v for v, _ in consts),
        tuple(v for v, _ in args),
        tuple(states[entries[a]] for a in plan.inputs.params),
        tuple(states[i] for i in plan.hidden),
        tuple(states[i] for i in plan.others),
        tuple(v for v, _ in extra),
    )
    flags = tuple(t for _, t in consts), tuple(t for _, t in args)
    window, marker = None if single else size, plan.marker
    return values, TimeAxes(length, *flags, window, tuple(t for _, t in extra), marker.names)


def _per_call(plan: Around, outs: Sequence[Any], after: Values) -> list[Any]:
    """Results and new states of the learner, one entry per call of it."""
    if plan.marker.length is None:
        return [*outs, *after.hidden, *after.others]
    size = plan.window
    split = [a.reshape((-1, size, *a.shape[1:])) for a in outs]
    return [*split, *(a[size - 1 :: size] for a in (*after.hidden, *after.others))]
