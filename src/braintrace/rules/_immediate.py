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

import jax.numpy as jnp
from jax import Array

from ..engine import ExitCotangents, Fresh, Grads, Rule, Signals
from ..graph import HiddenParamOpRelation as Relation
from ._block import folded, iterations, pull, scan, storage, taken
from ._factored import factors
from ._linear import at_output
from ._options import TraceDtype
from ._relation_rule import (
    Blocks,
    RelationBlock,
    RelationFunctions,
    RelationsBackward,
    relation_rule,
)


def untraced() -> Rule:
    """The gradient within a step or window, and no memory."""

    def credit(blocks: Blocks, signals: Sequence[Signals], fresh: Fresh) -> list[Grads]:
        return [_within(b, s.ct, s.masked) for b, s in zip(blocks, signals, strict=True)]

    def zeros(blocks: Blocks, before: Sequence[Array], fresh: Fresh) -> list[Grads]:
        return [{k: jnp.zeros_like(b.weights[k]) for k in b.relation.keys} for b in blocks]

    # Beside other rules of a mixture: nothing goes from block to block.
    backward = RelationsBackward(
        adjoints=lambda relations, dtype: [],
        moves=lambda relations: [],
        credit=lambda blocks, signals, after: (credit(blocks, signals, None), []),
        read=zeros,
        deposits=lambda blocks, moves: ([], [(None, jnp.zeros(len(b.steps.f))) for b in blocks]),
        put=lambda blocks, moves, deposits, fresh: [b.trace for b in blocks],
    )
    return relation_rule(
        RelationFunctions(
            lambda r, weights: {},
            lambda blocks, fresh: [b.trace for b in blocks],
            credit,
            backward=backward,
        ),
        takes_signal=False,
        approximates="the trace of every weight: there is none",
    )


def _within(block: RelationBlock, ct: Array, masked: bool) -> Grads:
    r, _, s, weights, *_ = block
    c = folded(r, ct)
    return pull(r, taken(r, folded(r, s.x), masked, c), c, weights)


def paired(
    decay_pre: float, decay_post: float, pre: float, post: float, trace_dtype: TraceDtype = None
) -> Rule:
    """Pairings of inputs and sensitivities, in both orders of time."""

    causal, stored = factors(decay_pre, 0.0, trace_dtype), storage(trace_dtype)
    assert causal.prepare is not None
    prepare_causal = causal.prepare

    def init(r: Relation, weights: Grads) -> dict[str, Any]:
        kind = jnp.result_type(r.slots.dtype, r.operator.y.dtype)
        tail = jnp.zeros((*iterations(r), *r.slots.shape, r.slots.width), kind)
        return {"causal": causal.init(r, weights), "tail": stored(tail)}

    def prepare(blocks: Blocks) -> list[Any]:
        of_inputs = prepare_causal([b._replace(trace=b.trace["causal"]) for b in blocks])
        out = []
        for b, causal in zip(blocks, of_inputs, strict=True):
            step = lambda old, f: ((decay_post * old + f).astype(old.dtype), old)
            tail, f = b.trace["tail"], b.steps.f
            out.append((causal, scan(step, tail.astype(f.dtype), f, f.shape[0])))
        return out

    def causal_part(b: RelationBlock) -> RelationBlock:
        return b._replace(
            trace=b.trace["causal"], steps=b.steps._replace(prepared=b.steps.prepared[0])
        )

    def advance(blocks: Blocks, fresh: Fresh) -> list[Any]:
        new = causal.advance([causal_part(b) for b in blocks], fresh)
        last = [b.steps.prepared[1][0].astype(b.trace["tail"].dtype) for b in blocks]
        return [{"causal": n, "tail": t} for n, t in zip(new, last, strict=True)]

    def credit(blocks: Blocks, signals: Sequence[Signals], fresh: Fresh) -> list[Grads]:
        before = causal.credit([causal_part(b) for b in blocks], signals, fresh)
        out = []
        for b, got, grads in zip(blocks, signals, before, strict=True):
            at = got.new if got.exits is None else got.exits
            assert at is not None  # paired spikes are for single steps
            r = b.relation
            late = decay_post * at_output(b, b.steps.prepared[1][1], at, got.masked)
            after = _within(b, late.astype(got.ct.dtype), got.masked)
            out.append({k: pre * grads[k] + post * after[k] for k in r.keys})
        return out

    return relation_rule(
        RelationFunctions(init, advance, credit, prepare),
        exit_cotangents=ExitCotangents.READ,
        takes_signal=False,
        approximates="the trace of every weight: pairings of inputs and sensitivities",
    )
