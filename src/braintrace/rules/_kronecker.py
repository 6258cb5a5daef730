"""Everything the weight of an operator has done to the states, as one product with the right mean.

The influence of an operator's weights on the states, E_t = (dF/dh) E_{t-1} + F_t dy/dw with
F = dh'/dy, is estimated by A dy/dw(u): `u` stands for the inputs, `A` leads from outputs to states.
With a random sign c per step, and per sample,

    u <- r0 u + c r1 x,    A <- (dF/dh) A / r0 + c F / r1

for any positive r0, r1; these make both terms of equal length. A bias has the input 1. The axes of
A are (outputs, *state), where samples of a batch share an axis of the state. Samples have signs of
their own where they never reach each other's states (`Graph.samples_are_apart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import not_supported
from ..engine import (
    Arrived,
    Rule,
    Values,
    inputs_of,
    new_hidden,
    observe,
    operands_pulled,
    product,
    pushed,
    zeros_like_traces,
)
from ..graph import Graph, leaf_name, operator_names, seed_of
from ..graph import HiddenParamOpRelation as Relation
from ._block import seen_input
from ._full_influence import over_states
from ._rank_one import per_state


def kronecker(key: Array, eps: float = 1e-12) -> Rule:
    """The influence of every weight on every state, as one random product per operator."""

    def reset(traces: Sequence[Any]) -> list[Any]:
        pairs = zip(zeros_like_traces(traces), traces, strict=True)
        return [{**zeros, "draws": t["draws"]} for zeros, t in pairs]

    return over_states(
        partial(_pushed, key, eps),
        init=_init,
        traced=lambda graph: [(r.index, r.weight_path) for r in graph.relations],
        names=_names,
        credit=_credit,
        reset=reset,
        one_by_one=True,
        constants={"key": key, "eps": eps},
        approximates="the influence of every weight: one random product stands for it",
    )


def _names(graph: Graph) -> list[Any]:
    """The factor A per state; a state that another step does not have starts without influence."""
    states = {str(k): leaf_name(leaf) for k, leaf in enumerate(graph.step.hidden)}
    out = []
    for name, r in zip(operator_names(graph), graph.relations, strict=True):
        parts = ["one", "draws"] if r.operator.x is None else ["one", "draws", "u"]
        along = {k: f"{name} -> {state}" for k, state in states.items()}
        out.append({"A": along, **{k: f"{name} {k}" for k in parts}})
    return out


def _init(graph: Graph, values: Values) -> list[Any]:
    """Zero factors, per relation."""
    entries = [graph.step.entry(leaf) for leaf in graph.step.hidden]
    for r in graph.relations:
        _check(r, entries)
    batched = graph.samples_are_apart(values.consts)
    out = []
    for r in graph.relations:
        op = r.operator
        lead = op.y.shape[:1] if batched else ()
        n = prod(op.y.shape[len(lead) :])
        trace: dict[str, Any] = {
            "A": {str(k): jnp.zeros((n, *v.shape), v.dtype) for k, v in enumerate(entries)},
            "one": jnp.zeros(lead, op.y.dtype),
            "draws": jnp.zeros((), jnp.int32),
        }
        if op.x is not None:
            x = jax.eval_shape(partial(seen_input, r), op.x)
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
        raise not_supported(
            f"KFRTRL cannot follow the operator {r.primitive.name}.",
            where=r.site.equation.where(),
            why=why,
            do="use UORO, RTRL, SnAp or D_RTRL",
        )


def _pushed(key: Array, e: float, graph: Graph, values: Values, traces: Sequence[Any]) -> list[Any]:
    """The factors after a step."""
    steps = observe(graph, values.consts, inputs_of(graph, values), {})
    hidden = tuple(values.hidden)
    zeros = {r.index: jnp.zeros(r.operator.y.shape, r.operator.y.dtype) for r in graph.relations}
    after = lambda hidden, taps: new_hidden(graph, replace(values, hidden=hidden), taps)
    push = pushed(graph, after, hidden, zeros)
    none = tuple(jnp.zeros_like(h) for h in hidden)
    pushed_unit = lambda index, unit: push(none, {**zeros, index: unit})
    out = []
    each = zip(graph.relations, traces, steps, operator_names(graph), strict=True)
    for r, t, s, name in each:
        y, lead = zeros[r.index], t["one"].shape
        batched = bool(lead)
        n = prod(y.shape[len(lead) :])
        units = jnp.eye(n, dtype=y.dtype).reshape((n, *(1,) * len(lead), *y.shape[len(lead) :]))
        units = jnp.broadcast_to(units, (n, *y.shape))
        moved = jax.vmap(lambda a: push(a, zeros))(per_state(t["A"]))
        new = jax.vmap(partial(pushed_unit, r.index))(units)
        one = jnp.ones(lead, y.dtype)
        x = {} if s.x is None else {"u": seen_input(r, s.x)}
        size = partial(_size, batched)
        drawn = jax.random.fold_in(jax.random.fold_in(key, seed_of(name)), t["draws"])
        c = jax.random.rademacher(drawn, lead, y.dtype)
        old, now = ([t["u"]], [x["u"]]) if x else ([], [])
        if not x or r.operator.constant_keys & set(r.keys):  # a bias has the input 1
            old, now = [t["one"], *old], [one, *now]
        r0 = jnp.sqrt((size(moved, 1) + e) / (size(old, 0) + e))
        r1 = jnp.sqrt((size(new, 1) + e) / (size(now, 0) + e))
        # With the sign c: (r0 u + c r1 x) (A / r0 + c B / r1) has the mean u A + x B, as c is its
        # own inverse and zero in the mean. r0 and r1 make the two factors of each product equally
        # long.
        mix = lambda a, b, f, g, at: _along(f, a, at) * a + _along(g, b, at) * b
        pairs = enumerate(zip(moved, new, strict=True))
        trace = {
            "A": {str(k): mix(a, b, 1 / r0, c / r1, 1).astype(a.dtype) for k, (a, b) in pairs},
            "one": mix(t["one"], one, r0, c * r1, 0).astype(y.dtype),
            "draws": t["draws"] + 1,
        }
        if x:
            trace["u"] = mix(t["u"], x["u"], r0, c * r1, 0).astype(t["u"].dtype)
        out.append(trace)
    return out


def _size(batched: bool, arrays: Sequence[Array], axis: int) -> Array:
    """The root of the sum of squares, per sample if there are samples, on this axis."""

    def one(a: Array) -> Array:
        a = a.astype(jnp.promote_types(a.dtype, jnp.float32))
        return jnp.sum(a * a, axis=tuple(i for i in range(a.ndim) if not (batched and i == axis)))

    return jnp.sqrt(sum(map(one, arrays[1:]), one(arrays[0])))


def _along(scale: Array, array: Array, axis: int) -> Array:
    if scale.ndim == 0:
        return scale
    return scale.reshape((*(1,) * axis, -1, *(1,) * (array.ndim - axis - 1)))


def _credit(graph: Graph, arrived: Arrived) -> Any:
    weights, pull = operands_pulled(graph, arrived.consts, arrived.params)
    cotangents = [c[0] for c in arrived.entry]
    each = zip(graph.relations, arrived.traces, weights, strict=True)
    return pull([_recalled(r, t, w, cotangents) for r, t, w in each])


def _recalled(r: Relation, t: dict, weights: dict, cotangents: Sequence[Array]) -> dict:
    """pull(u, c A)."""
    y, lead = r.operator.y, t["one"].ndim
    c: Any = 0
    # The trace u (x) A of y = x @ W into states: a cotangent of the states meets A, which leaves
    # one of y, and that meets u as an input: the pull-back of the operator, u.T (c A).
    for a, ct in zip(per_state(t["A"]), cotangents, strict=True):
        axes = tuple(range(1 + lead, a.ndim))
        c = c + product(ct[None], a).sum(axes)  # (outputs, *samples)
    c = jnp.moveaxis(c, 0, -1).reshape(y.shape).astype(y.dtype)
    ones = _along(t["one"], c, 0) * c
    constant = r.operator.constant_keys & set(r.keys)
    u = t.get("u")
    x = None if u is None else u[None]
    grads = r.operator.pull_all(x, c[None], weights, r.keys)
    if constant:
        alone = r.operator.pull_all(x, ones[None], weights, r.keys)
        grads |= {k: alone[k] for k in constant}
    return {k: grads[k].astype(weights[k].dtype) for k in r.keys}
