"""Rules whose trace is less than a derivative: nothing at all, or pairings of spikes in time.

Without a trace a step has the gradient within it, g_t = pull(x_t, ct_t), and a window that of
truncated backpropagation. With pairings

    X_t = a X_{t-1} + x_t,    e_t = b e_{t-1} + f_t
    g_t = pre pull(X_t, ct_t) + post pull(x_t, b <new_t, e_{t-1}>)

inputs before the unit was sensitive count as `pre`, inputs after it as `post`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..engine import ExitCotangents, Fresh, Grads, Rule, Signals, Steps
from ..graph import HiddenParamOpRelation as Relation
from ._block import folded, pull, scan, taken
from ._factored import factors, remembered
from ._relation_rule import RelationFunctions, relation_rule
from ._trace import storage

Array = jax.Array


def untraced() -> Rule:
    """The gradient within a step or window, and no memory."""

    def credit(relations, traces, steps, signals, weights, fresh) -> list[Grads]:
        each = zip(relations, steps, signals, weights, strict=True)
        return [_within(r, s, got.ct, got.masked, w) for r, s, got, w in each]

    return relation_rule(
        RelationFunctions(
            lambda r, weights: {},
            lambda relations, traces, steps, weights, fresh: list(traces),
            credit,
        ),
        takes_signal=False,
        approximates="the trace of every weight: there is none",
    )


def _within(r: Relation, s: Steps, ct: Array, masked: bool, weights: Grads) -> Grads:
    c = folded(r, ct)
    x = None if s.x is None else taken(r, folded(r, s.x), masked, c)
    return pull(r, x, c, weights)


def paired(
    decay_pre: float, decay_post: float, pre: float, post: float, trace_dtype: Any = None
) -> Rule:
    """Pairings of inputs and sensitivities, in both orders of time."""

    causal, stored = factors(decay_pre, 0.0, trace_dtype), storage(trace_dtype)
    assert causal.prepare is not None
    prepare_causal = causal.prepare

    def init(r: Relation, weights: Grads) -> dict[str, Any]:
        turns = () if r.site.iterations is None else (r.site.iterations,)
        kind = jnp.result_type(r.slots.dtype, r.operator.y.dtype)
        tail = jnp.zeros((*turns, *r.slots.shape, r.slots.width), kind)
        return {"causal": causal.init(r, weights), "tail": stored(tail)}

    def prepare(relations, traces, steps) -> list[Any]:
        own = prepare_causal(relations, [t["causal"] for t in traces], steps)
        out = []
        for t, s, o in zip(traces, steps, own, strict=True):
            step = lambda old, f: ((decay_post * old + f).astype(old.dtype), old)
            out.append((o, scan(step, t["tail"].astype(s.f.dtype), s.f, s.f.shape[0])))
        return out

    def split(traces: Sequence[Any], steps: Sequence[Steps]) -> tuple[list, list]:
        return [t["causal"] for t in traces], [s._replace(own=s.own[0]) for s in steps]

    def advance(relations, traces, steps, weights, fresh: Fresh) -> list[Any]:
        old, seen = split(traces, steps)
        new = causal.advance(relations, old, seen, weights, fresh)
        return [
            {"causal": n, "tail": s.own[1][0].astype(t["tail"].dtype)}
            for n, s, t in zip(new, steps, traces, strict=True)
        ]

    def credit(
        relations, traces, steps, signals: Sequence[Signals], weights, fresh: Fresh
    ) -> list[Grads]:
        old, seen = split(traces, steps)
        first = causal.credit(relations, old, seen, signals, weights, fresh)
        out = []
        for r, s, got, w, grads in zip(relations, steps, signals, weights, first, strict=True):
            assert got.new is not None  # paired spikes are for single steps
            late = decay_post * remembered(r, s.own[1][1], got.new, got.masked)
            after = _within(r, s, late.astype(got.ct.dtype), got.masked, w)
            out.append({k: pre * grads[k] + post * after[k] for k in r.keys})
        return out

    return relation_rule(
        RelationFunctions(init, advance, credit, prepare),
        exit_cotangents=ExitCotangents.READ,
        takes_signal=False,
        approximates="the trace of every weight: pairings of inputs and sensitivities",
    )
