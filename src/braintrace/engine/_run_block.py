"""A block of steps whose ordinary derivative is the learning rule's gradient.

First the states are run through the steps (`_recurrence`). Then everything else happens for all
steps at once, at the states they started from: results and losses, what the rule observes (x, f and
D of each relation), and reverse mode within each step or window. The memory of a rule enters as an
*anchor*: an identity on the states where steps or windows enter, and zeros added to the outputs of
operators; the rule computes gradients of the parameters from the cotangents of both. Nothing goes
on to the past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph import Graph, Leaf
from ..ops import ETPPrimitive, in_use, reading
from ..program import Equation, Var, is_inexact
from ._anchor import (
    depending_on,
    floating_of,
    once,
    reaching,
    with_all_cotangents,
    with_derivative,
)
from ._evaluate import (
    Backs,
    after_step,
    back_operands,
    evaluate_plain,
    evaluate_single,
    evaluate_window,
    stored_exits,
)
from ._joined import products_joined
from ._loops import as_running, running_placement
from ._mixture import passes_of
from ._placement import pinned
from ._recurrence import StepValues, evaluate_all_steps, needed, unroll
from ._rule import Arrived, Fresh, Rule, SignalSource, Trace
from ._signals import signal_source
from ._values import Block, TimeAxes, Values, map_steps, merged, timed_of
from ._window import through_windows

Array = jax.Array


States = tuple[tuple[Array, ...], tuple[Array, ...]]  # hidden ones and others


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Deposits:
    """What steps add to traces, in place of the traces after them; see `Backward`."""

    moves: Any
    of_steps: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Behind:
    """What a block gets that is taken after the blocks behind it.

    Attributes:
        adjoints: those after the block; their derivative are those before it.
        params: the parameters; their derivative is what the rule credits, that of the parameters of
            the block the rest.
        states: the states that vary, before every step, or before the first one.
        moves: see `Backward`; None where no traces are wanted.
        counts: whether any loss of the block counts; None if that is certain.
    """

    adjoints: list[Array]
    params: tuple[Array, ...]
    states: States
    moves: Any = None
    counts: Array | None = None


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
    traces: list[Trace] | Deposits
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
    behind: Behind | None = None,
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
        later: whether the caller puts the deposits into the traces, of a rule that can take blocks
            backward, if the steps are taken at once.
        behind: what comes from the blocks behind this one, if they are taken backward.
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
    if behind is None:
        block = _unrolled(graph, lax.stop_gradient(values), axes)
    else:
        block = _at_states(graph, lax.stop_gradient(values), axes, behind.states)
    observed = rule.observe(graph, block, before)
    after: list[Trace] | Deposits = before
    if keep and rule.backward is not None and (later or behind is not None):
        moves = rule.backward.moves(graph) if behind is None else behind.moves
        after = Deposits(*rule.backward.deposits(graph, block, observed, moves))
    elif keep:
        after = rule.advance(graph, block, before, observed, fresh)
        after = after if placement is None else pinned(after, places)
    memory = _Memory(graph, rule, before, observed, fresh, behind)
    once = memory if substitute is None else memory.without_adjoints()
    flat = _all_results(once, values, block, None)
    outs, new = after_step(graph, values, flat)
    if rule.replay is not None:  # its states are those of another run: the network keeps its own
        states = with_derivative(lax.stop_gradient(_as_they_are(graph, block)), flat)
        new = after_step(graph, values, states)[1]
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


def advanced(
    graph: Graph,
    rule: Rule,
    weights: tuple[Any, Any],
    traces: Sequence[Trace],
    deposits: Deposits,
    fresh: Fresh,
) -> list[Trace]:
    """The traces after the steps that left these deposits; `weights` are constants, parameters."""
    assert rule.backward is not None  # only such rules have deposits
    placement = running_placement()
    before, weights = lax.stop_gradient((list(traces), weights))
    what = deposits.moves, deposits.of_steps
    after = rule.backward.put(graph, *weights, before, *what, fresh)
    if placement is None:
        return after
    return pinned(after, placement.traces(graph, rule, after))


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


def states_of_steps(graph: Graph, values: Values, axes: TimeAxes) -> tuple[States, States]:
    """The states before every step of those that vary, and all of them after the last one."""
    values = lax.stop_gradient(values)
    if axes.length == 1:
        slices = jax.tree.map(lambda a: a[0], axes.slices(values))
        now = axes.at(values, slices, values.hidden, values.others)
        after = after_step(graph, now, evaluate_plain(graph, now))[1]
        before, last = _unrolled(graph, values, axes).path, (after.hidden, after.others)
    else:
        env = _environment(graph, values, axes)
        last = _unroll(graph, env, values, axes, (), ())
        before = _path(graph, env, values, axes)
    step = graph.step
    varying = lambda leaves, arrays: tuple(
        a for leaf, a in zip(leaves, arrays, strict=True) if _varies(graph, leaf)
    )
    return (varying(step.hidden, before.hidden), varying(step.others, before.others)), last


def _varies(graph: Graph, leaf: Leaf) -> bool:
    """Whether a step writes anything else to a state than what it has read, or zeros."""
    step = graph.step
    return step.exit(leaf) is not step.entry(leaf) and leaf not in step.hidden[len(step.stored) :]


def _at_states(graph: Graph, values: Values, axes: TimeAxes, states: States) -> Block:
    """A block whose states before every step are known, or before the first one."""
    step, program = graph.step, graph.step.program
    known, env = map(iter, states), _environment(graph, values, axes)
    kinds = zip((step.hidden, step.others), (values.hidden, values.others), known, strict=True)
    found = [
        tuple(next(new) if _varies(graph, leaf) else a for leaf, a in zip(leaves, old, strict=True))
        for leaves, old, new in kinds
    ]
    stored = jax.tree.leaves(states)
    if stored and stored[0].shape[0] < axes.length:
        first = lambda leaf, a: a[0] if _varies(graph, leaf) else a
        hidden, others = (
            tuple(map(first, leaves, arrays))
            for leaves, arrays in zip((step.hidden, step.others), found, strict=True)
        )
        return _unrolled(graph, replace(values, hidden=hidden, others=others), axes)
    for leaves, arrays in zip((step.hidden, step.others), found, strict=True):
        for leaf, array in zip(leaves, arrays, strict=True):
            env.add(step.entry(leaf), array, _varies(graph, leaf))
    outputs = _outputs(graph)
    joined = products_joined(needed(program, list(outputs.values()), env), env.shared)
    evaluate_all_steps(joined.equations, env, axes.length)
    ys = {i: env.timed[y] for i, y in outputs.items() if y in env.timed}
    return Block(_path(graph, env, values, axes), axes, ys)


def _unrolled(graph: Graph, values: Values, axes: TimeAxes) -> Block:
    """The states before every step."""
    if axes.length == 1:
        one = lambda arrays: tuple(jnp.expand_dims(a, 0) for a in arrays)
        path = replace(values, hidden=one(values.hidden), others=one(values.others))
        return Block(path, axes, {})
    env = _environment(graph, values, axes)
    outputs, after = _outputs(graph), stored_exits(graph)
    _unroll(graph, env, values, axes, list(outputs.values()), list(after.values()))
    ys = {i: env.timed[y] for i, y in outputs.items() if y in env.timed}
    new = {i: env.timed[var] for i, var in after.items() if var in env.timed}
    return Block(_path(graph, env, values, axes), axes, ys, new)


def _environment(graph: Graph, values: Values, axes: TimeAxes) -> StepValues:
    """Constants, arguments and parameters of all steps."""
    step, program, env = graph.step, graph.step.program, StepValues()
    variables = (*program.consts, *program.inputs[: step.n_args])
    arrays, flags = (*values.consts, *values.args), (*axes.consts, *axes.args)
    for var, value, timed in zip(variables, arrays, flags, strict=True):
        env.add(var, value, timed)
    for leaf, value in zip(step.params, values.params, strict=True):
        env.add(step.entry(leaf), value, False)
    return env


def _outputs(graph: Graph) -> dict[int, Var]:
    """What the operators outside of bodies compute, by the number of the site."""
    return {
        i: s.y
        for i, s in enumerate(graph.sites)
        if not s.levels and isinstance(s.equation.primitive, ETPPrimitive)
    }


def _unroll(
    graph: Graph,
    env: StepValues,
    values: Values,
    axes: TimeAxes,
    wanted: Sequence[Var],
    by_kernels: Sequence[Var],
) -> States:
    """`unroll` with the states of a step; the last ones."""
    step = graph.step
    leaves, start = (*step.hidden, *step.others), (*values.hidden, *values.others)
    carried = [(step.entry(leaf), step.exit(leaf)) for leaf in leaves]
    last = unroll(step.program, env, carried, start, axes.length, wanted, by_kernels)
    n = len(step.hidden)
    return tuple(last[:n]), tuple(last[n:])


def _path(graph: Graph, env: StepValues, values: Values, axes: TimeAxes) -> Values:
    """The values with the states before every step."""
    step = graph.step
    entries = lambda leaves: tuple(env.all_steps(step.entry(a), axes.length) for a in leaves)
    return replace(values, hidden=entries(step.hidden), others=entries(step.others))


# --------------------------------------------------------------------------------------- anchors


@dataclass(frozen=True, slots=True)
class _Memory:
    """A rule on a graph, with its traces before a block and what it observed of it."""

    graph: Graph
    rule: Rule
    traces: list[Trace]
    observed: Any
    fresh: Fresh
    behind: Behind | None

    def without_adjoints(self) -> _Memory:
        """The same where what comes from the blocks behind is counted by other results.

        Adjoints are zero, but they have the derivative by what arrives here: that is linear.
        """
        if self.behind is None:
            return self
        adjoints = self.behind.adjoints
        zero = with_derivative(jax.tree.map(jnp.zeros_like, adjoints), adjoints)
        return replace(self, behind=replace(self.behind, adjoints=zero))


def _all_results(
    memory: _Memory, values: Values, block: Block, substitute: Array | None
) -> list[Array]:
    """All results of all steps, with the derivatives of all reverse passes of a mixture."""
    graph, rule = memory.graph, memory.rule
    if rule.replay is not None:
        return rule.replay(graph, values, memory.traces, block, substitute)
    if not rule.parts:
        return _results(memory, values, block, substitute)
    total: list[Array] | None = None
    for own in reversed(passes_of(graph, rule, memory.traces, memory.observed, block)):
        met = own.traces, own.observed, memory.fresh, own.behind(graph, rule, memory.behind)
        of_pass = _Memory(own.graph, own.rule, *met)
        instead = own.substitute(substitute, block.axes)
        results = own.results(_results(of_pass, own.values(values), own.block, instead))
        total = results if total is None else with_derivative(total, results)
    assert total is not None
    return total


def _as_they_are(graph: Graph, block: Block) -> list[Array]:
    """All results of all steps, from the states before each."""
    path, axes = block.path, block.axes
    one = lambda *sliced: evaluate_plain(graph, axes.at(path, *sliced))
    return map_steps(axes.length, one, axes.slices(path), path.hidden, path.others)


def _results(
    memory: _Memory, values: Values, block: Block, substitute: Array | None
) -> list[Array]:
    """All results of all steps, differentiable as the rule asks."""
    graph, rule, axes, path = memory.graph, memory.rule, block.axes, block.path
    backs = back_operands(graph, rule.feedback)
    source = signal_source(graph, rule, values, path, axes, backs)
    starts, taps, exits = _anchored(memory, source, values, block, substitute)
    # `values` are the arguments that a user differentiates, `path` the same without derivatives: a
    # step starts from `starts`, the path behind the anchor, so that nothing goes on to earlier
    # steps but what the anchor's own derivative, `rule.credit`, makes of the cotangents.
    per_step = (axes.slices(values), path.others, taps, (block.ys, block.new))
    hidden = path.hidden
    if substitute is not None:
        size = axes.window or 1
        # Of three windows of two steps the first does not count: substitute [1, 1, 2], and steps
        # [2, 3, 2, 3, 4, 5] are evaluated; what stands in the place of the first is not read.
        index = (substitute[:, None] * size + jnp.arange(size)).reshape(-1)
        starts = jax.tree.map(lambda a: a[substitute], starts)
        exits, hidden, per_step = jax.tree.map(lambda a: a[index], (exits, hidden, per_step))
    if axes.window is not None:
        return _windows(memory, values, axes, (hidden, starts), per_step, backs)

    def single(hidden, exits, sliced):
        slices, others, taps, computed = sliced
        now = axes.at(values, slices, hidden, others)
        return evaluate_single(graph, now, taps, computed, exits or None, source.exits, backs)

    results = map_steps(axes.length, single, starts, exits, per_step)
    # A signal of the rule's own is there also where no result depends on a state.
    return results if rule.signal is None else _reaching(results, starts)


def _reaching(results: list[Array], starts: Any) -> list[Array]:
    floats = [i for i, a in enumerate(results) if is_inexact(a.dtype)]
    linked = reaching([results[i] for i in floats], floating_of(starts))
    out = list(results)
    for i, a in zip(floats, linked, strict=True):
        out[i] = a
    return out


def _windows(
    memory: _Memory,
    values: Values,
    axes: TimeAxes,
    states: tuple[Any, Any],
    per_step: Any,
    backs: Backs | None,
) -> list[Array]:
    """Results with nothing cut in a window; `states` are those before steps, and before windows."""
    size, graph = axes.window, memory.graph
    assert size is not None
    # An array that changes from call to call is an argument of a reverse rule; an operator is no
    # key of a pytree.
    places = [(eqn, i, adaptive) for eqn, i, (_, adaptive) in _each(backs)]
    read = (values, [random for *_, (random, _) in _each(backs)])

    def step(read, hidden, sliced):
        values, randoms = read
        slices, others, taps, (ys, _) = sliced
        now = axes.at(values, slices, hidden, others)
        own: dict[Equation, dict[int, tuple[Array, bool]]] = {}
        for (eqn, i, adaptive), random in zip(places, randoms, strict=True):
            own.setdefault(eqn, {})[i] = random, adaptive
        run = lambda now: evaluate_window(graph, now, taps, ys, own)
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
        return after_step(graph, now, outs)[1].hidden, with_derivative(outs, within)

    hidden, starts = states
    if size == 1:
        one = lambda h, sliced: step(read, h, sliced)[1]
        return map_steps(axes.length, one, starts, per_step)
    if not (graph.joins_calls or graph.effects or graph.unmapped):
        return through_windows(step, size, read, hidden, starts, per_step)
    # A reverse rule of our own is traced where the axes of a `vmap` have no names any more, and
    # evaluates its steps at once: side effects would be out of order, some calls have no `vmap`.
    window = lambda h, rest: lax.scan(partial(step, read), h, rest, size)[1]
    all_read = lambda *window_of: with_all_cotangents(window(*window_of))
    return _joined(map_steps(axes.length // size, all_read, starts, _split(per_step, size)))


def _each(backs: Backs | None) -> Iterator[tuple[Equation, int, tuple[Array, bool]]]:
    """The random operands, with their operator and place."""
    for eqn, operands in (backs or {}).items():
        for i, operand in operands.items():
            yield eqn, i, operand


def _anchored(
    memory: _Memory, source: SignalSource, values: Values, block: Block, substitute: Array | None
) -> tuple[Any, Any, Any]:
    """States where windows enter, zeros at the operators' outputs, and at the new states."""
    graph, rule, fresh, behind = memory.graph, memory.rule, memory.fresh, memory.behind
    path, every, length = block.path, block.axes.window, block.axes.length
    starts = tuple(h if every in (None, 1) else h[::every] for h in path.hidden)
    relations = () if rule.entry_only else graph.relations
    if not relations and not rule.entry_only:
        return starts, {}, ()
    static = fresh is None or isinstance(fresh, bool)
    leaving = [(h.shape, h.dtype) for h in path.hidden] if source.exits and every is None else []
    indices = in_use()

    def zeros(r):
        iterations = () if r.site.iterations is None else (r.site.iterations,)
        return jnp.zeros((length, *iterations, *r.operator.y.shape), r.operator.y.dtype)

    def points(params, later, starts, saved, live):
        taps = {r.index: zeros(r) for r in relations}
        exits = tuple(jnp.zeros(*like) for like in leaving)
        return depending_on((starts, taps, exits), params, later, saved)

    def forward(*primals):
        return points(*primals), primals

    def backward(residuals, cotangents):
        params, later, starts, saved, live = residuals
        consts, traces, observed, flag, substitute, read, counts, found = saved
        cotangents = once(cotangents, floating_of(params, live))
        if counts is not None:  # to those before, nothing arrives from losses that do not count
            cotangents = jax.tree.map(
                lambda a: jnp.where(counts | jnp.isfinite(a), a, 0), cotangents
            )
        entry, taps, exits = cotangents
        memory = (params, consts, traces, observed, fresh if static else flag)
        own = replace(source, states=read[0], extra=read[1])
        met = (entry, taps, exits, every, substitute, own, later, counts)
        arrived = Arrived(*memory, *met)
        with reading(dict(zip(indices, found, strict=True))):
            if behind is None:
                grads, before = rule.credit(graph, arrived), None
            else:
                assert rule.backward is not None
                grads, before = rule.backward.credit(graph, arrived)
        return grads, before, jax.tree.map(jnp.zeros_like, starts), None, None

    anchor = jax.custom_vjp(points)
    anchor.defvjp(forward, as_running(backward))
    read, flag = (source.states, source.extra), None if static else fresh
    params, later, counts = values.params, None, None
    if behind is not None:
        params, later, counts = behind.params, behind.adjoints, behind.counts
    found = list(indices.values())
    saved = (block.consts, memory.traces, memory.observed, flag, substitute, read, counts, found)
    live = floating_of(values.hidden, values.consts, values.args)
    starts, taps, exits = anchor(params, later, starts, lax.stop_gradient(saved), live)
    inward = lambda r, a: map_steps(length, r.site.inward, a)
    return starts, {r.index: inward(r, taps[r.index]) for r in relations}, exits
