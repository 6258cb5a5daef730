"""The trace of every weight, propagated with the kept Jacobian.

eps_t = D_t eps_{t-1} + f_t (x) x_t          per weight element and slot
g_t   = dL_t/dw | entry fixed + <lam_t, eps_{t-1}>

A stretch of steps never touches the trace in between. With q_s the cotangent that reaches the
slots after step s from later steps, q_{s-1} = lam_s + D_s^T q_s, and P_s = D_n ... D_{s+1}:

sum of the gradients   = sum_s pull(x_s, ct_s + f_s q_s) + <q_0, eps_0>
trace afterwards       = P_0 eps_0 + sum_s x_s (x) P_s f_s
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import HiddenParamOpRelation as Relation
from ._rule import Grads, Rule, Signals, Steps
from ._stretch import folded, grown, pull, scan, taken

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
        relations: Sequence[Relation],
        traces: Sequence[Grads],
        steps: Sequence[Steps],
        weights: Sequence[Grads],
    ) -> list[Grads]:
        onward = _onward(relations, steps)
        out = []
        for r, eps, s, w in zip(relations, traces, steps, weights, strict=True):
            whole, after = onward[_space(r)]
            dtypes, lead = _dtypes(r, w), len(r.slots.lanes)
            few = r.slots.table is None
            v = folded(r, _moved(r, after, s.f))
            x = None if s.x is None else folded(r, s.x)
            new = grown(r, taken(r, x, False, folded(r, s.f)), v, w, dtypes)
            moved = {
                k: mix(r.operator.spread(k, whole, lead), eps[k].astype(dtypes[k]), few)
                for k in r.keys
            }
            out.append({k: stored(moved[k] + new[k]) for k in r.keys})
        return out

    def credit(
        relations: Sequence[Relation],
        traces: Sequence[Grads],
        steps: Sequence[Steps],
        signals: Sequence[Signals],
        weights: Sequence[Grads],
        fresh: Array | None,
    ) -> list[Grads]:
        later = _later(relations, steps, signals)
        out = []
        for r, eps, s, got, w in zip(relations, traces, steps, signals, weights, strict=True):
            first, q = later[_space(r)]
            c = folded(r, got.ct + _tail(r, s.f, q, got.masked))
            x = None if s.x is None else folded(r, s.x)
            grads = pull(r, taken(r, x, got.masked, c), c, w)
            recall = lambda r=r, eps=eps, first=first, w=w: contract(r, eps, first, w)
            if fresh is None:
                past = recall()
            else:
                none = lambda w=w, r=r: {k: jnp.zeros_like(w[k]) for k in r.keys}
                past = jax.lax.cond(fresh, none, recall)
            out.append({k: grads[k].astype(w[k].dtype) + past[k] for k in r.keys})
        return out

    return Rule(init, advance, credit, crossing=crossing)


# ------------------------------------------------------------------------------ through the steps


def _space(r: Relation) -> tuple:
    """Relations with the same slots share D, and all that is made of it."""
    s = r.slots
    return s.lanes, s.y_shape, s.width, s.dtype, s.destination.tobytes()


def _spaces(relations: Sequence[Relation]) -> dict[tuple, int]:
    """The different spaces of slots, and the first relation in each."""
    out: dict[tuple, int] = {}
    for i, r in enumerate(relations):
        out.setdefault(_space(r), i)
    return out


def _later(
    relations: Sequence[Relation], steps: Sequence[Steps], signals: Sequence[Signals]
) -> dict[tuple, tuple[Array, Array]]:
    """Per space, the cotangent at the entry of the stretch, and after each step from later ones."""
    spaces = _spaces(relations)
    chosen = list(spaces.values())
    if not chosen:
        return {}
    few = [relations[i].slots.table is None for i in chosen]
    D = [jnp.swapaxes(steps[i].D, -1, -2) for i in chosen]
    length = D[0].shape[0]
    lam = [_each_step(signals[i], length) for i in chosen]

    masked = signals[chosen[0]].masked

    def moved(d, q, few):
        out = mix(d, q, few).astype(q.dtype)
        return jnp.where((q == 0).all(-1, keepdims=True), 0, out) if masked else out

    def back(qs, now):
        return [l + moved(d, q, f) for q, d, l, f in zip(qs, *now, few, strict=True)], qs

    start = [jnp.zeros(l.shape[1:], l.dtype) for l in lam]
    first, q = scan(back, start, (D, lam), length, reverse=True)
    return dict(zip(spaces, zip(first, q, strict=True), strict=True))


def _each_step(s: Signals, length: int) -> Array:
    """Cotangents at the entries of windows as one per step, zero within a window."""
    if s.lam.shape[0] == length:
        return s.lam
    full = jnp.zeros((length, *s.lam.shape[1:]), s.lam.dtype)
    return full.at[:: s.every].set(s.lam)


def _onward(
    relations: Sequence[Relation], steps: Sequence[Steps]
) -> dict[tuple, tuple[Array, Array]]:
    """Per space, the product of D over the stretch, and over the steps after each one."""
    spaces = _spaces(relations)
    chosen = list(spaces.values())
    if not chosen:
        return {}
    D = [steps[i].D for i in chosen]

    def back(ps, now):
        return [_times(p, d) for p, d in zip(ps, now, strict=True)], ps

    eye = [jnp.broadcast_to(jnp.eye(d.shape[-1], dtype=d.dtype), d.shape[1:]) for d in D]
    whole, after = scan(back, eye, D, D[0].shape[0], reverse=True)
    return dict(zip(spaces, zip(whole, after, strict=True), strict=True))


def _times(a: Array, b: Array) -> Array:
    """A product of matrices; of small ones written out."""
    n = a.shape[-1]
    if n == 1:
        return a * b
    return (a[..., None] * b[..., None, :, :]).sum(-2) if n <= 4 else a @ b


def _moved(r: Relation, after: Array, f: Array) -> Array:
    """P f, for every step and turn."""
    few = r.slots.table is None
    if r.site.turns is None:
        return mix(after, f, few)
    return jax.vmap(lambda p, turns: jax.vmap(lambda v: mix(p, v, few))(turns))(after, f)


def _tail(r: Relation, f: Array, q: Array, masked: bool) -> Array:
    """f q, the cotangent at y, for every step and turn."""
    lead = 1
    if r.site.turns is not None:
        q, lead = q[:, None], 2
    out = (jnp.where(q == 0, 0, f * q) if masked else f * q).sum(-1)
    return out.sum(lead) if r.slots.lanes else out


# ------------------------------------------------------------------------------------ the trace


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
