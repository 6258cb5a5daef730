"""Two low-pass factors per operator instead of one trace per weight.

    eps_x_t = a_x eps_x_{t-1} + x_t              (a bias has the input 1)
    eps_f_t = a_f D_t eps_f_{t-1} + (1 - a_f) f_t
    g_t     = pull(eps_x_t, a_f <lam_t, eps_f_{t-1}> + (1 - a_f) ct_t) / (1 - a_f^t)

where ct_t is the cotangent of the operator's output within the step, and t counts trace steps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..graph import HiddenParamOpRelation as Relation
from ._per_weight import mix, storage
from ._rule import Grads, Rule

Array = jax.Array


def factored(decay_x: float, decay_f: float, trace_dtype=None) -> Rule:
    """Filter input and tail separately, with the decays `decay_x` and `decay_f`."""

    stored = storage(trace_dtype)

    def init(r: Relation, weights: Grads) -> dict[str, Any]:
        op = r.operator
        real = r.slots.dtype
        y = jnp.zeros((), jnp.result_type(real, op.y.dtype))
        turns = () if r.site.turns is None else (r.site.turns,)
        shape = (*turns, *r.slots.shape, r.slots.width)
        trace: dict[str, Any] = {
            "f": stored(jnp.zeros(shape, y.dtype)),
            "one": jnp.zeros((), y.real.dtype),
            "steps": jnp.zeros((), jnp.int32),
        }
        if op.x is not None:
            seen = jax.eval_shape(lambda x: _seen(r, x), op.x)
            trace["x"] = stored(jnp.zeros((*turns, *seen.shape), seen.dtype))
        return trace

    def advance(
        r: Relation, eps: dict, x: Array | None, f: Array, D: Array, weights: Grads
    ) -> dict:
        old = eps["f"].astype(f.dtype)
        out = {
            "f": stored(decay_f * _moved(r, D, old) + (1 - decay_f) * f),
            "one": decay_x * eps["one"] + 1,
            "steps": eps["steps"] + 1,
        }
        if "x" in eps:
            seen = _seen(r, x) if r.site.turns is None else jax.vmap(lambda v: _seen(r, v))(x)
            out["x"] = stored(decay_x * eps["x"].astype(seen.dtype) + seen)
        return jax.tree.map(lambda new, before: new.astype(before.dtype), out, dict(eps))

    def pulled(r: Relation, eps: dict, steps: Array, ct: Array, weights: Grads) -> Grads:
        op = r.operator
        correction = 1 - jnp.asarray(decay_f, eps["one"].dtype) ** steps
        ct = ct / jnp.where(correction > 0, correction, 1).astype(ct.real.dtype)
        x = None
        if op.x is not None:
            x = eps["x"].astype(jax.eval_shape(lambda v: _seen(r, v), op.x).dtype)
        if r.site.turns is None:
            grads = op.pull(x, ct, weights)
        else:
            each = jax.vmap(lambda x, c: op.pull(x, c, weights))(x, ct)
            grads = jax.tree.map(lambda g: g.sum(0), each)
        one = eps["one"]
        return {
            k: grads[k] * one.astype(grads[k].real.dtype) if k in op.constant_keys else grads[k]
            for k in r.keys
        }

    def remembered(r: Relation, eps: dict, lam: Array) -> Array:
        total = (lam * eps["f"].astype(jnp.result_type(lam, eps["f"]))).sum(-1)
        lane = 0 if r.site.turns is None else 1
        return total.sum(lane) if r.slots.lanes else total

    def recall(r: Relation, before: dict, after: dict, lam: Array, weights: Grads) -> Grads:
        ct = decay_f * remembered(r, before, lam)
        return pulled(r, after, after["steps"], ct, weights)

    def recall_window(r: Relation, before: dict, lam: Array, weights: Grads) -> Grads:
        return pulled(r, before, before["steps"], remembered(r, before, lam), weights)

    def tap(r: Relation, after: dict, ct: Array, weights: Grads) -> Grads:
        return pulled(r, after, after["steps"], (1 - decay_f) * ct, weights)

    words = "the trace of every weight: two filtered factors stand for it"
    return Rule(init, advance, recall, recall_window, tap, approximates=words)


def _moved(r: Relation, D: Array, old: Array) -> Array:
    few = r.slots.table is None
    if r.site.turns is None:
        return mix(D, old, few)
    return jax.vmap(lambda eps: mix(D, eps, few))(old)


def _seen(r: Relation, x: Array | None) -> Array:
    """The input as numbers that can be filtered: spikes may come as booleans or integers."""
    seen = jnp.asarray(r.operator.represent(x))
    return seen if jnp.issubdtype(seen.dtype, jnp.inexact) else seen.astype(r.operator.y.dtype)
