"""A stretch of steps whose ordinary derivative is the learning rule's gradient.

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

from ..graph import Graph, split_cotangents
from ..ops import ETPPrimitive
from ..rules import Forward, Rule, Signals, Steps
from ..rules import mix as carried_by
from ._evaluate import Values, evaluate_single, evaluate_window, inputs_of
from ._forward import forward_advance, forward_init, forward_remember
from ._observe import observe
from ._over import over
from ._recurrence import Known, unroll
from ._tied import tied

Array = jax.Array


@dataclass(frozen=True, slots=True)
class Span:
    """How a stretch is laid out in time.

    `consts` and `args` say which of these have a leading axis of `length` steps. `window` is the
    number of steps in which reverse mode is complete, None for single steps with recurrent entries
    cut.
    """

    length: int
    consts: tuple[bool, ...]
    args: tuple[bool, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class Ran:
    """A stretch that was run; all but `traces` with a leading axis of steps.

    `before` and `after` are the values before and after each step, `outs` the results. `credited`
    are results and new values to compute the counted losses from: the same, unless only some
    windows are counted.
    """

    outs: list[Any]
    before: Values
    after: Values
    traces: list[Any]
    credited: tuple[list[Any], Values]


def init_traces(graph: Graph, rule: Rule | Forward, values: Values) -> list[Any]:
    """Traces before the first step."""
    if isinstance(rule, Forward):
        return forward_init(graph, values.params)
    weights = graph.operands(values.consts, values.params)
    return [rule.init(r, w) for r, w in zip(graph.relations, weights, strict=True)]


def stretch(
    graph: Graph,
    rule: Rule | Forward,
    values: Values,
    traces: Sequence[Any],
    span: Span,
    *,
    keep: bool = True,
    fresh: Array | bool | None = None,
    chosen: Array | None = None,
) -> Ran:
    """Run the model through a stretch of steps.

    Args:
        graph: the analysed step.
        rule: the learning rule.
        values: arrays of the steps, the states as they are before the first one.
        traces: the rule's traces before the first step.
        span: how the arrays are laid out in time.
        keep: whether the traces after the last step are wanted; else they are not computed.
        fresh: whether the traces are zero, if that is known.
        chosen: the window (or step) to evaluate in place of each one where losses are counted, if
            some are not: what they compute must not count, even if it is not a number.
    """
    before: list[Any] = lax.stop_gradient(list(traces))
    if graph.effects and span.length > 1 and span.window is None:
        return _one_by_one(graph, rule, values, before, span, fresh)
    everywhere = isinstance(rule, Forward)
    span = replace(span, window=span.length) if everywhere else span
    path, ys = _path(graph, lax.stop_gradient(values), span)
    run: Callable[[Array | None], list[Any]]
    if isinstance(rule, Forward):
        run = lambda chosen: _run_forward(graph, values, before, path, span)
        after = _advance_forward(graph, rule, path, before, span) if keep else before
    else:
        steps = _observed(graph, path, span, ys)
        if rule.prepare is not None:
            own = rule.prepare(graph.relations, before, steps)
            steps = [s._replace(own=o) for s, o in zip(steps, own, strict=True)]
        run = lambda chosen: _run_anchored(
            graph, rule, values, before, path, span, ys, steps, fresh, chosen
        )
        after = before
        if keep:
            weights = graph.operands(_first(path.consts, span.consts), path.params)
            after = rule.advance(graph.relations, before, steps, weights, fresh)
    outs, new = _sorted(graph, values, run(None))
    credited = (outs, new) if chosen is None else _sorted(graph, values, run(chosen))
    return Ran(outs, path, new, after, credited)


def _sorted(graph: Graph, values: Values, outs: list[Any]) -> tuple[list[Any], Values]:
    step = graph.step
    hidden, others = (tuple(outs[leaf.output] for leaf in k) for k in (step.hidden, step.others))
    return outs[: step.n_outs], replace(values, hidden=hidden, others=others)


def _one_by_one(graph, rule, values, traces, span, fresh) -> Ran:
    """For a step with side effects, which must happen once and in order."""
    one = Span(1, tuple(False for _ in span.consts), tuple(False for _ in span.args), None)

    def body(carry, sliced):
        hidden, others, traces, fresh = carry
        consts, args = (
            _merge(*given)
            for given in zip(
                (values.consts, values.args), (span.consts, span.args), sliced, strict=True
            )
        )
        now = Values(consts, args, values.params, hidden, others)
        ran = stretch(graph, rule, now, traces, one, fresh=fresh)
        new = jax.tree.map(lambda a: a[0], (ran.after.hidden, ran.after.others))
        seen = (ran.outs, ran.before.hidden, ran.before.others, *new)
        fresh = None if fresh is None else jnp.zeros((), bool)
        return (*new, ran.traces, fresh), (jax.tree.map(lambda a: a[0], seen[:3]), seen[3:])

    start = (values.hidden, values.others, traces, fresh)
    sliced = (_chosen(values.consts, span.consts), _chosen(values.args, span.args))
    (_, _, traces, _), ((outs, *before), new) = lax.scan(body, start, sliced, span.length)
    first = replace(values, hidden=before[0], others=before[1])
    after = replace(values, hidden=new[0], others=new[1])
    return Ran(outs, first, after, traces, (outs, after))


# --------------------------------------------------------------------------------- along the time


def _chosen(arrays: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [a for a, f in zip(arrays, flags, strict=True) if f]


def _merge(arrays: Sequence[Any], flags: Sequence[bool], chosen: Sequence[Any]) -> tuple[Any, ...]:
    items = iter(chosen)
    return tuple(next(items) if f else a for a, f in zip(arrays, flags, strict=True))


def _first(arrays: Sequence[Any], flags: Sequence[bool]) -> tuple[Any, ...]:
    return _merge(arrays, flags, [a[0] for a in _chosen(arrays, flags)])


def _path(graph: Graph, values: Values, span: Span) -> tuple[Values, dict[int, Array]]:
    """The states before every step, and the outputs of operators that are known from finding them.

    Returns the values with states stacked over the steps, and outputs by the number of the site.
    """
    step, program = graph.step, graph.step.program
    leaves, start = (*step.hidden, *step.others), (*values.hidden, *values.others)
    if span.length == 1:
        hidden, others = (
            tuple(jnp.expand_dims(a, 0) for a in k) for k in (values.hidden, values.others)
        )
        return replace(values, hidden=hidden, others=others), {}
    known = Known()
    for var, value, timed in zip(program.consts, values.consts, span.consts, strict=True):
        known.add(var, value, timed)
    for var, value, timed in zip(
        program.inputs[: step.n_args], values.args, span.args, strict=True
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
    unroll(program, known, carried, start, span.length, list(outputs.values()))

    def all_steps(leaf):
        var = step.entry(leaf)
        if var in known.timed:
            return known.timed[var]
        return jnp.broadcast_to(known.shared[var], (span.length, *var.shape))

    hidden, others = (tuple(map(all_steps, k)) for k in (step.hidden, step.others))
    ys = {i: known.timed[y] for i, y in outputs.items() if y in known.timed}
    return replace(values, hidden=hidden, others=others), ys


def _observed(graph: Graph, path: Values, span: Span, ys: dict[int, Array]) -> list[Steps]:
    def look(consts, args, hidden, others, ys):
        consts, args = _merge(path.consts, span.consts, consts), _merge(path.args, span.args, args)
        now = Values(consts, args, path.params, hidden, others)
        return observe(graph, consts, inputs_of(graph, now), ys)

    sliced = (_chosen(path.consts, span.consts), _chosen(path.args, span.args))
    return over(span.length, look, *sliced, path.hidden, path.others, ys)


# --------------------------------------------------------------------------------------- anchors


def _run_anchored(graph, rule, values, traces, path, span, ys, steps, fresh, chosen) -> list[Any]:
    """All results of all steps, differentiable as the rule asks."""
    masked = chosen is not None
    starts, taps, exits = _anchor(graph, rule, values, traces, path, span, steps, fresh, masked)
    consts, args = values.consts, values.args
    per_step = (_chosen(consts, span.consts), _chosen(args, span.args), path.others, taps, ys)
    if chosen is not None:
        size = span.window or 1
        index = (chosen[:, None] * size + jnp.arange(size)).reshape(-1)
        starts = jax.tree.map(lambda a: a[chosen], starts)
        exits, per_step = jax.tree.map(lambda a: a[index], (exits, per_step))
    if span.window is None:

        def single(hidden, exits, sliced):
            c, a, others, taps, ys = sliced
            now = Values(
                _merge(consts, span.consts, c),
                _merge(args, span.args, a),
                values.params,
                hidden,
                others,
            )
            return evaluate_single(graph, now, taps, ys, exits if rule.crossing else None)

        return over(span.length, single, starts, exits, per_step)
    return _windows(graph, values, span, starts, per_step)


def _windows(graph: Graph, values: Values, span: Span, starts: Any, per_step: Any) -> list[Any]:
    assert span.window is not None
    count, size = span.length // span.window, span.window
    consts, args = values.consts, values.args

    def step(hidden, sliced):
        c, a, others, taps, ys = sliced
        now = Values(
            _merge(consts, span.consts, c),
            _merge(args, span.args, a),
            values.params,
            hidden,
            others,
        )
        outs = evaluate_window(graph, now, taps, ys)
        return tuple(outs[leaf.output] for leaf in graph.step.hidden), outs

    def window(hidden, sliced):
        if size == 1:
            outs = step(hidden, jax.tree.map(lambda a: a[0], sliced))[1]
            return jax.tree.map(lambda a: jnp.expand_dims(a, 0), outs)
        return lax.scan(step, hidden, sliced, size)[1]

    split = jax.tree.map(lambda a: a.reshape((count, size, *a.shape[1:])), per_step)
    outs = over(count, window, starts, split)
    return jax.tree.map(lambda a: a.reshape((span.length, *a.shape[2:])), outs)


def _anchor(graph, rule, values, traces, path, span, steps, fresh, masked) -> tuple[Any, Any, Any]:
    """States where windows enter, zeros at the operators' outputs, and at the new states."""
    every = span.window
    starts = tuple(h if every in (None, 1) else h[::every] for h in path.hidden)
    if not graph.relations:
        return starts, {}, ()
    static = fresh is None or isinstance(fresh, bool)
    sealed = rule.crossing and every is None
    leaving = [(h.shape, h.dtype) for h in path.hidden] if sealed else []

    def zeros(r):
        turns = () if r.site.turns is None else (r.site.turns,)
        return jnp.zeros((span.length, *turns, *r.operator.y.shape), r.operator.y.dtype)

    @jax.custom_vjp
    def anchor(params, starts, saved):
        taps = {r.index: zeros(r) for r in graph.relations}
        exits = tuple(jnp.zeros(*like) for like in leaving)
        return tied((starts, taps, exits), params, saved)

    def forward(params, starts, saved):
        return anchor(params, starts, saved), (params, starts, saved)

    def backward(kept, cotangents):
        params, starts, (consts, traces, steps, flag) = kept
        lam, taps, exits = cotangents
        signals = _signals(graph, every, masked, steps, lam, taps, exits)

        def traced(p):
            found = graph.operands(consts, p)
            pairs = zip(graph.relations, found, strict=True)
            return [{k: w[k] for k in r.keys} for r, w in pairs], found

        _, pull, weights = jax.vjp(traced, params, has_aux=True)
        known = fresh if static else flag
        grads = rule.credit(graph.relations, traces, steps, signals, weights, known)
        return pull(grads)[0], jax.tree.map(jnp.zeros_like, starts), None

    anchor.defvjp(forward, backward)
    consts = _first(path.consts, span.consts)
    saved = lax.stop_gradient((consts, traces, steps, None if static else fresh))
    starts, taps, exits = anchor(values.params, starts, saved)
    inward = lambda r, a: over(span.length, r.site.inward, a)
    return starts, {r.index: inward(r, taps[r.index]) for r in graph.relations}, exits


def _signals(graph: Graph, every, masked, steps, lam, taps, exits) -> list[Signals]:
    entry = _at_slots(graph, lam)
    leaving = _at_slots(graph, exits) if exits else None
    out = []
    for i, (r, s) in enumerate(zip(graph.relations, steps, strict=True)):
        at = entry[i]
        if leaving is not None:
            back = jnp.swapaxes(s.D, -1, -2)
            moved = carried_by(back, leaving[i], r.slots.table is None)
            silent = (leaving[i] == 0).all(-1, keepdims=True) if masked else False
            at = at + jnp.where(silent, 0, moved)
        out.append(Signals(at, taps[r.index], every, masked))
    return out


def _at_slots(graph: Graph, cotangents: Sequence[Array]) -> list[Array]:
    """Cotangents of states, with a leading axis, at the slots of every relation."""

    def one(*leaves):
        lam = split_cotangents(graph.tangent.components, leaves)
        dtype = jnp.result_type(*lam)
        return [jnp.stack([pick(lam, dtype) for pick in r.slots.at], -1) for r in graph.relations]

    return over(cotangents[0].shape[0], one, *cotangents)


# --------------------------------------------------------------------------- everything forward


def _run_forward(graph, values, traces, path, span) -> list[Any]:
    hidden = forward_remember(graph, values.params, values.hidden, traces)
    starts = tuple(jnp.expand_dims(h, 0) for h in hidden)
    sliced = (_chosen(values.consts, span.consts), _chosen(values.args, span.args))
    return _windows(graph, values, span, starts, (*sliced, path.others, {}, {}))


def _advance_forward(graph, rule, path, traces, span) -> list[Any]:
    def step(traces, sliced):
        consts, args, hidden, others = sliced
        consts, args = _merge(path.consts, span.consts, consts), _merge(path.args, span.args, args)
        now = Values(consts, args, path.params, hidden, others)
        return forward_advance(graph, rule, now, traces), None

    timed = (_chosen(path.consts, span.consts), _chosen(path.args, span.args))
    sliced = (*timed, path.hidden, path.others)
    if span.length == 1:
        return step(traces, jax.tree.map(lambda a: a[0], sliced))[0]
    return lax.scan(step, traces, sliced, span.length)[0]
