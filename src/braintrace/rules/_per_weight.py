"""The trace of every weight, propagated with the kept Jacobian.

eps_t = D_t eps_{t-1} + f_t (x) x_t          per weight element and slot
g_t   = dL_t/dw | entry fixed + <lam_t, eps_{t-1}>
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import HiddenParamOpRelation as Relation
from ._rule import Grads, Rule

Array = jax.Array


def per_weight(trace_dtype=None, crossing: bool = False) -> Rule:
    """One trace entry per (free output position, weight element, slot).

    Args:
        trace_dtype: type the trace is stored in; None keeps the type of its products.
        crossing: whether D holds paths through operators, restricted to the slots.
    """

    stored = storage(trace_dtype)

    def init(r: Relation, weights: Grads) -> Grads:
        dtypes = _dtypes(r, weights)
        return {
            k: stored(
                jnp.zeros(r.slots.lanes + r.operator.trace_shape(k) + (r.slots.width,), dtypes[k])
            )
            for k in r.keys
        }

    def advance(
        r: Relation, eps: Grads, x: Array | None, f: Array, D: Array, weights: Grads
    ) -> Grads:
        grown = _grown(r, x, f, weights, _dtypes(r, weights), carry(r, eps, D, weights))
        return {k: stored(grown[k]) for k in r.keys}

    def carry(r: Relation, eps: Grads, D: Array, weights: Grads) -> Grads:
        lead, dtypes = len(r.slots.lanes), _dtypes(r, weights)
        return {
            k: mix(r.operator.spread(k, D, lead), eps[k].astype(dtypes[k]), r.slots.table is None)
            for k in r.keys
        }

    def recall(r: Relation, before: Grads, after: Grads, lam: Array, weights: Grads) -> Grads:
        return contract(r, before, lam, weights)

    def recall_window(r: Relation, before: Grads, lam: Array, weights: Grads) -> Grads:
        return contract(r, before, lam, weights)

    return Rule(init, advance, recall, recall_window, carry=carry if crossing else None)


def _grown(
    r: Relation, x: Array | None, f: Array, weights: Grads, dtypes: dict, total: Grads
) -> Grads:
    """`total` and what the step adds to it: f (x) x, of every turn."""
    lead = len(r.slots.lanes)

    def add(total: Grads, x: Array | None, f: Array) -> Grads:
        features = r.operator.features(x, weights, r.keys)
        out = {}
        for k in r.keys:
            tail = r.operator.spread(k, f, lead)
            grown = features[k][..., None] * tail
            if r.site.levels:  # where the operator did not run, dy/dw may not even be a number
                grown = jnp.where(tail == 0, 0, grown)
            if not jnp.issubdtype(dtypes[k], jnp.complexfloating):
                grown = grown.real
            out[k] = total[k] + grown.astype(dtypes[k])
        return out

    if r.site.turns is None:
        return add(total, x, f)
    turn = lambda total, now: (add(total, *now), None)
    return jax.lax.scan(turn, total, (x, f))[0]


def storage(trace_dtype: Any) -> Callable[[Array], Array]:
    """How a trace is kept: as it is, or in another precision (complex stays complex)."""

    def stored(eps: Array) -> Array:
        if trace_dtype is None:
            return eps
        both = jnp.result_type(trace_dtype, jnp.complex64)
        return eps.astype(both if jnp.iscomplexobj(eps) else trace_dtype)

    return stored


def contract(r: Relation, eps: Grads, signal: Array, weights: Grads) -> Grads:
    """<signal, eps>: sum over slots, lanes and free positions, for each weight."""
    lead = len(r.slots.lanes)
    out = {}
    for k in r.keys:
        weight = weights[k]
        n_lead = eps[k].ndim - 1 - weight.ndim
        spread = r.operator.spread(k, signal, lead)
        flat = [a.reshape((-1, *a.shape[n_lead:])) for a in (spread, eps[k])]
        out[k] = _inner(*flat).astype(weight.dtype)
    return out


_UNROLLED = 32


def _inner(signal: Array, eps: Array) -> Array:
    # Sum over the first and the last axis. XLA's CPU reduction over a leading axis is two orders
    # of magnitude slower than the same additions written out, which fuse into one loop.
    dtype = jnp.result_type(signal, eps)

    def row(i) -> Array:
        s, e = signal[i], eps[i].astype(dtype)
        return sum((s[..., k] * e[..., k] for k in range(1, e.shape[-1])), s[..., 0] * e[..., 0])

    n = eps.shape[0]
    head = n % _UNROLLED
    total = sum((row(i) for i in range(head)), jnp.zeros(eps.shape[1:-1], dtype))
    if n < _UNROLLED:
        return total

    def block(j, total):
        return sum((row(head + j * _UNROLLED + i) for i in range(_UNROLLED)), total)

    return jax.lax.fori_loop(0, n // _UNROLLED, block, total)


def mix(D: Array, eps: Array, few: bool = True) -> Array:
    """D eps, slot by slot; `few` slots are added up, many are a matrix product."""
    if D.shape[-1] == 1:
        return D[..., 0] * eps
    if few:
        return (D * eps[..., None, :]).sum(-1)
    axes = range(eps.ndim - 1)
    varying = [a for a in axes if D.shape[a] != 1]
    flat = D.reshape([D.shape[a] for a in varying] + list(D.shape[-2:]))
    k, j = eps.ndim - 1, eps.ndim
    return jnp.einsum(flat, [*varying, j, k], eps, [*axes, k], [*axes, j])


def _dtypes(r: Relation, weights: Grads) -> dict:
    # A real weight has a real trace: slots are real, and Re(f dy/dw) is what moves them.
    out = {}
    for k in r.keys:
        w = jnp.zeros((), weights[k].dtype)
        base = jnp.result_type(r.slots.dtype, w.real)
        out[k] = jnp.result_type(base, jnp.complex64) if jnp.iscomplexobj(w) else base
    return out
