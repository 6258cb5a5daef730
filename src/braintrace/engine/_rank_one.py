"""Everything a parameter has done to the states, as one outer product with the right mean.

E_t = (dF/dh) E_{t-1} + dF/dp is estimated by s w^T. With random signs nu, one per state element,

    d = (dF/dh) s,    p = nu^T dF/dp
    s <- r0 d + r1 nu,    w <- w / r0 + p / r1

for any positive r0, r1; these make both terms of equal length. The trace is one entry per parameter
leaf, and a last one with s and the number of signs drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import NotSupportedError, message
from ..graph import Graph
from ..rules import RankOne
from ._evaluate import Values, evaluate_plain
from ._forward import new_hidden
from ._remember import remembering

Array = jax.Array


def rank_one_init(graph: Graph, params: Sequence[Any]) -> list[Any]:
    """Zero factors."""
    entries = [graph.step.entry(leaf) for leaf in graph.step.hidden]
    if any(v.is_complex for v in entries) or any(jnp.iscomplexobj(p) for p in params):
        raise NotSupportedError(
            message(
                "a complex state or parameter.",
                why="random signs are drawn for real numbers",
                do="keep real and imaginary parts in states and parameters of their own",
            )
        )
    s = {str(k): jnp.zeros(v.shape, v.dtype) for k, v in enumerate(entries)}
    out: list[Any] = [{"w": jnp.zeros(p.shape, p.dtype)} if _floats(p) else {} for p in params]
    return [*out, {"s": s, "draws": jnp.zeros((), jnp.int32)}]


def _floats(p: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(p), jnp.inexact)


def rank_one_advance(
    graph: Graph, rule: RankOne, values: Values, traces: Sequence[Any]
) -> list[Any]:
    """Push the factors through a step."""
    *ws, last = traces
    s = tuple(last["s"].values())
    hidden, params = tuple(values.hidden), tuple(values.params)
    key = jax.random.fold_in(rule.key, last["draws"])
    nu = [
        jax.random.rademacher(jax.random.fold_in(key, k), h.shape, h.dtype)
        for k, h in enumerate(hidden)
    ]
    forward = lambda h: new_hidden(graph, replace(values, hidden=h))
    d = jax.jvp(forward, (hidden,), (s,))[1]

    def of(theta):
        given = iter(theta)
        full = tuple(next(given) if t else p for p, t in zip(params, ws, strict=True))
        outs = evaluate_plain(graph, replace(values, params=full))
        return [outs[leaf.output] for leaf in graph.step.hidden]

    theta = [p for p, t in zip(params, ws, strict=True) if t]
    (p,) = jax.vjp(of, theta)[1](list(nu))
    w = [t["w"] for t in ws if t]
    e = rule.eps
    r0 = jnp.sqrt((length(w) + e) / (length(d) + e))
    r1 = jnp.sqrt((length(p) + e) / (length(nu) + e))
    moved = {k: (r0 * a + r1 * n).astype(a.dtype) for k, a, n in zip(last["s"], d, nu, strict=True)}
    new = iter([(old / r0 + add / r1).astype(old.dtype) for old, add in zip(w, p, strict=True)])
    out: list[Any] = [{"w": next(new)} if t else t for t in ws]
    return [*out, {"s": moved, "draws": last["draws"] + 1}]


def length(arrays: Sequence[Array]) -> Array:
    """The norm of all of them together, in single precision or better."""
    wide = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in arrays]
    return jnp.sqrt(sum((jnp.sum(a * a) for a in wide), jnp.zeros(())))


def rank_one_remember(
    graph: Graph, params: Sequence[Any], hidden: Sequence[Any], traces: Sequence[Any]
) -> tuple[Any, ...]:
    """The entry states; their cotangent meets the factors, nothing goes to the past."""

    def credit(params, traces, cotangents):
        *ws, last = traces
        pairs = zip(last["s"].values(), cotangents, strict=True)
        dot = sum((jnp.vdot(a, c) for a, c in pairs), jnp.zeros(()))
        return tuple(
            (dot * t["w"]).astype(t["w"].dtype) if t else np.zeros(p.shape, jax.dtypes.float0)
            for p, t in zip(params, ws, strict=True)
        )

    return remembering(params, hidden, list(traces), credit)
