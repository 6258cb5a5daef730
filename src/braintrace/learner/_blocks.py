"""The gradient of a sequence, block by block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._jaxpr import fingerprint
from .._online import calls_per_block, masked_gradient, scan_blocks, step_bytes, varying_bytes
from ._around import Around, run_block

Tick = Callable[[Any], None]


def calls_in_block(plan: Around, count: int, traces: Any, options: tuple) -> int:
    """How many calls of the step function make a block, of `count` in all.

    `options` are the steps per block that the user asked for, bytes that the values of one block
    may take, and whether traces are wanted afterwards.
    """
    outer = varying_bytes(plan.traced.program, set(plan.inputs.params))
    size = step_bytes(plan.marker.graph) + outer
    return calls_per_block(size, plan.window, count, traces, *options)


def block_gradient(
    plan: Around,
    rule: Any,
    single: bool,
    consts: Sequence[Any],
    leaves: list[Any],
    mask: jax.Array | None,
    states: list[Any],
    chosen: Sequence[int],
    traces: Any,
    fresh: Any,
    keep: bool,
) -> tuple[list[Any], list[Any], list[Any], Any]:
    """The gradients of one block by the chosen states.

    Returns:
        gradients, results of the step function, all states and the traces after the block.
    """
    active, instead = None, None
    own_signal = rule.signal is not None
    if mask is not None:
        count = leaves[0].shape[0]
        active = jnp.any(mask.reshape((count, -1)) != 0, axis=1)
        if own_signal or not plan.penalised:  # a penalty counts where it is, and once
            instead = jnp.where(active, jnp.arange(count), jnp.argmax(active))

    def loss_of(theta):
        full = list(states)
        for i, value in zip(chosen, theta, strict=True):
            full[i] = value
        results, credited, new, after = run_block(
            plan,
            rule,
            consts,
            leaves,
            full,
            traces,
            single=single,
            keep=keep,
            fresh=fresh,
            chosen=instead,
        )
        loss = credited[0]
        total = jnp.sum(loss if mask is None else jnp.where(mask == 0, 0, mask * loss))
        return total, (results, new, after)

    theta = [states[i] for i in chosen]
    grads, (results, new, after) = jax.grad(loss_of, has_aux=True)(theta)
    if active is not None:
        grads = [masked_gradient(g, active.any(), own_signal) for g in grads]
    return grads, results, new, after


def gradient(
    learner: Any,
    plan: Around,
    sequences: Any,
    mask: jax.Array | None,
    weights: list[brainstate.State],
    per_block: int,
    keep: bool,
    tick: Tick | None = None,
) -> tuple[list[Any], Any] | None:
    """Sum the gradients of a sequence in blocks, and advance the learner's states.

    Args:
        learner: the learner that the step function calls.
        plan: the step function.
        sequences: arguments of the step function, stacked over its calls.
        mask: weights of the losses, of the shape of the losses; None counts all.
        weights: states to differentiate by.
        per_block: calls per block.
        keep: whether the traces afterwards are wanted.
        tick: called on the host after every block with the number of calls in it.

    Returns:
        Gradients per state, and what the step function returned, stacked over its calls; None if
        a weight is a state of the step.
    """
    changed = (*plan.hidden, *plan.others, *plan.outer)
    places = [places_of(plan, state) for state in weights]
    chosen = [i for numbers in places for i in numbers if i is not None]
    if set(chosen) & set(changed):
        return None
    leaves = jax.tree.leaves(sequences)
    single, rule = learner.vjp_method == "single-step", learner.rule

    count = leaves[0].shape[0]
    fresh = learner.is_fresh()
    at_once = count == per_block and fresh is True  # nothing of the past is even read

    def run(consts, leaves, mask, states, traces, fresh):
        def block(carry, piece, keep):
            totals, moving, traces, fresh = carry
            full = list(states)
            for i, value in zip(changed, moving, strict=True):
                full[i] = value
            leaves, m = piece
            past = at_once or fresh
            grads, results, new, traces = block_gradient(
                plan, rule, single, consts, leaves, m, full, chosen, traces, past, keep
            )
            if tick is not None:
                jax.debug.callback(tick, leaves[0].shape[0])
            totals = [t + g for t, g in zip(totals, grads, strict=True)]
            return (totals, [new[i] for i in changed], traces, jnp.zeros_like(fresh)), results

        totals = [jnp.zeros_like(states[i]) for i in chosen]
        carry = (totals, [states[i] for i in changed], traces, fresh)
        step = lambda carry, piece: block(carry, piece, keep or count > per_block)
        return scan_blocks(step, carry, (leaves, mask), count, per_block)

    traced = plan.traced
    key = (
        "gradient",
        fingerprint(traced.program, traced.consts),
        plan.marker,
        (plan.hidden, plan.others, plan.outer, tuple(chosen)),
        (count, per_block, keep, mask is None, single, tick, at_once),
    )
    donate = 4 if only_ours(learner.etraces.values()) else None
    call = learner.executor.compiled(key, run, donate)
    states, traces = traced.values(), [t.value for t in learner.etraces.values()]
    (totals, moving, traces, _), results = call(
        traced.consts, leaves, mask, states, traces, jnp.asarray(fresh)
    )
    traced.write(changed, moving)
    learner.advance_traces(traces, count)
    found = dict(zip(chosen, totals, strict=True))
    return [_tree(s, n, found) for s, n in zip(weights, places, strict=True)], results


def only_ours(states: Iterable[brainstate.State]) -> bool:
    """Whether nobody else holds the arrays of these states, so that their memory may be reused."""
    unshared = brainstate.ShortTermState({"": jnp.zeros(())})
    most = _holders(unshared)
    return all(held <= limit for s in states for held, limit in zip(_holders(s), most, strict=True))


def _holders(state: brainstate.State) -> tuple[int, int]:
    value = state.value
    leaves = jax.tree.leaves(value)
    return sys.getrefcount(value), max(map(sys.getrefcount, leaves), default=0)


def places_of(plan: Around, state: brainstate.State) -> list[int | None]:
    """Where the leaves of a state are among those of the step function."""
    found = {leaf.index: i for i, leaf in enumerate(plan.traced.leaves) if leaf.state is state}
    return [found.get(i) for i in range(len(jax.tree.leaves(state.value)))]


def _tree(state: brainstate.State, numbers: list[int | None], found: dict[int, Any]) -> Any:
    leaves, tree = jax.tree.flatten(state.value)
    grads = [
        jnp.zeros_like(a) if n is None else found[n] for a, n in zip(leaves, numbers, strict=True)
    ]
    return jax.tree.unflatten(tree, grads)
