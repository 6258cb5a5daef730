"""A block of steps whose ordinary derivative is the learning rule's gradient.

First the states are run through the steps (`_recurrence`). Then everything else happens for all
steps at once, at the states they started from: results and losses, what the rule observes (x, f and
D of each relation), and reverse mode within each step or window. The memory of a rule enters as an
*anchor*: an identity on the states where steps or windows enter, and zeros added to the outputs of
operators; the rule computes gradients of the parameters from the cotangents of both. Nothing goes
on to the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph import Graph
from ..ops import ETPPrimitive
from ._anchor import depending_on, floating_of, once, with_all_cotangents
from ._evaluate import (
    Backs,
    after_step,
    back_operands,
    evaluate_single,
    evaluate_window,
    stored_exits,
)
from ._loops import as_running, running_placement
from ._mixture import passes_of
from ._placement import pinned
from ._recurrence import StepValues, unroll
from ._rule import Arrived, Fresh, Rule, SignalSource, Steps, Trace
from ._signals import signal_source
from ._values import Block, TimeAxes, Values, map_steps, merged, timed_of

Array = jax.Array


@dataclass(frozen=True, slots=True)
class LaterTraces:
    """Traces to be advanced once the gradients of the block have read them, in their own memory."""

    traces: list[Trace]
    path: Values
    ys: dict[int, Array]
    observed: Any
    graph: Graph
    rule: Rule
    axes: TimeAxes

    def after(self, gradients: Sequence[Array], fresh: Fresh) -> list[Trace]:
        """The traces after the block.

        XLA copies an array that a loop writes and that is also read, unless the order is certain:
        the tails get a zero that comes from the gradients.
        """
        late = [jnp.real(g.ravel()[0]) > jnp.inf for g in gradients if g.size]
        zero = sum(late[1:], late[0]) if late else jnp.zeros((), bool)

        def put(s: Any) -> Any:
            if not isinstance(s, Steps):
                return s
            f, slots = jax.tree.map(lambda a: a + zero.astype(a.dtype), (s.f, s.slots))
            return s._replace(f=f, slots=slots)

        observed = jax.tree.map(put, self.observed, is_leaf=lambda s: isinstance(s, Steps))
        block = Block(self.path, self.axes, self.ys)
        return self.rule.advance(self.graph, block, self.traces, observed, fresh)


jax.tree_util.register_dataclass(
    LaterTraces,
    data_fields=["traces", "path", "ys", "observed"],
    meta_fields=["graph", "rule", "axes"],
)


@dataclass(frozen=True, slots=True)
class BlockResult:
    """A block that was run; all but `traces` with a leading axis of steps.

    `before` and `after` are the values before and after each step, `outs` the results. `credited`
    are results and new values to compute the counted losses from: the same, unless only some
    windows are counted.
    """

    outs: list[Array]
    before: Values
    after: Values
    traces: list[Trace] | LaterTraces
    credited: tuple[list[Array], Values]


def run_block(
    graph: Graph,
    rule: Rule,
    values: Values,
    traces: Sequence[Trace],
    axes: TimeAxes,
    *,
    keep: bool = True,
    fresh: Fresh = None,
    substitute: Array | None = None,
    later: bool = False,
) -> BlockResult:
    """Run the model through a block of steps.

    Args:
        graph: the analysed step.
        rule: the learning rule.
        values: arrays of the steps, the states as they are before the first one.
        traces: the rule's traces before the first step.
        axes: how the arrays are laid out in time.
        keep: whether the traces after the last step are wanted; else they are not computed.
        fresh: whether the traces are zero; None if it is uncertain.
        substitute: the index of the window (or step) to evaluate in place of each one where losses
            are counted, if some are not: what they compute must not count, even if it is NaN.
        later: whether the caller advances the traces (`LaterTraces`), if the steps are taken at
            once.
    """
    before: list[Trace] = lax.stop_gradient(list(traces))
    placement = running_placement()
    if placement is not None:
        places = placement.traces(graph, rule, before)
        before = pinned(before, places)
        hidden = pinned(list(values.hidden), placement.states(graph, graph.step.hidden))
        values = replace(values, hidden=tuple(hidden))
    in_order = (graph.effects or graph.unmapped) and axes.window is None
    if (rule.one_by_one or in_order) and axes.length > (axes.window or 1):
        return _one_by_one(graph, rule, values, before, axes, fresh)
    if rule.entry_only:
        axes, substitute = replace(axes, window=axes.length), None
    block = _unrolled(graph, lax.stop_gradient(values), axes)
    observed = rule.observe(graph, block, before)
    after: list[Trace] | LaterTraces = before
    if keep and later:
        after = LaterTraces(before, block.path, block.ys, observed, graph, rule, axes)
    elif keep:
        after = rule.advance(graph, block, before, observed, fresh)
        after = after if placement is None else pinned(after, places)
    memory = _Memory(graph, rule, before, observed, fresh)
    flat = _all_results(memory, values, block, None)
    outs, new = after_step(graph, values, flat)
    credited = outs, new
    if substitute is not None:
        credited = after_step(graph, values, _all_results(memory, values, block, substitute))
    if graph.step.penalised:
        *_, penalty, other = flat
        results, after_each = _penalised(credited, penalty)
        # Not called where no loss reads a state: backpropagation would not run these rules either.
        hidden = _penalised(after_each.hidden, other)
        credited = results, replace(after_each, hidden=hidden)
        outs, new = credited if substitute is None else (outs, new)
    return BlockResult(outs, block.path, new, after, credited)


@jax.custom_vjp
def _penalised(tree: Any, penalty: Array) -> Any:
    """Results whose derivative has that of the penalty of every step in it."""
    return tree


_penalised.defvjp(
    lambda tree, penalty: (tree, penalty), lambda penalty, ct: (ct, jnp.ones_like(penalty))
)


def _one_by_one(
    graph: Graph, rule: Rule, values: Values, traces: list[Trace], axes: TimeAxes, fresh: Fresh
) -> BlockResult:
    """For steps or windows that must happen once and in order."""
    size = axes.window or 1
    arrays = (values.consts, values.args, values.extra)
    flags = (axes.consts, axes.args, axes.extra)

    def body(carry, sliced):
        hidden, others, traces, fresh = carry
        consts, args, extra = map(merged, arrays, flags, sliced)
        now = Values(consts, args, values.params, hidden, others, extra)
        ran = run_block(graph, rule, now, traces, replace(axes, length=size), fresh=fresh)
        results = (ran.outs, *((v.hidden, v.others) for v in (ran.before, ran.after)))
        last = jax.tree.map(lambda a: a[-1], results[2])
        return (*last, ran.traces, None if fresh is None else jnp.zeros((), bool)), results

    sliced = _split(list(map(timed_of, arrays, flags)), size)
    start: Any = (values.hidden, values.others, traces, fresh)
    (*_, traces, _), results = lax.scan(body, start, sliced, axes.length // size)
    outs, before, after = _joined(with_all_cotangents(results))
    first, last = (replace(values, hidden=h, others=o) for h, o in (before, after))
    return BlockResult(outs, first, last, traces, (outs, last))


def _split(arrays: Any, size: int) -> Any:
    """Steps as (windows, steps of a window)."""
    split = lambda a: a.reshape((a.shape[0] // size, size, *a.shape[1:]))
    return jax.tree.map(split, arrays)


def _joined(arrays: Any) -> Any:
    return jax.tree.map(lambda a: a.reshape((a.shape[0] * a.shape[1], *a.shape[2:])), arrays)


# --------------------------------------------------------------------------------- along the time


def _unrolled(graph: Graph, values: Values, axes: TimeAxes) -> Block:
    """The states before every step."""
    step, program = graph.step, graph.step.program
    leaves, start = (*step.hidden, *step.others), (*values.hidden, *values.others)
    if axes.length == 1:
        one = lambda arrays: tuple(jnp.expand_dims(a, 0) for a in arrays)
        path = replace(values, hidden=one(values.hidden), others=one(values.others))
        return Block(path, axes, {})
    env = StepValues()
    variables = (*program.consts, *program.inputs[: step.n_args])
    arrays, flags = (*values.consts, *values.args), (*axes.consts, *axes.args)
    for var, value, timed in zip(variables, arrays, flags, strict=True):
        env.add(var, value, timed)
    for leaf, value in zip(step.params, values.params, strict=True):
        env.add(step.entry(leaf), value, False)
    carried = [(step.entry(leaf), step.exit(leaf)) for leaf in leaves]
    outputs = {
        i: s.y
        for i, s in enumerate(graph.sites)
        if not s.levels and isinstance(s.equation.primitive, ETPPrimitive)
    }
    after = stored_exits(graph)
    unroll(program, env, carried, start, axes.length, list(outputs.values()), list(after.values()))

    entries = lambda leaves: tuple(env.all_steps(step.entry(a), axes.length) for a in leaves)
    hidden, others = map(entries, (step.hidden, step.others))
    ys = {i: env.timed[y] for i, y in outputs.items() if y in env.timed}
    new = {i: env.timed[var] for i, var in after.items() if var in env.timed}
    return Block(replace(values, hidden=hidden, others=others), axes, ys, new)


# --------------------------------------------------------------------------------------- anchors


@dataclass(frozen=True, slots=True)
class _Memory:
    """A rule on a graph, with its traces before a block and what it observed of it."""

    graph: Graph
    rule: Rule
    traces: list[Trace]
    observed: Any
    fresh: Fresh


def _all_results(
    memory: _Memory, values: Values, block: Block, substitute: Array | None
) -> list[Array]:
    """All results of all steps, with the derivatives of all reverse passes of a mixture."""
    graph, rule = memory.graph, memory.rule
    if not rule.parts:
        return _results(memory, values, block, substitute)
    total: list[Array] | None = None
    for own in reversed(passes_of(graph, rule, memory.traces, memory.observed, block)):
        of_pass = _Memory(own.graph, own.rule, own.traces, own.observed, memory.fresh)
        instead = own.substitute(substitute, block.axes)
        results = own.results(_results(of_pass, own.values(values), own.block, instead))
        total = results if total is None else _with_derivative(total, results)
    assert total is not None
    return total


def _results(
    memory: _Memory, values: Values, block: Block, substitute: Array | None
) -> list[Array]:
    """All results of all steps, differentiable as the rule asks."""
    graph, rule, axes, path = memory.graph, memory.rule, block.axes, block.path
    backs = back_operands(graph, rule.feedback)
    source = signal_source(graph, rule, values, path, axes, backs)
    starts, taps, exits = _anchored(memory, source, values, block, substitute)
    per_step = (axes.slices(values), path.others, taps, (block.ys, block.new))
    if substitute is not None:
        size = axes.window or 1
        index = (substitute[:, None] * size + jnp.arange(size)).reshape(-1)
        starts = jax.tree.map(lambda a: a[substitute], starts)
        exits, per_step = jax.tree.map(lambda a: a[index], (exits, per_step))
    if axes.window is not None:
        return _windows(memory, values, axes, starts, per_step, backs)

    def single(hidden, exits, sliced):
        slices, others, taps, computed = sliced
        now = axes.at(values, slices, hidden, others)
        return evaluate_single(graph, now, taps, computed, exits or None, source.exits, backs)

    return map_steps(axes.length, single, starts, exits, per_step)


def _windows(
    memory: _Memory,
    values: Values,
    axes: TimeAxes,
    starts: Any,
    per_step: Any,
    backs: Backs | None,
) -> list[Array]:
    size, graph = axes.window, memory.graph
    assert size is not None

    def step(hidden, sliced):
        slices, others, taps, (ys, _) = sliced
        now = axes.at(values, slices, hidden, others)
        run = lambda now: evaluate_window(graph, now, taps, ys, backs)
        if not memory.rule.entry_only or size == 1:
            outs = run(now)
            return after_step(graph, now, outs)[1].hidden, outs
        # This window is a block, and no user chose its length. The parameters have a derivative
        # through all of it, what surrounds a step only that within the step: inputs and constants
        # are constant in `outs`, and everything else is in `within`, which XLA drops where nobody
        # asks for that derivative.
        constant = lax.stop_gradient
        outs = run(replace(now, args=constant(now.args), consts=constant(now.consts)))
        within = run(replace(constant(now), args=now.args, consts=now.consts))
        return after_step(graph, now, outs)[1].hidden, _with_derivative(outs, within)

    def window(hidden, sliced):
        if size == 1:
            outs = step(hidden, jax.tree.map(lambda a: a[0], sliced))[1]
            return jax.tree.map(lambda a: jnp.expand_dims(a, 0), outs)
        return with_all_cotangents(lax.scan(step, hidden, sliced, size)[1])

    return _joined(map_steps(axes.length // size, window, starts, _split(per_step, size)))


@jax.custom_jvp
def _with_derivative(values: Any, others: Any) -> Any:
    """`values`, with the derivative of `others`, which are the same, besides their own."""
    return values


@_with_derivative.defjvp
def _(primals: Any, tangents: Any) -> Any:
    add = lambda a, b: a if a.dtype == jax.dtypes.float0 else a + b
    return primals[0], jax.tree.map(add, *tangents)


def _anchored(
    memory: _Memory, source: SignalSource, values: Values, block: Block, substitute: Array | None
) -> tuple[Any, Any, Any]:
    """States where windows enter, zeros at the operators' outputs, and at the new states."""
    graph, rule, fresh = memory.graph, memory.rule, memory.fresh
    path, every, length = block.path, block.axes.window, block.axes.length
    starts = tuple(h if every in (None, 1) else h[::every] for h in path.hidden)
    relations = () if rule.entry_only else graph.relations
    if not relations and not rule.entry_only:
        return starts, {}, ()
    static = fresh is None or isinstance(fresh, bool)
    leaving = [(h.shape, h.dtype) for h in path.hidden] if source.exits and every is None else []

    def zeros(r):
        iterations = () if r.site.iterations is None else (r.site.iterations,)
        return jnp.zeros((length, *iterations, *r.operator.y.shape), r.operator.y.dtype)

    def points(params, starts, saved, live):
        taps = {r.index: zeros(r) for r in relations}
        exits = tuple(jnp.zeros(*like) for like in leaving)
        return depending_on((starts, taps, exits), params, saved)

    def forward(*primals):
        return points(*primals), primals

    def backward(residuals, cotangents):
        params, starts, (consts, traces, observed, flag, substitute, read), live = residuals
        entry, taps, exits = once(cotangents, floating_of(params, live))
        memory = (params, consts, traces, observed, fresh if static else flag)
        own = replace(source, states=read[0], extra=read[1])
        arrived = Arrived(*memory, entry, taps, exits, every, substitute, own)
        return rule.credit(graph, arrived), jax.tree.map(jnp.zeros_like, starts), None, None

    anchor = jax.custom_vjp(points)
    anchor.defvjp(forward, as_running(backward))
    read, flag = (source.states, source.extra), None if static else fresh
    saved = (block.consts, memory.traces, memory.observed, flag, substitute, read)
    live = floating_of(values.hidden, values.consts, values.args)
    starts, taps, exits = anchor(values.params, starts, lax.stop_gradient(saved), live)
    inward = lambda r, a: map_steps(length, r.site.inward, a)
    return starts, {r.index: inward(r, taps[r.index]) for r in relations}, exits
