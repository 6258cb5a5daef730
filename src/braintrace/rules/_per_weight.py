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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._errors import not_supported
from ..engine import ExitCotangents, Feedback, Fresh, Grads, Pending, Rule, Signals
from ..graph import HiddenParamOpRelation as Relation
from ._block import (
    contract,
    dtypes_of,
    either,
    folded,
    gathered,
    iterations,
    pull_each,
    storage,
    summed_by_parts,
    taken,
    with_deposits,
)
from ._kept import at_filtered, filtered
from ._linear import (
    adjoints,
    at_output,
    at_slots_of,
    each_iteration,
    identities,
    maps_of,
    moved_on,
    no_adjoints,
    products_to_end,
)
from ._options import TraceDtype
from ._relation_rule import (
    NO_STEPS,
    Blocks,
    Kept,
    RelationBlock,
    RelationFunctions,
    RelationsBackward,
    relation_rule,
)


def per_weight(
    trace_dtype: TraceDtype = None,
    *,
    exit_cotangents: ExitCotangents | None = None,
    kept: Kept | None = None,
    feedback: Feedback | None = None,
    kappa: float = 0.0,
    most: float | None = None,
    words: str | None = None,
) -> Rule:
    """One trace entry per (free output position, weight element, slot).

    `kept` is the Jacobian in place of the step's own, `kappa` the decay of a second trace, the
    first one filtered, in slots of its own; a trace is clipped to the absolute value `most`.
    `words` say how a trace differs from RTRL's where the step is another one.
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

    def finish(trace: Array) -> Array:
        return stored(trace if most is None else jnp.clip(trace, -most, most))

    def advance(blocks: Blocks, fresh: Fresh) -> list[Grads]:
        moved = products_to_end(blocks, True)
        deposits = [
            (_inputs(b), folded(b.relation, v)) for b, (_, v) in zip(blocks, moved, strict=True)
        ]
        return added(blocks, [D for D, _ in moved], deposits, fresh)

    def added(
        blocks: Blocks, maps: Sequence[Array], deposits: Sequence[tuple], fresh: Fresh
    ) -> list[Grads]:
        """Traces moved on, with deposits (x, v)."""
        out = []
        for b, D, (x, v) in zip(blocks, maps, deposits, strict=True):
            # Which of two at run time would copy the traces.
            past = None if fresh is True else gathered(b.relation, D, 2)
            out.append(with_deposits(b, x, v, b.trace, past, finish))
        return out

    def put(
        blocks: Blocks, maps: Sequence[Array], deposits: Sequence[tuple], fresh: Fresh
    ) -> list[Grads]:
        maps = maps_of([b.relation for b in blocks], maps)
        return added(blocks, maps, deposits, fresh)

    def fold(relations: Sequence[Relation], traces: Sequence[dict]) -> list[Grads]:
        out = []
        for r, p in zip(relations, traces, strict=True):
            # The operator is affine, so its derivative by the weights reads none of them. That
            # derivatives are finite is not known here.
            w = {k: jnp.zeros(s.shape, s.dtype) for k, s in r.operator.shapes.items()}
            v, block = folded(r, p["v"]), RelationBlock(r, p, NO_STEPS, w, True, {})
            x, D = _waiting_inputs(r, p, v), gathered(r, p["M"], 2)
            out.append(with_deposits(block, x, v, p["base"], D, finish))
        return out

    steps_kept, placed = kept, lambda signals: signals
    if kappa:
        steps_kept, placed = filtered(kept, kappa), lambda signals: at_filtered(signals, kappa)
    how: dict[str, Any] = dict(
        kept=steps_kept,
        constants={} if most is None else {"trace_clip_abs": most},
        exit_cotangents=exit_cotangents or (ExitCotangents.READ if kappa else None),
        feedback=feedback,
        one_by_one=most is not None,
        folds=True,
        of_parameters=True,
        approximates=words or _words(kept, kappa),
    )
    if most is not None:
        return relation_rule(RelationFunctions(init, advance, _credit(placed)), **how)
    waiting = relation_rule(RelationFunctions(init, _wait, _credit_waiting(placed)), **how)
    pending = Pending(_fits, _open, waiting, fold)
    zeros, same = partial(no_adjoints, copies=copies), partial(identities, copies=copies)
    backward = RelationsBackward(zeros, same, _credit_backward(placed), _read, _deposits, put)
    functions = RelationFunctions(init, advance, _credit(placed), backward=backward)
    return relation_rule(functions, pending=pending, **how)


def _words(kept: Any, kappa: float) -> str | None:
    words = [
        (kept, "the memory of the states: every trace decays alike"),
        (kappa, "the trace of every weight: it is filtered once more"),
    ]
    return "; ".join(text for applies, text in words if applies) or None


class _Read(NamedTuple):
    """What a relation contributes: inputs with cotangents of y, and a trace with those of slots."""

    block: RelationBlock
    x: Any
    c: Array
    trace: Grads
    at_trace: Array
    masked: bool = False  # whether some inputs were replaced, as their step does not count

    def both(self, x: Any, c: Array, trace: Grads, at_trace: Array) -> Grads:
        """The whole gradient."""
        past = contract([self.block], [trace], [at_trace])[0]
        return jax.tree.map(jnp.add, _deposited([self._replace(x=x, c=c)])[0], past)


def _deposited(reads: Sequence[_Read]) -> list[Grads]:
    """The gradients of what the steps have deposited."""
    out = []
    items = [(b.relation, x, c, b.weights) for b, x, c, *_ in reads]
    pulled = pull_each(items, not any(read.masked for read in reads))
    for (b, *_), grads in zip(reads, pulled, strict=True):
        grads = grads | {k: grads[k] * slope for k, slope in b.slopes.items()}
        out.append({k: g.astype(b.weights[k].dtype) for k, g in grads.items()})
    return out


def _gradients(reads: Sequence[_Read], fresh: Fresh) -> list[Grads]:
    """The gradients of all relations; traces that are zero are not read."""
    whole: list[Grads | None] = [None for _ in reads]
    for i, read in enumerate(reads if fresh is not True else ()):
        b, *arrays, _ = read
        pairs = zip(arrays, (1, 1, 0, 0), strict=True)
        whole[i] = summed_by_parts(b.relation, read.both, *pairs)
    past = [i for i, grads in enumerate(whole) if grads is None]  # whose traces are to be read
    deposited = iter(_deposited([reads[i] for i in past]))
    now = [next(deposited) if grads is None else grads for grads in whole]

    def with_past() -> list[Grads]:
        blocks, _, _, traces, signals, _ = zip(*(reads[i] for i in past), strict=True)
        total = list(now)
        for i, grads in zip(past, contract(blocks, traces, signals), strict=True):
            total[i] = jax.tree.map(jnp.add, now[i], grads)
        return total

    return either(fresh, lambda: now, with_past) if past else now


def _reads(
    blocks: Blocks, signals: Sequence[Signals], after: Sequence[Array] | None = None
) -> tuple[list[_Read], list[Array]]:
    """What is read of a block and of the traces before it; the adjoints there, per space."""
    found = adjoints(blocks, signals, after)
    relations = [b.relation for b in blocks]
    at_entries, reads = at_slots_of(relations, found.before), []
    for b, got, at_entry, q in zip(blocks, signals, at_entries, found.each, strict=True):
        r, s = b.relation, b.steps
        # One product for both ways from a loss to the weight at step s: ct_s, within the step, and
        # f_s q_s, through the states after it. `x_s (ct_s + f_s q_s)`, summed over s, is `pull`.
        c = folded(r, got.ct + at_output(b, s.f, q, got.masked))
        x = taken(r, folded(r, s.x), got.masked, c)
        reads.append(_Read(b, x, c, b.trace, at_entry, got.masked))
    return reads, found.before


def _credit(placed: Callable[[Signals], Signals]):
    """The gradients of a block."""

    def credit(blocks: Blocks, signals: Sequence[Signals], fresh: Fresh) -> list[Grads]:
        return _gradients(_reads(blocks, list(map(placed, signals)))[0], fresh)

    return credit


# ---------------------------------------------------------------------------- backward over blocks


def _credit_backward(placed: Callable[[Signals], Signals]):
    """The gradients by the steps of a block alone; the adjoints before it from those after it."""

    def credit(
        blocks: Blocks, signals: Sequence[Signals], after: Sequence[Array]
    ) -> tuple[list[Grads], list[Array]]:
        reads, before = _reads(blocks, list(map(placed, signals)), after)
        return _gradients(reads, True), before

    return credit


def _read(blocks: Blocks, before: Sequence[Array], fresh: Fresh) -> list[Grads]:
    """What the adjoints are given by the traces; traces that are zero are not read."""
    signals = at_slots_of([b.relation for b in blocks], before)
    zeros = [{k: jnp.zeros_like(b.weights[k]) for k in b.relation.keys} for b in blocks]
    return either(
        fresh, lambda: zeros, lambda: contract(blocks, [b.trace for b in blocks], signals)
    )


def _deposits(blocks: Blocks, after: Sequence[Array]) -> tuple[list[Array], list[tuple]]:
    """The maps from a block on from those after it; inputs, and tails moved as far as they go."""
    maps, moved = moved_on(blocks, after)
    own = zip(blocks, moved, strict=True)
    return maps, [(_inputs(b), folded(b.relation, v)) for b, v in own]


def _inputs(b: RelationBlock) -> Any:
    """The inputs of the steps, with iterations as steps."""
    r, s = b.relation, b.steps
    return taken(r, folded(r, s.x), False, folded(r, s.f))


# ------------------------------------------------------------------------- steps beside the trace


def _fits(relations: Sequence[Relation]) -> bool:
    """Whether a deposit can wait as (x, v): nothing else of the weights at its time is in it."""
    moves = lambda r: any(m is not None for m in r.mapped.values()) and not r.is_weight
    alike = lambda r: r.slots.table is None and r.operator.is_affine and not moves(r)
    return all(map(alike, relations))


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
            p["x"] = jax.tree.map(partial(_zeros, lead), op.record)
        out.append(p)
    return out


def _zeros(lead: tuple[int, ...], like: Any) -> Array:
    return jnp.zeros((*lead, *like.shape), like.dtype)


def _wait(blocks: Blocks, fresh: Fresh) -> list[dict]:
    """Traces with the steps of a block beside them."""
    out = []
    for b, (product, moved_f) in zip(blocks, products_to_end(blocks, False), strict=True):
        r, p, s = b.relation, b.trace, b.steps
        D, base = b.map(product), b.map(p["M"])
        v = D.slots(jax.vmap(partial(each_iteration, r, D))(D.vector(p["v"])))
        new = {
            "M": D.compose(base).jacobian,
            "v": _put(p, v, moved_f),
            "count": p["count"] + s.f.shape[0],
        }
        out.append({**p, **_recorded(p, s.x), **new})
    return out


def _credit_waiting(placed: Callable[[Signals], Signals]):
    """The same where steps wait: those of the block are entries beside the trace like others."""

    def credit(blocks: Blocks, signals: Sequence[Signals], fresh: Fresh) -> list[Grads]:
        signals = [placed(s) for s in signals]
        reads, found = [], adjoints(blocks, signals)
        at_entries = at_slots_of([b.relation for b in blocks], found.before)
        for b, got, at_entry, q in zip(blocks, signals, at_entries, found.each, strict=True):
            r, p, s = b.relation, b.trace, b.steps
            now = got.ct + at_output(b, s.f, q, got.masked)
            # A waiting step i has the trace x_i v_i, so <q_0, x_i v_i> = x_i <q_0, v_i>: it is one
            # more row of the product, beside those of the block, and base meets M^T q_0.
            c = at_output(b, p["v"], at_entry[None], got.masked)
            c = folded(r, _put(p, c.astype(jnp.result_type(c, now)), now))
            x = _waiting_inputs(r, {**p, **_recorded(p, s.x)}, c, got.masked)
            moved = b.map(p["M"])
            at_base = moved.slots(moved.transpose(moved.vector(at_entry)))
            reads.append(_Read(b, x, c, p["base"], at_base, got.masked))
        return _gradients(reads, None)

    return credit


def _put(p: dict, waiting: Array, now: Array) -> Array:
    """The steps of a block after those that wait."""
    return lax.dynamic_update_slice_in_dim(waiting, now.astype(waiting.dtype), p["count"], 0)


def _recorded(p: dict, x: Any) -> dict:
    return {} if x is None else {"x": jax.tree.map(partial(_put, p), p["x"], x)}


def _waiting_inputs(r: Relation, p: dict, c: Array, masked: bool = False) -> Any:
    """The inputs of the buffered steps; free places hold zeros."""
    if "x" not in p:
        return None
    x = folded(r, p["x"])
    return taken(r, x, masked or not r.operator.is_linear, c)
