"""The trace of every weight, propagated with the kept Jacobian.

eps_t = D_t eps_{t-1} + f_t (x) x_t          per weight element and slot
g_t   = dL_t/dw | entry fixed + <lam_t, eps_{t-1}>

A block of steps never touches the trace in between. With q_s the cotangent that reaches the
slots after step s from later steps, q_{s-1} = lam_s + D_s^T q_s, and P_s = D_n ... D_{s+1}:

sum of the gradients   = sum_s pull(x_s, ct_s + f_s q_s) + <q_0, eps_0>
trace afterwards       = P_0 eps_0 + sum_s x_s (x) P_s f_s

Where the weights change at every step the trace is read at every step, but it need not be written:
the last few steps can wait beside it, eps = M base + sum_i x_i (x) v_i, where M and v move on as
eps would, and are folded in when there are enough of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._errors import not_supported
from ..engine import ExitCotangents, Feedback, Fresh, Grads, Pending, Rule, Signals, mix
from ..graph import HiddenParamOpRelation as Relation
from ._block import contract, dtypes_of, either, folded, grown, iterations, pull, storage, taken
from ._kept import at_filtered, filtered
from ._linear import at_output, later, moved, onward, times
from ._options import TraceDtype
from ._relation_rule import Blocks, Kept, RelationFunctions, relation_rule

Recall = Callable[
    [Sequence[Relation], Sequence[Any], Sequence[Array], Sequence[Grads]], list[Grads]
]


def per_weight(
    trace_dtype: TraceDtype = None,
    *,
    exit_cotangents: ExitCotangents | None = None,
    kept: Kept | None = None,
    feedback: Feedback | None = None,
    kappa: float = 0.0,
    most: float | None = None,
) -> Rule:
    """One trace entry per (free output position, weight element, slot).

    `kept` is the Jacobian in place of the step's own, `kappa` the decay of a second trace, the
    first one filtered, in slots of its own; a trace is clipped to the absolute value `most`.
    """
    stored = storage(trace_dtype)
    copies = 2 if kappa else 1

    def init(r: Relation, weights: Grads) -> Grads:
        dtypes = dtypes_of(r, weights)
        if most is not None and any(
            jnp.issubdtype(d, jnp.complexfloating) for d in dtypes.values()
        ):
            raise not_supported(
                "a bound for the trace of a complex weight.",
                where=r.site.equation.where(),
                why="complex numbers have no order",
                do="leave out trace_clip_abs, or keep real and imaginary parts as two weights",
            )
        shape = lambda k: (*r.slots.lanes, *r.operator.trace_shape(k), copies * r.slots.width)
        return {k: stored(jnp.zeros(shape(k), dtypes[k])) for k in r.keys}

    def grow(r: Relation, eps: Grads, D: Array, new: Grads, fresh: Fresh) -> Grads:
        """D eps + new; which of two at run time would copy the traces."""
        lead, few = len(r.slots.lanes), r.slots.table is None
        out = {}
        for k in r.keys:
            total = jnp.broadcast_to(new[k], eps[k].shape)
            if fresh is not True:
                old = eps[k].astype(new[k].dtype)
                total = mix(r.operator.spread(k, D, lead), old, few) + new[k]
            out[k] = stored(total if most is None else jnp.clip(total, -most, most))
        return out

    def advance(blocks: Blocks, fresh: Fresh) -> list[Grads]:
        out = []
        for (r, eps, s, w), (total, v) in zip(blocks, onward(blocks, True), strict=True):
            v = folded(r, v)
            x = taken(r, folded(r, s.x), False, folded(r, s.f))
            out.append(grow(r, eps, total, grown(r, x, v, w, dtypes_of(r, w)), fresh))
        return out

    def fold(relations: Sequence[Relation], traces: Sequence[dict]) -> list[Grads]:
        out = []
        for r, p in zip(relations, traces, strict=True):
            # The operator is affine, so its derivative by the weights reads none of them.
            w = {k: jnp.zeros(s.shape, s.dtype) for k, s in r.operator.shapes.items()}
            v = folded(r, p["v"])
            new = grown(r, _waiting_inputs(r, p, v), v, w, dtypes_of(r, w))
            out.append(grow(r, p["base"], p["M"], new, None))
        return out

    steps_kept, placed = kept, lambda signals: signals
    if kappa:
        steps_kept, placed = filtered(kept, kappa), lambda signals: at_filtered(signals, kappa)
    how: dict[str, Any] = dict(
        kept=steps_kept,
        exit_cotangents=exit_cotangents or (ExitCotangents.READ if kappa else None),
        feedback=feedback,
        one_by_one=most is not None,
        folds=True,
        approximates=_words(kept, feedback, kappa),
    )
    waiting = relation_rule(RelationFunctions(init, _wait, _credit(_recall_waiting, placed)), **how)
    pending = Pending(_open, waiting, fold) if most is None else None
    functions = RelationFunctions(init, advance, _credit(contract, placed))
    return relation_rule(functions, pending=pending, **how)


def _words(kept: Any, feedback: Any, kappa: float) -> str | None:
    words = [
        (kept, "the memory of the states: every trace decays alike"),
        (feedback, "the derivative of the loss by the states: random operands in the reverse pass"),
        (kappa, "the trace of every weight: it is filtered once more"),
    ]
    return "; ".join(text for applies, text in words if applies) or None


def _credit(recall: Recall, placed: Callable[[Signals], Signals]):
    """The gradients of a block; `recall` is what a cotangent at its entry makes of the trace."""

    def credit(blocks: Blocks, signals: Sequence[Signals], fresh: Fresh) -> list[Grads]:
        signals = [placed(s) for s in signals]
        behind = later(blocks, signals)
        now = []
        for (r, _, s, w), got, (_, q) in zip(blocks, signals, behind, strict=True):
            c = folded(r, got.ct + at_output(r, s.f, q, got.masked))
            grads = pull(r, taken(r, folded(r, s.x), got.masked, c), c, w)
            now.append({k: grads[k].astype(w[k].dtype) for k in r.keys})

        def with_past() -> list[Grads]:
            relations, traces, _, weights = zip(*blocks, strict=True)
            first = [entry for entry, _ in behind]
            return jax.tree.map(jnp.add, now, recall(relations, traces, first, weights))

        return either(fresh, lambda: now, with_past) if blocks else now

    return credit


# ------------------------------------------------------------------------- steps beside the trace


def _open(relations: Sequence[Relation], traces: Sequence[Grads], size: int) -> list[dict]:
    """The traces, with room for `size` steps beside each."""
    out = []
    for r, eps in zip(relations, traces, strict=True):
        op, s = r.operator, r.slots
        lead = (size, *iterations(r))
        full = jnp.issubdtype(op.y.dtype, jnp.complexfloating)
        kind = jnp.result_type(s.dtype, op.y.dtype) if full else s.dtype
        width = jax.tree.leaves(eps)[0].shape[-1]
        p = {
            "base": eps,
            "M": jnp.broadcast_to(jnp.eye(width, dtype=s.dtype), (*s.shape, width, width)),
            "v": jnp.zeros((*lead, *s.shape, width), kind),
            "count": jnp.zeros((), jnp.int32),
        }
        if op.record is not None:
            zeros = lambda a, lead=lead: jnp.zeros((*lead, *a.shape), a.dtype)
            p["x"] = jax.tree.map(zeros, op.record)
        out.append(p)
    return out


def _wait(blocks: Blocks, fresh: Fresh) -> list[dict]:
    """Traces with the steps of a block beside them."""
    out = []
    for (r, p, s, _), (total, moved_f) in zip(blocks, onward(blocks, False), strict=True):
        v = jax.vmap(partial(moved, r, total))(p["v"])
        put = lambda a, b, p=p: lax.dynamic_update_slice_in_dim(a, b.astype(a.dtype), p["count"], 0)
        new = {
            **p,
            "M": times(total, p["M"]),
            "v": put(v, moved_f),
            "count": p["count"] + s.f.shape[0],
        }
        if s.x is not None:
            new["x"] = jax.tree.map(put, p["x"], s.x)
        out.append(new)
    return out


def _recall_waiting(
    relations: Sequence[Relation],
    traces: Sequence[dict],
    cotangents: Sequence[Array],
    weights: Sequence[Grads],
) -> list[Grads]:
    all_of = list(zip(relations, traces, cotangents, weights, strict=True))
    back = [mix(jnp.swapaxes(p["M"], -1, -2), q, r.slots.table is None) for r, p, q, _ in all_of]
    old = contract(relations, [p["base"] for p in traces], back, weights)
    for (r, p, q, w), grads in zip(all_of, old, strict=True):
        c = folded(r, at_output(r, p["v"], q[None], False))
        new = pull(r, _waiting_inputs(r, p, c), c, w)
        grads.update({k: grads[k] + new[k].astype(grads[k].dtype) for k in r.keys})
    return old


def _waiting_inputs(r: Relation, p: dict, c: Array) -> Any:
    """The inputs of the buffered steps; free places hold zeros."""
    if "x" not in p:
        return None
    x = folded(r, p["x"])
    return x if r.operator.is_linear else taken(r, x, True, c)
