"""A block of steps whose ordinary derivative is the learning rule's gradient.

First the states are run through the steps (`_recurrence`). Then everything else happens for all
steps side by side, at the states they started from: results and losses, the numbers x, f and D of
each relation, and reverse mode within each step or window. The memory of a rule enters as an
*anchor*: an identity on the states where steps or windows enter, and zeros added to the outputs of
operators, whose cotangents the rule turns into gradients of the parameters. Nothing goes on to the
past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph import Graph
from ..ops import ETPPrimitive
from ..rules import FullInfluence, Kronecker, RankOne, Rule, Steps, WholeStepRule
from ._depending import depending_on
from ._evaluate import Values, evaluate_single, evaluate_window, inputs_of
from ._feedback import back_operands
from ._forward import forward_advance, forward_init, forward_remember
from ._kronecker import kronecker_advance, kronecker_init, kronecker_remember
from ._map_steps import map_steps
from ._observe import observe
from ._once import floating_of, once
from ._rank_one import rank_one_advance, rank_one_init, rank_one_remember
from ._recurrence import StepValues, unroll
from ._remember import operands_pulled
from ._signals import signal_source, signals_of
from ._time import TimeAxes, chosen_of, first_of, merged

Array = jax.Array


@dataclass(frozen=True, slots=True)
class BlockResult:
    """A block that was run; all but `traces` with a leading axis of steps.

    `before` and `after` are the values before and after each step, `outs` the results. `credited`
    are results and new values to compute the counted losses from: the same, unless only some
    windows are counted.
    """

    outs: list[Any]
    before: Values
    after: Values
    traces: list[Any]
    credited: tuple[list[Any], Values]


def init_traces(graph: Graph, rule: Rule | WholeStepRule, values: Values) -> list[Any]:
    """Traces before the first step."""
    if isinstance(rule, FullInfluence):
        return forward_init(graph, values.params)
    if isinstance(rule, RankOne):
        return rank_one_init(graph, values.params)
    if isinstance(rule, Kronecker):
        return kronecker_init(graph, rule)
    weights = graph.operands(values.consts, values.params)
    return [rule.init(r, w) for r, w in zip(graph.relations, weights, strict=True)]


def run_block(
    graph: Graph,
    rule: Rule | WholeStepRule,
    values: Values,
    traces: Sequence[Any],
    axes: TimeAxes,
    *,
    keep: bool = True,
    fresh: Array | bool | None = None,
    chosen: Array | None = None,
) -> BlockResult:
    """Run the model through a block of steps.

    Args:
        graph: the analysed step.
        rule: the learning rule.
        values: arrays of the steps, the states as they are before the first one.
        traces: the rule's traces before the first step.
        axes: how the arrays are laid out in time.
        keep: whether the traces after the last step are wanted; else they are not computed.
        fresh: whether the traces are zero, if that is known.
        chosen: the window (or step) to evaluate in place of each one where losses are counted, if
            some are not: what they compute must not count, even if it is not a number.
    """
    before: list[Any] = lax.stop_gradient(list(traces))
    alone = graph.effects or graph.unmapped or rule.one_by_one
    if alone and axes.length > 1 and axes.window is None:
        return _one_by_one(graph, rule, values, before, axes, fresh)
    axes = axes if isinstance(rule, Rule) else replace(axes, window=axes.length)
    path, ys = _path(graph, lax.stop_gradient(values), axes)
    run: Callable[[Array | None], list[Any]]
    if not isinstance(rule, Rule):
        run = lambda chosen: _run_whole(graph, rule, values, before, path, axes)
        after = _advance_whole(graph, rule, path, before, axes) if keep else before
    else:
        steps = _observed(graph, path, axes, ys)
        if rule.kept is not None:
            steps = [rule.kept(r, s) for r, s in zip(graph.relations, steps, strict=True)]
        if rule.prepare is not None:
            own = rule.prepare(graph.relations, before, steps)
            steps = [s._replace(own=o) for s, o in zip(steps, own, strict=True)]
        run = lambda chosen: _run_anchored(
            graph, rule, values, before, path, axes, ys, steps, fresh, chosen
        )
        after = before
        if keep:
            weights = graph.operands(first_of(path.consts, axes.consts), path.params)
            after = _advanced(graph, rule, before, steps, weights, fresh)
    found = run(None)
    outs, new = _sorted(graph, values, found)
    credited = (outs, new) if chosen is None else _sorted(graph, values, run(chosen))
    if graph.step.penalised:
        *_, penalty, other = found
        results, after_each = _penalised(credited, penalty)
        # Not called where no loss reads a state: backpropagation would not run these rules either.
        hidden = _penalised(after_each.hidden, other)
        credited = results, replace(after_each, hidden=hidden)
        outs, new = credited if chosen is None else (outs, new)
    return BlockResult(outs, path, new, after, credited)


@jax.custom_vjp
def _penalised(tree: Any, penalty: Array) -> Any:
    """Results whose derivative has that of the penalty of every step in it."""
    return tree


_penalised.defvjp(
    lambda tree, penalty: (tree, penalty), lambda penalty, ct: (ct, jnp.ones_like(penalty))
)


def _sorted(graph: Graph, values: Values, outs: list[Any]) -> tuple[list[Any], Values]:
    step = graph.step
    hidden, others = (tuple(outs[leaf.output] for leaf in k) for k in (step.hidden, step.others))
    return outs[: step.n_outs], replace(values, hidden=hidden, others=others)


def _advanced(graph, rule, traces, steps, weights, fresh) -> list[Any]:
    if not rule.one_by_one or not steps:
        return rule.advance(graph.relations, traces, steps, weights, fresh)

    def body(traces, now):
        now = jax.tree.map(lambda a: a[None], now)
        return rule.advance(graph.relations, traces, now, weights, None), None

    return lax.scan(body, traces, list(steps))[0]


def _one_by_one(graph, rule, values, traces, axes, fresh) -> BlockResult:
    """For steps that must happen once and in order."""
    none = lambda flags: tuple(False for _ in flags)
    one = TimeAxes(1, none(axes.consts), none(axes.args), None, none(axes.extra), axes.names)
    given = (values.consts, values.args, values.extra)
    flags = (axes.consts, axes.args, axes.extra)

    def body(carry, sliced):
        hidden, others, traces, fresh = carry
        consts, args, extra = map(merged, given, flags, sliced)
        now = Values(consts, args, values.params, hidden, others, extra)
        ran = run_block(graph, rule, now, traces, one, fresh=fresh)
        new = jax.tree.map(lambda a: a[0], (ran.after.hidden, ran.after.others))
        seen = (ran.outs, ran.before.hidden, ran.before.others, *new)
        fresh = None if fresh is None else jnp.zeros((), bool)
        return (*new, ran.traces, fresh), (jax.tree.map(lambda a: a[0], seen[:3]), seen[3:])

    start = (values.hidden, values.others, traces, fresh)
    sliced = list(map(chosen_of, given, flags))
    (_, _, traces, _), ((outs, *before), new) = lax.scan(body, start, sliced, axes.length)
    first = replace(values, hidden=before[0], others=before[1])
    after = replace(values, hidden=new[0], others=new[1])
    return BlockResult(outs, first, after, traces, (outs, after))


# --------------------------------------------------------------------------------- along the time


def _path(graph: Graph, values: Values, axes: TimeAxes) -> tuple[Values, dict[int, Array]]:
    """The states before every step, and the outputs of operators that are known from finding them.

    Returns the values with states stacked over the steps, and outputs by the number of the site.
    """
    step, program = graph.step, graph.step.program
    leaves, start = (*step.hidden, *step.others), (*values.hidden, *values.others)
    if axes.length == 1:
        hidden, others = (
            tuple(jnp.expand_dims(a, 0) for a in k) for k in (values.hidden, values.others)
        )
        return replace(values, hidden=hidden, others=others), {}
    known = StepValues()
    for var, value, timed in zip(program.consts, values.consts, axes.consts, strict=True):
        known.add(var, value, timed)
    for var, value, timed in zip(
        program.inputs[: step.n_args], values.args, axes.args, strict=True
    ):
        known.add(var, value, timed)
    for leaf, value in zip(step.params, values.params, strict=True):
        known.add(step.entry(leaf), value, False)
    carried = [(step.entry(leaf), step.exit(leaf)) for leaf in leaves]
    outputs = {
        i: s.y
        for i, s in enumerate(graph.sites)
        if not s.levels and isinstance(s.equation.primitive, ETPPrimitive)
    }
    unroll(program, known, carried, start, axes.length, list(outputs.values()))

    def all_steps(leaf):
        var = step.entry(leaf)
        if var in known.timed:
            return known.timed[var]
        return jnp.broadcast_to(known.shared[var], (axes.length, *var.shape))

    hidden, others = (tuple(map(all_steps, k)) for k in (step.hidden, step.others))
    ys = {i: known.timed[y] for i, y in outputs.items() if y in known.timed}
    return replace(values, hidden=hidden, others=others), ys


def _observed(graph: Graph, path: Values, axes: TimeAxes, ys: dict[int, Array]) -> list[Steps]:
    def look(consts, args, hidden, others, ys):
        consts, args = merged(path.consts, axes.consts, consts), merged(path.args, axes.args, args)
        now = Values(consts, args, path.params, hidden, others)
        return observe(graph, consts, inputs_of(graph, now), ys)

    sliced = (chosen_of(path.consts, axes.consts), chosen_of(path.args, axes.args))
    slices = (*sliced, path.hidden, path.others, ys)
    return map_steps(axes.length, look, *slices, mapped=not graph.unmapped)


# --------------------------------------------------------------------------------------- anchors


def _run_anchored(graph, rule, values, traces, path, axes, ys, steps, fresh, chosen) -> list[Any]:
    """All results of all steps, differentiable as the rule asks."""
    backs = back_operands(graph, rule.feedback)
    source = signal_source(graph, rule, values, path, axes, backs)
    starts, taps, exits = _anchor(
        graph, rule, source, values, traces, path, axes, steps, fresh, chosen
    )
    consts, args = values.consts, values.args
    per_step = (chosen_of(consts, axes.consts), chosen_of(args, axes.args), path.others, taps, ys)
    if chosen is not None:
        size = axes.window or 1
        index = (chosen[:, None] * size + jnp.arange(size)).reshape(-1)
        starts = jax.tree.map(lambda a: a[chosen], starts)
        exits, per_step = jax.tree.map(lambda a: a[index], (exits, per_step))
    if axes.window is None:

        def single(hidden, exits, sliced):
            c, a, others, taps, ys = sliced
            now = Values(
                merged(consts, axes.consts, c),
                merged(args, axes.args, a),
                values.params,
                hidden,
                others,
            )
            return evaluate_single(graph, now, taps, ys, exits or None, source.exits, backs)

        return map_steps(axes.length, single, starts, exits, per_step)
    return _windows(graph, values, axes, starts, per_step, backs)


def _windows(
    graph: Graph, values: Values, axes: TimeAxes, starts: Any, per_step: Any, backs: Any = None
) -> list[Any]:
    assert axes.window is not None
    count, size = axes.length // axes.window, axes.window
    consts, args = values.consts, values.args

    def step(hidden, sliced):
        c, a, others, taps, ys = sliced
        now = Values(
            merged(consts, axes.consts, c),
            merged(args, axes.args, a),
            values.params,
            hidden,
            others,
        )
        outs = evaluate_window(graph, now, taps, ys, backs)
        return tuple(outs[leaf.output] for leaf in graph.step.hidden), outs

    def window(hidden, sliced):
        if size == 1:
            outs = step(hidden, jax.tree.map(lambda a: a[0], sliced))[1]
            return jax.tree.map(lambda a: jnp.expand_dims(a, 0), outs)
        return lax.scan(step, hidden, sliced, size)[1]

    split = jax.tree.map(lambda a: a.reshape((count, size, *a.shape[1:])), per_step)
    outs = map_steps(count, window, starts, split)
    return jax.tree.map(lambda a: a.reshape((axes.length, *a.shape[2:])), outs)


def _anchor(
    graph, rule, source, values, traces, path, axes, steps, fresh, chosen
) -> tuple[Any, Any, Any]:
    """States where windows enter, zeros at the operators' outputs, and at the new states."""
    every = axes.window
    starts = tuple(h if every in (None, 1) else h[::every] for h in path.hidden)
    if not graph.relations:
        return starts, {}, ()
    static = fresh is None or isinstance(fresh, bool)
    leaving = [(h.shape, h.dtype) for h in path.hidden] if source.exits and every is None else []

    def zeros(r):
        turns = () if r.site.iterations is None else (r.site.iterations,)
        return jnp.zeros((axes.length, *turns, *r.operator.y.shape), r.operator.y.dtype)

    def points(params, starts, saved, live):
        taps = {r.index: zeros(r) for r in graph.relations}
        exits = tuple(jnp.zeros(*like) for like in leaving)
        return depending_on((starts, taps, exits), params, saved)

    def forward(*given):
        return points(*given), given

    def backward(kept, cotangents):
        params, starts, (consts, traces, steps, flag, chosen, (states, extra)), live = kept
        lam, taps, exits = once(cotangents, floating_of(params, live))
        now = replace(source, states=states, extra=extra)
        signals = signals_of(graph, now, every, chosen, steps, lam, taps, exits)

        weights, pull = operands_pulled(graph, consts, params)
        known = fresh if static else flag
        grads = rule.credit(graph.relations, traces, steps, signals, weights, known)
        return pull(grads), jax.tree.map(jnp.zeros_like, starts), None, None

    anchor = jax.custom_vjp(points)
    anchor.defvjp(forward, backward)
    consts = first_of(path.consts, axes.consts)
    read = (source.states, source.extra)
    flag = None if static else fresh
    saved = lax.stop_gradient((consts, traces, steps, flag, chosen, read))
    live = floating_of(values.hidden, values.consts, values.args)
    starts, taps, exits = anchor(values.params, starts, saved, live)
    inward = lambda r, a: map_steps(axes.length, r.site.inward, a)
    return starts, {r.index: inward(r, taps[r.index]) for r in graph.relations}, exits


# --------------------------------------------------------------------------- everything forward


def _run_whole(graph, rule, values, traces, path, axes) -> list[Any]:
    if isinstance(rule, Kronecker):
        consts = lax.stop_gradient(first_of(values.consts, axes.consts))
        still = replace(values, consts=consts)
        hidden = kronecker_remember(graph, rule, still, values.hidden, traces)
    else:
        remember = forward_remember if isinstance(rule, FullInfluence) else rank_one_remember
        hidden = remember(graph, values.params, values.hidden, traces)
    starts = tuple(jnp.expand_dims(h, 0) for h in hidden)
    sliced = (chosen_of(values.consts, axes.consts), chosen_of(values.args, axes.args))
    return _windows(graph, values, axes, starts, (*sliced, path.others, {}, {}))


_PUSH: dict[type, Any] = {
    FullInfluence: forward_advance,
    RankOne: rank_one_advance,
    Kronecker: kronecker_advance,
}


def _advance_whole(graph, rule, path, traces, axes) -> list[Any]:
    def step(traces, sliced):
        consts, args, hidden, others = sliced
        consts, args = merged(path.consts, axes.consts, consts), merged(path.args, axes.args, args)
        now = Values(consts, args, path.params, hidden, others)
        return _PUSH[type(rule)](graph, rule, now, traces), None

    timed = (chosen_of(path.consts, axes.consts), chosen_of(path.args, axes.args))
    sliced = (*timed, path.hidden, path.others)
    if axes.length == 1:
        return step(traces, jax.tree.map(lambda a: a[0], sliced))[0]
    return lax.scan(step, traces, sliced, axes.length)[0]
