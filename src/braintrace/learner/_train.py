"""Weights that learn while the sequence runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jaxpr import fingerprint
from .._online import scan_blocks
from ..rules import Rule
from ._around import Around
from ._blocks import Tick, block_gradient, only_ours, places_of
from ._optimizers import Optimizer
from ._sequences import leaves_of, states_of, values_of, write_leaves

WAITING = 8  # steps that wait beside a trace before they are folded in


def train(
    learner: Any,
    plan: Around,
    sequences: Any,
    mask: Any,
    weights: Any,
    optimizer: Optimizer,
    per_update: int,
    reduction: str,
    tick: Tick | None,
) -> Any:
    """Update the weights after every `per_update` calls of the step function.

    Returns:
        What the step function returned, stacked over its calls; None if a weight is a state of
        the step.
    """
    states, _ = states_of(weights)
    places = [i for state in states for i in places_of(plan, state)]
    changed = (*plan.hidden, *plan.others, *plan.outer)
    if {i for i in places if i is not None} & set(changed):
        return None
    leaves, rule = jax.tree.leaves(sequences), learner.rule
    graph, single = plan.marker.graph, learner.vjp_method == "single-step"
    group = _group(rule, graph, per_update * plan.window)

    def run(consts, optimizer_consts, leaves, mask, still, theta, moving, traces, fresh, own):
        def update(rule: Any) -> Callable:
            def one(carry, piece):
                theta, moving, traces, fresh, own = carry
                leaves, m = piece
                full = list(still)
                for i, value in zip((*changed, *places), (*moving, *theta), strict=True):
                    if i is not None:
                        full[i] = value
                chosen = [i for i in places if i is not None]
                grads, results, new, traces = block_gradient(
                    plan, rule, single, consts, leaves, m, full, chosen, traces, fresh, True
                )
                found = dict(zip(chosen, grads, strict=True))
                grads = [
                    jnp.zeros_like(t) if i is None else found[i]
                    for i, t in zip(places, theta, strict=True)
                ]
                if reduction == "mean":
                    weight = 1.0 / (results[0].size if m is None else jnp.maximum(m.sum(), 1))
                    grads = [g * jnp.asarray(weight, g.dtype) for g in grads]
                theta, own = optimizer(optimizer_consts, grads, theta, own)
                if tick is not None:
                    jax.debug.callback(tick, leaves[0].shape[0])
                moving = [new[i] for i in changed]
                return (theta, moving, traces, jnp.zeros_like(fresh), own), results

            return one

        def several(carry, piece):
            """As many updates as wait beside the traces."""
            count = piece[0][0].shape[0]
            pieces = jax.tree.map(
                lambda a: a.reshape((count // per_update, per_update, *a.shape[1:])), piece
            )
            theta, moving, traces, fresh, own = carry
            opened = rule.pending.open(graph.relations, traces, count * plan.window)
            carry = (theta, moving, opened, fresh, own)
            carry, results = lax.scan(update(rule.pending.rule), carry, pieces)
            theta, moving, opened, fresh, own = carry
            traces = rule.pending.fold(graph.relations, opened)
            results = jax.tree.map(lambda a: a.reshape((count, *a.shape[2:])), results)
            return (theta, moving, traces, fresh, own), results

        carry = (theta, moving, traces, fresh, own)
        count, arrays = leaves[0].shape[0], (leaves, mask)
        grouped = count // (group * per_update) * group * per_update if group > 1 else 0
        out = []
        for start, stop, size, step in (
            (0, grouped, group * per_update, several),
            (grouped, count, per_update, update(rule)),
        ):
            if start < stop:
                piece = jax.tree.map(lambda a, s=start, e=stop: a[s:e], arrays)
                carry, found = scan_blocks(step, carry, piece, stop - start, size)
                out.append(found)
        return carry, jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *out)

    traced = plan.traced
    key = (
        "train",
        fingerprint(traced.program, traced.consts),
        fingerprint(optimizer.program, optimizer.consts),
        plan.marker,
        (plan.hidden, plan.others, plan.outer, tuple(places)),
        (per_update, reduction, mask is None, single, tick),
    )
    donate = 7 if only_ours(learner.etraces.values()) else None
    call = learner.executor.compiled(key, run, donate)
    values = traced.values()
    theta = leaves_of(weights, values_of(weights))
    moving = [values[i] for i in changed]
    traces = [t.value for t in learner.etraces.values()]
    fresh = jnp.asarray(learner.is_fresh())
    carry, results = call(
        traced.consts,
        optimizer.consts,
        leaves,
        mask,
        values,
        theta,
        moving,
        traces,
        fresh,
        optimizer.own,
    )
    theta, moving, traces, _, own = carry
    traced.write(changed, moving)
    write_leaves(weights, theta)
    learner.advance_traces(traces, leaves[0].shape[0])
    optimizer.write(own)
    return results


def _group(rule: Any, graph: Any, steps: int) -> int:
    """How many updates, of so many steps each, wait before the traces are rewritten."""
    if not isinstance(rule, Rule) or rule.pending is None or steps > WAITING // 2:
        return 1
    fits = all(r.slots.table is None and r.operator.is_affine for r in graph.relations)
    return WAITING // steps if fits else 1
