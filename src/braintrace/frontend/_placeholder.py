"""A step function traced with a placeholder where it calls the learner, and cut there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import PyTreeDef

from ..graph import Graph, affine_equations, bits_of, reach
from ..program import (
    Equation,
    Misplaced,
    Placeholder,
    PyTree,
    Var,
    cannot_be_mapped,
    deep_equations,
)
from ._function import Traced, trace_function

Items = tuple[Any, ...]
placeholder = Placeholder("braintrace_learner")


class Operands(NamedTuple):
    """Something for every operand of a learner call, sorted by kind."""

    consts: Items
    args: Items
    params: Items
    hidden: Items
    others: Items
    extra: Items


def is_placeholder(eqn: Equation) -> bool:
    """Whether an equation is a call of the learner."""
    return eqn.primitive is placeholder


@dataclass(frozen=True, slots=True)
class Marker:
    """What a placeholder stands for: a step of a graph, or a window of `length` steps."""

    graph: Graph
    timed: tuple[bool, ...]  # which arguments have an axis of steps
    length: int | None
    extra: tuple[bool, ...]  # which of what the rule takes have one
    names: PyTreeDef  # the structure of that

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of results and of new states, per step or per window."""
        step = self.graph.step
        lead = () if self.length is None else (self.length,)
        outs = step.program.outputs
        results = [jax.ShapeDtypeStruct((*lead, *o.shape), o.dtype) for o in outs[: step.n_outs]]
        states = [outs[leaf.output] for leaf in (*step.hidden, *step.others)]
        return (*results, *(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in states))


def placeholder_call(
    marker: Marker, arrays: Operands, mappable: bool
) -> tuple[list[Array], tuple[Array, ...], tuple[Array, ...]]:
    """Results and new states of a learner call that is put in later."""
    flat = [a if hasattr(a, "dtype") else jnp.asarray(a) for kind in arrays for a in kind]
    step = marker.graph.step
    first = sum(map(len, (arrays.consts, arrays.args, arrays.params)))
    n, k = step.n_outs, len(step.hidden)
    leaves = enumerate((*step.hidden, *step.others))
    same = tuple((n + i, first + i) for i, leaf in leaves if step.exit(leaf) is step.entry(leaf))
    mapped = (0,) * len(flat) if mappable else None
    out = placeholder.bind(*flat, marker=marker, outs=marker.shapes(), mapped=mapped, same=same)
    return out[:n], tuple(out[n : n + k]), tuple(out[n + k :])


def trace_placed(step: Callable[..., PyTree], slices: Sequence[PyTree]) -> Traced | None:
    """Trace a step function whose calls are placeholders; None if one cannot stand there."""
    try:
        return _in_order(trace_function(step, *slices))
    except Misplaced:
        return None


def _in_order(traced: Traced) -> Traced:
    """The states in the order in which the learner call takes them.

    A model that is traced in the call reads them in another order than one that was traced before.
    """
    program, n, m = traced.program, len(traced.arguments), len(traced.results)
    calls = [e for e in program.equations if is_placeholder(e)]
    atoms = calls[0].inputs if calls else ()
    place = {a: i for i, a in enumerate(atoms) if isinstance(a, Var)}
    order = sorted(
        range(len(traced.leaves)), key=lambda i: place.get(traced.leaves[i].entry, len(atoms))
    )
    sort = lambda items, start: (*items[:start], *(items[start + i] for i in order))
    program = replace(program, inputs=sort(program.inputs, n), outputs=sort(program.outputs, m))
    return replace(traced, program=program, leaves=sort(traced.leaves, 0))


def operands(call: Equation, items: Sequence[Any]) -> Operands:
    """What belongs to each operand of a placeholder, sorted by kind."""
    marker: Marker = call.params["marker"]
    step = marker.graph.step
    counts = [
        len(step.program.consts),
        step.n_args,
        len(step.params),
        len(step.hidden),
        len(step.others),
        len(marker.extra),
    ]
    parts, at = [], 0
    for n in counts:
        parts.append(tuple(items[at : at + n]))
        at += n
    return Operands(*parts)


@dataclass(frozen=True, slots=True)
class Split:
    """Where the one learner call is in a step function, and whose the state leaves are."""

    call: Equation
    hidden: tuple[int, ...]  # of the learner
    others: tuple[int, ...]
    outer: tuple[int, ...]  # that the step function itself changes
    penalised: bool

    @property
    def changed(self) -> tuple[int, ...]:
        return (*self.hidden, *self.others, *self.outer)


def split_at_call(traced: Traced, private: Collection[int]) -> Split | str:
    """Where the learner call is; if many calls cannot be evaluated at once, the reason.

    `private` are the ids of the learner's own states, which a placeholder does not touch.
    """
    if any(id(leaf.state) in private for leaf in traced.leaves):
        return "step_fn reads or writes the learner's own traces"
    equations = list(deep_equations(traced.program))
    calls = [e for e in equations if is_placeholder(e)]
    if len(calls) != 1 or calls[0] not in traced.program.equations:
        return "step_fn calls the learner more than once, or inside of control flow"
    if any(e.effects for e in equations) or any(map(cannot_be_mapped, traced.program.equations)):
        return "step_fn has side effects or calls Python"
    call = calls[0]
    graph: Graph = call.params["marker"].graph
    mapped = call.params["mapped"]
    if graph.effects or graph.unmapped:  # once per step, and in order
        return "the model has side effects or calls Python"
    if mapped is not None and max(mapped, default=0) > 1:
        return "the learner is mapped more than once"
    inputs = operands(call, call.inputs)
    number = {leaf.entry: i for i, leaf in enumerate(traced.leaves)}
    number_of = lambda atom: number.get(atom, -1) if isinstance(atom, Var) else -1
    owned = [number_of(a) for a in (*inputs.hidden, *inputs.others)]
    states = call.outputs[graph.step.n_outs :]
    if -1 in owned or len(set(owned)) != len(owned):
        return "step_fn changes the model's states before it calls the learner"
    unchanged = {k - graph.step.n_outs for k, _ in call.params["same"]}
    for k, (i, new) in enumerate(zip(owned, states, strict=True)):
        leaf = traced.leaves[i]
        if leaf.exit is not new and not (k in unchanged and leaf.exit is leaf.entry):
            return "step_fn changes the model's states after it called the learner"
    outer = tuple(i for i, s in enumerate(traced.leaves) if s.written and i not in owned)
    trained = [number_of(a) for a in inputs.params]
    if -1 in trained or set(trained) & set(outer):
        return "step_fn changes a parameter of the model"
    # What the step function feeds the learner, or keeps for itself, must not depend on the model.
    seeds = dict.fromkeys(call.outputs, 1) | {traced.leaves[i].entry: 1 for i in owned}
    rest = tuple(e for e in traced.program.equations if e is not call)
    without = replace(traced.program, equations=rest)
    late = reach(without, seeds, differentiable=False)
    early = (*inputs.consts, *inputs.args, *inputs.extra, *(traced.leaves[i].exit for i in outer))
    if any(bits_of(a, late) for a in early):
        return (
            "step_fn's input of the learner, or a state of its own, depends on the model's states"
        )
    n, penalised = len(graph.step.hidden), bool(affine_equations(without, without.outputs))
    return Split(call, tuple(owned[:n]), tuple(owned[n:]), outer, penalised)
