"""What a trace of every weight is stored in, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..engine import Grads
from ..graph import HiddenParamOpRelation as Relation

Array = jax.Array


def storage(trace_dtype: Any) -> Callable[[Array], Array]:
    """How a trace is stored: as it is, or in another precision (complex stays complex)."""

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


def dtypes_of(r: Relation, weights: Grads) -> dict:
    # A real weight has a real trace: slots are real, and Re(f dy/dw) is what moves them.
    out = {}
    for k in r.keys:
        w = jnp.zeros((), weights[k].dtype)
        base = jnp.result_type(r.slots.dtype, w.real)
        out[k] = jnp.result_type(base, jnp.complex64) if jnp.iscomplexobj(w) else base
    return out
