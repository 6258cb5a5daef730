"""Everything the weight of an operator has done to the states, as one product with the right mean.

The influence of an operator's weights on the states, E_t = (dF/dh) E_{t-1} + F_t dy/dw with
F = dh'/dy, is estimated by A dy/dw(u): `u` stands for the inputs, `A` leads from outputs to states.
With a random sign c per step, and per sample,

    u <- r0 u + c r1 x,    A <- (dF/dh) A / r0 + c F / r1

for any positive r0, r1; these make both terms of equal length. A bias has the input 1. The axes of
A are (outputs, *state), where samples of a batch share an axis of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from .._control import run
from .._errors import NotSupportedError, message
from ..graph import Graph
from ..graph import HiddenParamOpRelation as Relation
from ..rules import Kronecker, seen_input
from ._evaluate import Values, inputs_of
from ._forward import quiet_apply
from ._observe import observe
from ._remember import operands_pulled, remembering

Array = jax.Array


def kronecker_init(graph: Graph, rule: Kronecker) -> list[Any]:
    """Zero factors, per relation."""
    entries = [graph.step.entry(leaf) for leaf in graph.step.hidden]
    out = []
    for r in graph.relations:
        _check(r, entries)
        op = r.operator
        lead = op.y.shape[:1] if rule.batched else ()
        n = prod(op.y.shape[len(lead) :])
        trace: dict[str, Any] = {
            "A": {str(k): jnp.zeros((n, *v.shape), v.dtype) for k, v in enumerate(entries)},
            "one": jnp.zeros(lead, op.y.dtype),
            "draws": jnp.zeros((), jnp.int32),
        }
        if op.x is not None:
            x = jax.eval_shape(lambda v, r=r: seen_input(r, v), op.x)
            trace["u"] = jnp.zeros(x.shape, x.dtype)
        out.append(trace)
    return out


def _check(r: Relation, entries: Sequence[Any]) -> None:
    op = r.operator
    why = None
    if op.x is not None and not op.is_linear:
        why = "it is not linear in its input, which one product of factors needs"
    elif r.site.levels:
        why = "it runs inside of control flow, and its factors are those of one call per step"
    elif jnp.issubdtype(op.y.dtype, jnp.complexfloating) or any(v.is_complex for v in entries):
        why = "it is complex, and random signs are drawn for real numbers"
    if why is not None:
        raise NotSupportedError(
            message(
                f"KFRTRL cannot follow the operator {r.primitive.name}.",
                where=r.site.equation.where(),
                why=why,
                do="use UORO, RTRL, SnAp or D_RTRL",
            )
        )


def kronecker_advance(
    graph: Graph, rule: Kronecker, values: Values, traces: Sequence[Any]
) -> list[Any]:
    """Push the factors through a step."""
    inputs = inputs_of(graph, values)
    seen = observe(graph, values.consts, inputs, {})
    relation_of = {r.site.equation: r for r in graph.relations}

    def of(hidden, taps):
        def apply(eqn, operands, feed):
            outs, found = quiet_apply(eqn, operands, feed)
            r = relation_of.get(eqn)
            return ([outs[0] + taps[r.index]] if r is not None else outs), found

        given = inputs_of(graph, replace(values, hidden=hidden))
        outs = run(graph.step.program, values.consts, given, apply, graph.custom)[0]
        return [outs[leaf.output] for leaf in graph.step.hidden]

    hidden = tuple(values.hidden)
    still = {r.index: jnp.zeros(r.operator.y.shape, r.operator.y.dtype) for r in graph.relations}
    _, push = jax.linearize(of, hidden, still)
    silent = tuple(jnp.zeros_like(h) for h in hidden)
    out = []
    for r, t, s in zip(graph.relations, traces, seen, strict=True):
        y = still[r.index]
        lead = y.shape[:1] if rule.batched else ()
        n = prod(y.shape[len(lead) :])
        units = jnp.eye(n, dtype=y.dtype).reshape((n, *(1,) * len(lead), *y.shape[len(lead) :]))
        units = jnp.broadcast_to(units, (n, *y.shape))
        A = tuple(t["A"].values())
        moved = jax.vmap(lambda a: push(a, still))(A)
        new = jax.vmap(lambda e, r=r: push(silent, {**still, r.index: e}))(units)
        one = jnp.ones(lead, y.dtype)
        x = {} if s.x is None else {"u": seen_input(r, s.x)}
        size = lambda arrays, axis: jnp.sqrt(_squares(arrays, axis, rule.batched))
        key = jax.random.fold_in(jax.random.fold_in(rule.key, r.index), t["draws"])
        c = jax.random.rademacher(key, lead, y.dtype)
        e = rule.eps
        old, now = ([t["u"]], [x["u"]]) if x else ([], [])
        if not x or r.operator.constant_keys & set(r.keys):  # a bias has the input 1
            old, now = [t["one"], *old], [one, *now]
        r0 = jnp.sqrt((size(moved, 1) + e) / (size(old, 0) + e))
        r1 = jnp.sqrt((size(new, 1) + e) / (size(now, 0) + e))
        mix = lambda a, b, f, g, at: _along(f, a, at) * a + _along(g, b, at) * b
        pairs = zip(t["A"], moved, new, strict=True)
        trace = {
            "A": {k: mix(a, b, 1 / r0, c / r1, 1).astype(a.dtype) for k, a, b in pairs},
            "one": mix(t["one"], one, r0, c * r1, 0).astype(y.dtype),
            "draws": t["draws"] + 1,
        }
        if x:
            trace["u"] = mix(t["u"], x["u"], r0, c * r1, 0).astype(t["u"].dtype)
        out.append(trace)
    return out


def _squares(arrays: Sequence[Array], axis: int, batched: bool) -> Array:
    """Sums of squares, per sample if there are samples, on this axis."""

    def one(a: Array) -> Array:
        a = a.astype(jnp.promote_types(a.dtype, jnp.float32))
        return jnp.sum(a * a, axis=tuple(i for i in range(a.ndim) if not (batched and i == axis)))

    total = [one(a) for a in arrays]
    return sum(total[1:], total[0])


def _along(scale: Array, array: Array, axis: int) -> Array:
    if scale.ndim == 0:
        return scale
    return scale.reshape((*(1,) * axis, -1, *(1,) * (array.ndim - axis - 1)))


def kronecker_remember(
    graph: Graph,
    rule: Kronecker,
    values: Values,
    hidden: Sequence[Any],
    traces: Sequence[Any],
) -> tuple[Any, ...]:
    """The entry states; their cotangent meets the factors, nothing goes to the past."""

    def credit(params, saved, cotangents):
        consts, traces = saved
        weights, pull = operands_pulled(graph, consts, params)
        each = zip(graph.relations, traces, weights, strict=True)
        return pull([_recalled(r, rule, t, w, cotangents) for r, t, w in each])

    return remembering(values.params, hidden, (values.consts, list(traces)), credit)


def _recalled(r: Relation, rule: Kronecker, t: dict, weights: dict, cotangents: Any) -> dict:
    """pull(u, c A)."""
    y = r.operator.y
    lead = 1 if rule.batched else 0
    c: Any = 0
    for a, ct in zip(t["A"].values(), cotangents, strict=True):
        axes = tuple(range(1 + lead, a.ndim))
        c = c + (a * ct[None]).sum(axes)  # (outputs, *samples)
    c = jnp.moveaxis(c, 0, -1).reshape(y.shape).astype(y.dtype)
    ones = _along(t["one"], c, 0) * c
    constant = r.operator.constant_keys & set(r.keys)
    u = t.get("u")
    grads = r.operator.pull_all(None if u is None else u[None], c[None], weights, r.keys)
    if constant:
        found = r.operator.pull_all(None if u is None else u[None], ones[None], weights, r.keys)
        grads |= {k: found[k] for k in constant}
    return {k: grads[k].astype(weights[k].dtype) for k in r.keys}
