"""The gradient of a sequence, block by block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import Program, Var, fingerprint
from ..graph import reach
from ._around import Around, run_block
from ._sequences import masked_gradient

BUDGET = 1 << 30  # bytes that the values of one block may take, on a device that does not say more
SHARE = 8  # or this part of the memory of one that does
MOST_STEPS = 256  # of a block: the trace is touched once per block, and longer ones gain little
FEW_STEPS = 32  # where there is next to no trace to touch: values that stay in the cache of a CPU

Tick = Callable[[Any], None]


def calls_per_block(
    plan: Around,
    count: int,
    traces: Any,
    block_size: int | None,
    budget: int | None,
    keep: bool = True,
) -> int:
    """How many calls of the step function make a block, of `count` in all.

    Args:
        plan: the step function.
        count: calls in the sequence.
        traces: the traces that a block touches.
        block_size: steps per block that the user asked for.
        budget: bytes that the values of one block may take.
        keep: whether traces are wanted afterwards; if not, one block builds none at all.
    """
    if block_size is not None:
        return max(1, min(count, block_size // plan.window))
    size = step_bytes(plan)
    light = jax.default_backend() == "cpu" and _nbytes(traces) < 4 * size
    steps = min(FEW_STEPS, MOST_STEPS) if light else MOST_STEPS
    fits = (_budget() if budget is None else budget) // (plan.window * size)
    if not keep and not light and count <= fits:
        return count
    most = max(1, min(count, fits, max(1, steps // plan.window)))
    blocks = -(-count // most)
    equal = [n for n in range(-(-count // blocks), 0, -1) if count % n == 0]
    # Blocks of one size are one program; a divisor that is not much smaller saves the second.
    return equal[0] if 2 * equal[0] > most else -(-count // blocks)


def _nbytes(tree: Any) -> int:
    return sum(a.size * getattr(a.dtype, "itemsize", 4) for a in jax.tree.leaves(tree))


def _budget() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", SHARE * BUDGET) // SHARE


def step_bytes(plan: Around) -> int:
    """An estimate of the memory that one step of a block takes."""
    graph = plan.marker.graph
    step, tangent, outer = graph.step, graph.tangent, plan.traced
    params = {step.entry(leaf) for leaf in step.params}
    still = set(plan.inputs.params)
    total = _bytes(step.program, params) + _bytes(outer.program, still)
    # The tangent program has the inputs of the step, in order, and those of its tangents.
    inputs = zip(tangent.program.inputs, (*step.program.consts, *step.program.inputs), strict=False)
    total += _bytes(tangent.program, {v for v, of in inputs if of in params})
    for r in graph.relations:
        cells = prod(r.slots.shape) * r.slots.width
        total += 4 * cells * np.dtype(r.slots.dtype).itemsize
        if r.slots.table is not None:
            total += 2 * r.slots.table.index.size * np.dtype(r.slots.dtype).itemsize
    return max(total, 1)


def _bytes(program: Program, still: Collection[Var]) -> int:
    """The size of all values that depend on more than the constants and `still`."""
    moving = reach(program, {v: 1 for v in program.inputs if v not in still}, differentiable=False)
    outputs = (v for e in program.equations for v in e.outputs if v in moving)
    return sum(v.size * getattr(v.dtype, "itemsize", 4) for v in outputs)


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
    own_signal = getattr(rule, "signal", None) is not None
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
        return in_sections(step, carry, (leaves, mask), count, per_block)

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


def in_sections(step: Callable, carry: Any, arrays: Any, count: int, size: int) -> Any:
    """Scan `step` over pieces of `size` entries, and apply it to a shorter last one."""
    full, rest = divmod(count, size)
    out = []
    if full == 1:
        carry, found = step(carry, jax.tree.map(lambda a: a[:size], arrays))
        out.append(found)
    elif full:
        split = lambda a: a[: full * size].reshape((full, size, *a.shape[1:]))
        carry, found = lax.scan(step, carry, jax.tree.map(split, arrays))
        out.append(jax.tree.map(lambda a: a.reshape((full * size, *a.shape[2:])), found))
    if rest:
        carry, found = step(carry, jax.tree.map(lambda a: a[full * size :], arrays))
        out.append(found)
    return carry, jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *out)


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
