"""What reaches the relations from the losses of a block, or from a signal of the rule's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import Graph, split_cotangents
from ..rules import ExitCotangents, SignalInputs, Signals, square
from ..rules import mix as carried_by
from ._evaluate import Values, evaluate_plain
from ._map_steps import map_steps
from ._time import TimeAxes, chosen_of, merged

Array = jax.Array
OWN = ""  # the name, among what a rule is given, of arrays that are no sequences


@dataclass(frozen=True, slots=True)
class SignalSource:
    """Which exit cotangents a rule gets, and a signal of its own with what that reads."""

    exits: ExitCotangents | None
    signal: Any
    states: Any = ()
    extra: Any = None


def signal_source(graph, rule, values, path, axes, backs) -> SignalSource:
    signal = rule.signal
    if signal is None and rule.feedback is not None and not backs:
        signal = square(rule.feedback)
    if signal is None:
        return SignalSource(rule.exit_cotangents, None)
    extra = {}
    if axes.names is not None:
        given = jax.tree.unflatten(axes.names, values.extra)
        own = given.pop(OWN, {})
        timed = jax.tree.unflatten(axes.names, axes.extra)
        timed.pop(OWN, None)
        longer = lambda a, t: a if t else jnp.broadcast_to(a, (axes.length, *jnp.shape(a)))
        extra = {**jax.tree.map(longer, given, timed), **own}
    states = path.hidden
    if axes.window is None:
        states = _after(graph, path, axes)
    elif axes.window > 1:
        states = tuple(h[:: axes.window] for h in path.hidden)
    return SignalSource(ExitCotangents.READ, signal, states, extra)


def _after(graph: Graph, path: Values, axes: TimeAxes) -> tuple[Array, ...]:
    """The states after every step."""

    def step(consts, args, hidden, others):
        consts, args = merged(path.consts, axes.consts, consts), merged(path.args, axes.args, args)
        outs = evaluate_plain(graph, Values(consts, args, path.params, hidden, others))
        return tuple(outs[leaf.output] for leaf in graph.step.hidden)

    sliced = (chosen_of(path.consts, axes.consts), chosen_of(path.args, axes.args))
    return map_steps(axes.length, step, *sliced, path.hidden, path.others)


def signals_of(graph: Graph, source, every, chosen, steps, lam, taps, exits) -> list[Signals]:
    masked = chosen is not None
    if source.signal is not None:
        return _replaced(graph, source, every, chosen, lam, taps, exits)
    entry = _at_slots(graph, lam)
    leaving = _at_slots(graph, exits) if exits else None
    out = []
    for i, (r, s) in enumerate(zip(graph.relations, steps, strict=True)):
        at, new = entry[i], None if leaving is None else leaving[i]
        if new is not None and source.exits is not ExitCotangents.READ:
            n = r.slots.width
            back = jnp.swapaxes(s.D[..., :n, :n], -1, -2)
            moved = carried_by(back, new, r.slots.table is None)
            silent = (new == 0).all(-1, keepdims=True) if masked else False
            at = at + jnp.where(silent, 0, moved)
        out.append(Signals(at, taps[r.index], every, masked, new))
    return out


def _replaced(graph: Graph, source, every, chosen, lam, taps, exits) -> list[Signals]:
    """Signals of the rule's own: at the new states, or where a window enters."""
    given = exits if every is None else lam
    inputs = SignalInputs(graph.groups, given, source.states, source.extra)
    found = [jnp.asarray(a) for a in source.signal(inputs)]
    if chosen is not None:
        counts = chosen == jnp.arange(len(chosen))
        found = [jnp.where(counts.reshape((-1, *(1,) * (a.ndim - 1))), a, 0) for a in found]
    at = _at_slots(graph, found)
    out = []
    for r, a in zip(graph.relations, at, strict=True):
        if every is None:
            none = jnp.zeros_like(taps[r.index])
            out.append(Signals(jnp.zeros_like(a), none, every, chosen is not None, exits=a))
        else:
            out.append(Signals(a, taps[r.index], every, chosen is not None))
    return out


def _at_slots(graph: Graph, cotangents: Sequence[Array]) -> list[Array]:
    """Cotangents of states, with a leading axis, at the slots of every relation."""

    def one(*leaves):
        lam = split_cotangents(graph.tangent.components, leaves)
        dtype = jnp.result_type(*lam)
        return [jnp.stack([pick(lam, dtype) for pick in r.slots.at], -1) for r in graph.relations]

    return map_steps(cotangents[0].shape[0], one, *cotangents)
