"""What reaches the relations from the losses of a block, or from a signal of the rule's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import Graph, split_cotangents
from ._evaluate import Backs, after_step, back_operands, evaluate_plain, evaluate_single
from ._rule import (
    Arrived,
    ExitCotangents,
    Rule,
    Signal,
    SignalInputs,
    Signals,
    SignalSource,
    Steps,
)
from ._singular import singular
from ._transition import Transition
from ._values import TimeAxes, Values, map_steps

Array = jax.Array
SignalsOf = Callable[[Sequence[Array], Any], list[Array]]
OWN = ""  # the name, among what a rule is called with, of arrays that are no sequences


def signal_source(
    graph: Graph, rule: Rule, values: Values, path: Values, axes: TimeAxes, backs: Backs | None
) -> SignalSource:
    """The signal of a rule in a block, with the states and arrays that it reads."""
    signal = rule.signal
    if signal is None and rule.feedback is not None and not backs:
        signal = rule.feedback.signal
    if signal is None:
        return SignalSource(rule.exit_cotangents, None)
    extra = {}
    if axes.names is not None:
        called = jax.tree.unflatten(axes.names, values.extra)
        own = called.pop(OWN, {})
        timed = jax.tree.unflatten(axes.names, axes.extra)
        timed.pop(OWN, None)
        longer = lambda a, t: a if t else jnp.broadcast_to(a, (axes.length, *jnp.shape(a)))
        extra = {**jax.tree.map(longer, called, timed), **own}
    states = path.hidden
    if axes.window is None:
        states = states_after(graph, path, axes)
    elif axes.window > 1:
        states = tuple(h[:: axes.window] for h in path.hidden)
    return SignalSource(ExitCotangents.READ, signal, states, extra)


def states_after(graph: Graph, path: Values, axes: TimeAxes) -> tuple[Array, ...]:
    """The states after every step."""

    def step(slices, hidden, others):
        values = axes.at(path, slices, hidden, others)
        return after_step(graph, values, evaluate_plain(graph, values))[1].hidden

    return map_steps(axes.length, step, axes.slices(path), path.hidden, path.others)


def signals_of(graph: Graph, arrived: Arrived, steps: Sequence[Steps]) -> list[Signals]:
    """The signals of every relation."""
    source, every, taps = arrived.source, arrived.every, arrived.taps
    if source.signal is not None:
        return _replaced(graph, arrived, source.signal)
    masked = arrived.substitute is not None
    entry = at_slots(graph, arrived.entry)
    leaving = at_slots(graph, arrived.exits) if arrived.exits else None
    out = []
    for i, (r, s) in enumerate(zip(graph.relations, steps, strict=True)):
        at, new = entry[i], None if leaving is None else leaving[i]
        # DETACHED: the zeros at the new states got every cotangent, and what computes these states
        # passed none on. The way back from them is D^T, that of the trace:  lam = D^T new.
        if new is not None and source.exits is not ExitCotangents.READ:
            n = r.slots.width
            D = Transition.of(s.D[..., :n, :n], r.slots.table is not None, singular(graph))
            at = at + D.slots(D.transpose(D.vector(new), masked))
        out.append(Signals(at, taps[r.index], every, masked, new))
    return out


def _replaced(graph: Graph, arrived: Arrived, signal: Signal) -> list[Signals]:
    """Signals of the rule's own: at the new states, or where a window enters."""
    source, every, substitute = arrived.source, arrived.every, arrived.substitute
    cotangents = arrived.exits if every is None else arrived.entry
    inputs = SignalInputs(graph.groups, cotangents, source.states, source.extra)
    own = [jnp.asarray(a) for a in signal(inputs)]
    if substitute is not None:
        counts = substitute == jnp.arange(len(substitute))
        counts = counts if arrived.counts is None else counts & arrived.counts
        own = [jnp.where(counts.reshape((-1, *(1,) * (a.ndim - 1))), a, 0) for a in own]
    out = []
    for r, a in zip(graph.relations, at_slots(graph, own), strict=True):
        ct, masked = arrived.taps[r.index], substitute is not None
        if every is None:
            out.append(Signals(jnp.zeros_like(a), jnp.zeros_like(ct), every, masked, exits=a))
        else:
            out.append(Signals(a, ct, every, masked))
    return out


def at_slots(graph: Graph, cotangents: Sequence[Array]) -> list[Array]:
    """Cotangents of states, with a leading axis, at the slots of every relation."""

    def one(*leaves):
        lam = split_cotangents(graph.tangent.components, leaves)
        dtype = jnp.result_type(*lam)
        return [r.slots.values(lam, dtype) for r in graph.relations]

    return map_steps(cotangents[0].shape[0], one, *cotangents)


def run_with_exits(
    graph: Graph,
    rule: Rule,
    values: Values,
    exits: Sequence[Array],
    extra: tuple[bool, ...],
    names: Any,
) -> tuple[list[Array], Values, SignalsOf, Any]:
    """Run one step with `exits` added to its new states, as others read them.

    Args:
        graph: the analysed step.
        rule: the rule, whose random feedback is in the reverse pass.
        values: the arrays of the step.
        exits: zeros, one per hidden leaf.
        extra: as in `TimeAxes`, of what the rule is called with.
        names: its structure.

    Returns:
        results, values after the step, a function from the cotangents of `exits` and the last
        item to the signals of the rule, and that item: arrays.
    """
    backs = back_operands(graph, rule.feedback)
    outs = evaluate_single(graph, values, {}, ({}, {}), exits, ExitCotangents.READ, backs)
    results, after = after_step(graph, values, outs)
    one = lambda arrays: tuple(jnp.expand_dims(a, 0) for a in arrays)
    consts, args = ((False,) * len(a) for a in (values.consts, values.args))
    axes = TimeAxes(1, consts, args, None, extra, names)
    path = replace(values, hidden=one(values.hidden), others=one(values.others))
    source = signal_source(graph, rule, values, path, axes, backs)

    def signals(cotangents: Sequence[Array], read: Any) -> list[Array]:
        if source.signal is None:
            return list(cotangents)
        states, extra = read
        inputs = SignalInputs(graph.groups, one(cotangents), states, extra)
        return [jnp.asarray(a)[0] for a in source.signal(inputs)]

    return results, after, signals, (source.states, source.extra)
