"""The loop over a sequence: outputs, gradients or updates, block by block.

A gradient is training without an optimizer; a window is a part of a block in which nothing is cut;
a step is a block of one. All of it is a pure function of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jaxpr import trace
from ..engine import OWN, BlockResult, TimeAxes, map_steps, run_block
from ..graph import affine_equations
from ._blocks import calls_per_block, joined, scan_blocks, step_bytes
from ._plan import Plan

Array = jax.Array
Tick = Callable[[Any], None]
WAITING = 8  # steps that wait beside a trace before they are folded in


@dataclass(frozen=True, slots=True)
class Position:
    """Where a sequence goes on: states, traces, and the number of steps since these were zero."""

    hidden: tuple[Any, ...]
    others: tuple[Any, ...]
    traces: list[Any]
    steps: Any


@dataclass(frozen=True, slots=True)
class Stream:
    """The arrays of a sequence, each with a leading axis of time; without any it is one step."""

    inputs: tuple[Any, ...]
    targets: Any = ()
    mask: Any = None
    extra: Any = None

    @property
    def length(self) -> int:
        leaves = jax.tree.leaves(self)
        return leaves[0].shape[0] if leaves else 1

    def at(self, start: int, stop: int) -> Stream:
        return jax.tree.map(lambda a: a[start:stop], self)


@dataclass(frozen=True, slots=True)
class Weights:
    """Arrays of the parameters: those to differentiate, and the others."""

    trained: list[Any]
    fixed: list[Any]


for _record in (Position, Stream, Weights):
    _names = [f.name for f in fields(_record)]
    jax.tree_util.register_dataclass(_record, data_fields=_names, meta_fields=[])


@dataclass(frozen=True, slots=True)
class Options:
    """How a sequence is run.

    Attributes:
        window: steps in which reverse mode is complete, None for single steps.
        block_size: steps per block, None to choose.
        memory_budget: bytes that the values of one block may take.
        keep: whether the traces afterwards are wanted.
        tick: called on the host after every block with the number of steps in it.
        fresh: whether the traces before the first step are known to be zero.
    """

    window: int | None = None
    block_size: int | None = None
    memory_budget: int | None = None
    keep: bool = True
    tick: Tick | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Updates:
    """How weights change: `update(grads, trained, own) -> (trained, own)` every so many steps."""

    update: Callable[[list[Any], list[Any], Any], tuple[list[Any], Any]]
    every: int


Loss = Callable[..., tuple[Array, Any]]  # (out, *targets) -> (loss, aux)


def run_steps(
    plan: Plan,
    record: Any,
    weights: Weights,
    at: Position,
    stream: Stream,
    window: int | None,
    *,
    keep: bool = True,
    fresh: Any = None,
    chosen: Any = None,
) -> tuple[BlockResult, Position]:
    """Run the engine over one block; the position after it."""
    graph, length = plan.graph, stream.length
    args = [True] * len(stream.inputs) + [False] * len(weights.fixed)
    given = {} if stream.extra is None else dict(stream.extra)
    timed = jax.tree.map(lambda a: True, given)
    if plan.rule.values:
        given[OWN], timed[OWN] = plan.rule.values, jax.tree.map(lambda a: False, plan.rule.values)
    axes = TimeAxes(
        length,
        tuple(False for _ in plan.consts),
        tuple(args),
        window,
        tuple(jax.tree.leaves(timed)),
        jax.tree.structure(given),
    )
    values = plan.values(
        weights.trained,
        weights.fixed,
        (at.hidden, at.others),
        stream.inputs,
        tuple(jax.tree.leaves(given)),
    )
    ran = run_block(graph, record, values, at.traces, axes, keep=keep, fresh=fresh, chosen=chosen)
    last = lambda arrays: tuple(a[-1] for a in arrays)
    steps = lax.stop_gradient(at.steps + length)
    return ran, Position(last(ran.after.hidden), last(ran.after.others), ran.traces, steps)


def run_outputs(
    plan: Plan, weights: Weights, at: Position, stream: Stream, options: Options
) -> tuple[Position, list[Any]]:
    """The outputs of all steps; differentiated, the sum of the steps' online gradients."""

    def block(at: Position, stream: Stream) -> tuple[Position, list[Any]]:
        window = None if options.window is None else min(options.window, stream.length)
        ran, at = run_steps(plan, plan.rule.record, weights, at, stream, window)
        return at, ran.outs

    at = replace(at, steps=jnp.asarray(at.steps))
    out = []
    for part, window in _windows(stream, options.window):
        size = _block_steps(plan, part.length, window or 1, options)
        at, outs = scan_blocks(block, at, part, part.length, size)
        out.append(outs)
    return at, joined(out)


def run_gradient(
    plan: Plan,
    loss: Loss,
    weights: Weights,
    at: Position,
    stream: Stream,
    options: Options,
    record: Any = None,
) -> tuple[list[Any], Position, tuple[Any, Any]]:
    """The gradient of the summed losses; the position after; losses and aux of all steps."""
    record = plan.rule.record if record is None else record
    at = replace(at, steps=jnp.asarray(at.steps))
    totals = [jnp.zeros_like(p) for p in weights.trained]
    out = []
    parts = _windows(stream, options.window)
    for part, window in parts:
        size = _block_steps(plan, part.length, window or 1, options)
        whole = len(parts) == 1 and size == part.length
        keep = options.keep or not whole  # one block of which no trace is wanted builds none

        def block(carry, piece, window=window, keep=keep, known=whole and options.fresh):
            totals, at = carry
            start = True if known else at.steps == 0
            grads, at, results = block_gradient(
                plan, record, loss, weights, at, piece, window, keep, start
            )
            _advance(options.tick, piece)
            return ([t + g for t, g in zip(totals, grads, strict=True)], at), results

        (totals, at), results = scan_blocks(block, (totals, at), part, part.length, size)
        out.append(results)
    return totals, at if options.keep else _ended(plan, at), joined(out)


def run_updates(
    plan: Plan,
    loss: Loss,
    weights: Weights,
    at: Position,
    stream: Stream,
    options: Options,
    updates: Updates,
    own: Any,
) -> tuple[list[Any], Any, Position, tuple[Any, Any]]:
    """Change the weights after every so many steps; `own` is the optimizer's state.

    Returns:
        trained parameters, the optimizer's own state, the position after, losses and aux.
    """
    every, inner = updates.every, replace(options, keep=True, fresh=False)

    def once(record: Any) -> Callable:
        def block(carry, piece):
            trained, own, at = carry
            now = replace(weights, trained=trained)
            grads, at, results = run_gradient(plan, loss, now, at, piece, inner, record)
            return (*updates.update(grads, trained, own), at), results

        return block

    def several(carry, piece):
        """As many updates as wait beside the traces."""
        trained, own, at = carry
        length, pending = piece.length, plan.rule.record.pending
        assert pending is not None
        opened = pending.open(plan.graph.relations, at.traces, length)
        pieces = jax.tree.map(lambda a: a.reshape((length // every, every, *a.shape[1:])), piece)
        carry = (trained, own, replace(at, traces=opened))
        (trained, own, at), results = lax.scan(once(pending.rule), carry, pieces)
        folded = pending.fold(plan.graph.relations, at.traces)
        results = jax.tree.map(lambda a: a.reshape((length, *a.shape[2:])), results)
        return (trained, own, replace(at, traces=folded)), results

    at = replace(at, steps=jnp.asarray(at.steps))
    carry, out = (weights.trained, own, at), []
    group = _waiting(plan, every) * every
    grouped = stream.length // group * group if group > every else 0
    parts = ((0, grouped, group, several), (grouped, stream.length, every, once(plan.rule.record)))
    for start, stop, size, block in parts:
        if start < stop:
            piece = stream.at(start, stop)
            carry, results = scan_blocks(block, carry, piece, stop - start, size)
            out.append(results)
    trained, own, at = carry
    return trained, own, at if options.keep else _ended(plan, at), joined(out)


def _ended(plan: Plan, at: Position) -> Position:
    """A position whose traces are wanted no more."""
    return replace(at, traces=plan.zeros(), steps=jnp.zeros_like(at.steps))


def block_gradient(
    plan: Plan,
    record: Any,
    loss: Loss,
    weights: Weights,
    at: Position,
    stream: Stream,
    window: int | None,
    keep: bool,
    fresh: Any,
) -> tuple[list[Any], Position, tuple[Any, Any]]:
    """The gradient of one block by the trained parameters."""
    length, mask = stream.length, stream.mask
    active = chosen = index = None
    own_signal = record.signal is not None

    def one(out: list[Any], targets: Any) -> tuple[Any, Any]:
        return loss(jax.tree.unflatten(plan.out_tree, out), *targets)

    def losses(outs: list[Any], targets: Any) -> tuple[Any, Any]:
        return map_steps(length, one, outs, targets)

    if mask is not None:
        size = window or 1
        active = jnp.any(mask.reshape((length // size, size)) != 0, axis=1)
        if own_signal or not _adds_constants(plan, one, stream.targets):
            chosen = jnp.where(active, jnp.arange(length // size), jnp.argmax(active))
            index = (chosen[:, None] * size + jnp.arange(size)).reshape(-1)

    def total(trained: list[Any]) -> tuple[Any, Any]:
        now = replace(weights, trained=trained)
        ran, new = run_steps(
            plan, record, now, at, stream, window, keep=keep, fresh=fresh, chosen=chosen
        )
        results = losses(ran.outs, stream.targets)
        if mask is None:
            return jnp.sum(results[0]), (new, results)
        targets = stream.targets
        if index is not None:
            targets = jax.tree.map(lambda a: a[index], targets)
        counted = losses(ran.credited[0], targets)[0]
        return jnp.sum(jnp.where(mask == 0, 0, mask * counted)), (new, results)

    grads, (new, results) = jax.grad(total, has_aux=True)(weights.trained)
    if active is not None:
        grads = [masked_gradient(g, active.any(), own_signal) for g in grads]
    return grads, new, results


def masked_gradient(gradient: Array, counts: Array, own_signal: bool) -> Array:
    """The gradient of steps of which one `counts`, or none: then NaN is nothing.

    A loss that does not count has a gradient of zeros, and penalties; but not a signal beside it.
    """
    return jnp.where(counts if own_signal else counts | jnp.isfinite(gradient), gradient, 0)


def _adds_constants(plan: Plan, loss: Callable, targets: Any) -> bool:
    """Whether a backward rule in the loss adds a constant, which counts at its own step only."""
    step = plan.graph.step
    outs = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in step.program.outputs[: step.n_outs]]
    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), targets)
    leaves, tree = jax.tree.flatten((outs, first))
    program, _ = trace(lambda *a: jax.tree.leaves(loss(*jax.tree.unflatten(tree, a))), *leaves)
    return bool(affine_equations(program, program.outputs))


def _windows(stream: Stream, window: int | None) -> list[tuple[Stream, int | None]]:
    """Parts of a sequence that are whole windows, and the shorter last one."""
    if window is None:
        return [(stream, None)]
    length = stream.length
    whole = length // window * window
    parts = [(0, whole, window), (whole, length, length - whole)]
    return [(stream.at(a, b), size) for a, b, size in parts if a < b]


def _block_steps(plan: Plan, length: int, window: int, options: Options) -> int:
    """How many steps make a block."""
    sizes = (options.block_size, options.memory_budget, options.keep)
    size = step_bytes(plan.graph)
    return window * calls_per_block(size, window, length // window, plan.trace_shapes, *sizes)


def _waiting(plan: Plan, steps: int) -> int:
    """How many updates, of so many steps each, wait before the traces are rewritten."""
    if plan.rule.record.pending is None or steps > WAITING // 2:
        return 1
    fits = all(r.slots.table is None and r.operator.is_affine for r in plan.graph.relations)
    return WAITING // steps if fits else 1


def _advance(tick: Tick | None, stream: Stream) -> None:
    if tick is not None:
        jax.debug.callback(tick, stream.length)
