"""Two low-pass factors per operator instead of one trace per weight.

    eps_x_t = a_x eps_x_{t-1} + x_t              (a bias has the input 1)
    eps_f_t = a_f D_t eps_f_{t-1} + (1 - a_f) f_t
    g_t     = pull(eps_x_t, a_f <lam_t, eps_f_{t-1}> + (1 - a_f) ct_t) / (1 - a_f^t)

where ct_t is the cotangent of the operator's output within the step, and t counts trace steps. In
windows ct goes to the weights as it is, and the entry cotangent meets the factors at the entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import tree_map

from ..engine import (
    COUNTED,
    ExitCotangents,
    Feedback,
    Fresh,
    Grads,
    Rule,
    Signals,
    Steps,
    running_placement,
)
from ..graph import HiddenParamOpRelation as Relation
from ._block import either, folded, iterations, pull, scan, seen_input, storage, taken
from ._linear import at_output, each_iteration, each_step, steady
from ._options import TraceDtype
from ._relation_rule import Blocks, Kept, RelationBlock, RelationFunctions, relation_rule


def factored(
    decay_x: float,
    decay_f: float,
    trace_dtype: TraceDtype = None,
    *,
    plain: bool = False,
    exit_cotangents: ExitCotangents | None = None,
    kept: Kept | None = None,
    feedback: Feedback | None = None,
) -> Rule:
    """Filter input and tail separately, by `decay_x` and, besides D, `decay_f`.

    If `plain`, the tail enters as it is, (1 - a_f) is 1 everywhere; `kept` is the Jacobian in place
    of the step's own.
    """
    return relation_rule(
        factors(decay_x, decay_f, trace_dtype, plain=plain),
        kept=kept,
        exit_cotangents=exit_cotangents,
        feedback=feedback,
        approximates="the trace of every weight: two filtered factors stand for it",
    )


def factors(
    decay_x: float, decay_f: float, trace_dtype: TraceDtype = None, *, plain: bool = False
) -> RelationFunctions:
    """What `factored` does with relations."""
    stored = storage(trace_dtype)
    gain = 1.0 if plain else 1 - decay_f

    def init(r: Relation, weights: Grads) -> dict[str, Any]:
        op, lead = r.operator, iterations(r)
        kind = jnp.result_type(r.slots.dtype, op.y.dtype)
        trace: dict[str, Any] = {
            "f": stored(jnp.zeros((*lead, *r.slots.shape, r.slots.width), kind)),
            "one": jnp.zeros((), kind).real,
            "steps": jnp.zeros((), jnp.int32),
        }
        if op.x is not None:
            seen = jax.eval_shape(lambda x: seen_input(r, x), op.x)
            trace["x"] = stored(jnp.zeros((*lead, *seen.shape), seen.dtype))
        return trace

    def advance(blocks: Blocks, fresh: Fresh) -> list[dict]:
        out = []
        for r, eps, s, *_ in blocks:
            f, _ = s.prepared
            length = s.f.shape[0]
            one = _ones(decay_x, eps["one"], length)[-1]
            new = {"f": f, "one": one, "steps": jnp.minimum(eps["steps"] + length, COUNTED)}
            if s.x is not None:
                seen = _all_seen(r, s.x)
                weight = decay_x ** jnp.arange(length - 1, -1, -1, dtype=seen.real.dtype)
                old = decay_x**length * eps["x"].astype(seen.dtype)
                new["x"] = old + jnp.tensordot(weight.astype(seen.dtype), seen, 1)
            out.append({k: new[k].astype(eps[k].dtype) for k in eps})
        return out

    def credit(blocks: Blocks, signals: Sequence[Signals], fresh: Fresh) -> list[Grads]:
        scale = None if plain else decay_f
        each = list(zip(blocks, signals, strict=True))
        cs = [_cotangents(decay_f, gain, scale, block, got) for block, got in each]
        filtered = _filtered(decay_x, blocks, signals, cs)
        out = []
        for (block, got), c, h in zip(each, cs, filtered, strict=True):
            r, eps, s, w, *_ = block
            if h is None:
                grads = _pulled_one_by_one(decay_x, block, c, got)
            else:
                grads = _pulled(block, h, got.masked, fresh)
            constant = r.operator.constant_keys & set(r.keys)
            if constant:
                rows = c * _along(_ones_at(decay_x, eps["one"], s, got), c)
                ones = [rows] if got.every is None else [rows, got.ct]
                terms = [pull(r, _like(r, a), folded(r, a), w) for a in ones]
                grads |= {k: sum((g[k] for g in terms[1:]), terms[0][k]) for k in constant}
            out.append({k: grads[k] for k in r.keys})
        return out

    prepare = partial(_tails, decay_f, gain)
    return RelationFunctions(init, advance, credit, prepare)


def _cotangents(
    decay: float, gain: float, scale: float | None, block: RelationBlock, got: Signals
) -> Array:
    """What meets the filtered inputs, per step or window; `scale` is the decay of averages."""
    _, eps, s, *_ = block
    last, f = s.prepared
    at = slice(None, None, got.every)  # the steps whose factors meet a cotangent
    if got.exits is not None:
        after = jnp.concatenate([f[1:], last.astype(f.dtype)[None]])
        c = at_output(block, after, got.exits, got.masked)
    else:
        c = at_output(block, f[at], got.lam, got.masked)
        if got.every is None:
            c = decay * c + gain * got.ct
    if scale is None:
        return c
    count = eps["steps"] + jnp.arange(s.f.shape[0]) + (got.every is None)
    correction = 1 - jnp.asarray(scale, eps["one"].dtype) ** count[at]
    return c * _along(1 / jnp.where(correction > 0, correction, 1), c)


def _ones_at(decay: float, start: Array, s: Steps, got: Signals) -> Array:
    """The filtered input 1 that meets each cotangent: before its first step for a window."""
    one = _ones(decay, start, s.f.shape[0])
    if got.every is None:
        return one
    return jnp.concatenate([start[None], one[:-1]])[:: got.every]


def _tails(decay: float, gain: float, blocks: Blocks) -> list[tuple[Array, Array]]:
    """eps_f at the end, and before every step."""
    if not blocks:
        return []
    D = [b.transition for b in blocks]
    maps = steady(D)

    def step(olds, now):
        tails, varying = now
        each = zip(blocks, olds, tails, maps.at(varying), strict=True)
        moved = [(old, f, each_iteration(b.relation, d, old)) for b, old, f, d in each]
        new = lambda old, f, new: (decay * new + gain * f).astype(old.dtype)
        return [tree_map(new, *of) for of in moved], olds

    pairs = list(zip(D, blocks, strict=True))
    start = [d.vector(b.trace["f"].astype(b.steps.f.dtype)) for d, b in pairs]
    tails = [d.vector(b.steps.f) for d, b in pairs]
    ends = scan(step, start, (tails, maps.varying), blocks[0].steps.f.shape[0])
    last, before = ([d.slots(a) for d, a in zip(D, of, strict=True)] for of in ends)
    return list(zip(last, before, strict=True))


def _ones(decay: float, start: Array, length: int) -> Array:
    """The filtered input 1 after every step."""
    # From 1's trace s: after three steps a^3 s + a^2 + a + 1, of which the sum of powers is a
    # cumsum.
    powers = jnp.asarray(decay, start.dtype) ** jnp.arange(length)
    return decay * powers * start + jnp.cumsum(powers)


def _filtered(
    decay: float, blocks: Blocks, signals: Sequence[Signals], cotangents: Sequence[Array]
) -> list[tuple[Array, Array] | None]:
    """Cotangents filtered backward, where the operator is linear: at the entry, and at every step.

    <eps_x_t, c_t> summed over t is <x_s, sum_t a^(t-s) c_t> summed over s: where y is linear in x,
    the cotangents are filtered instead of the inputs. They are smaller, and the filtered inputs of
    all steps need not be stored.
    """
    # Three steps with decay a, single steps: eps_x after them is a x_1 + x_2 and so on, and
    #
    #     c_1 x_1 + c_2 (a x_1 + x_2) + c_3 (a^2 x_1 + a x_2 + x_3)
    #         = x_1 (c_1 + a c_2 + a^2 c_3) + x_2 (c_2 + a c_3) + x_3 c_3
    #
    # with h_3 = c_3, h_2 = c_2 + a h_3, h_1 = c_1 + a h_2; what was there before meets a h_1. A
    # window's cotangent meets the factors at its entry, so its own x is not in it: h before c.
    linear = [i for i, b in enumerate(blocks) if b.relation.operator.is_linear]
    out: list[tuple[Array, Array] | None] = [None] * len(blocks)
    if not linear:
        return out
    length, every = blocks[0].steps.f.shape[0], signals[0].every
    full = [each_step(cotangents[i], every, length) for i in linear]

    def back(later, now):
        h = [(c + decay * after).astype(after.dtype) for c, after in zip(now, later, strict=True)]
        return h, h if every is None else later

    first, later = scan(back, [jnp.zeros_like(c[0]) for c in full], full, length, reverse=True)
    for i, h0, h in zip(linear, first, later, strict=True):
        out[i] = (decay * h0, h) if every is None else (h0, h + signals[i].ct.astype(h.dtype))
    return out


def _pulled(
    block: RelationBlock, cotangents: tuple[Array, Array], masked: bool, fresh: Fresh
) -> Grads:
    """Gradients from the input's trace and the inputs, and their filtered cotangents."""
    r, eps, s, weights, *_ = block
    first, filtered = cotangents
    seen, flat = _all_seen(r, s.x), folded(r, filtered)
    if running_placement() is not None and fresh is not True:  # one sum over all samples, not two
        x = folded(r, jnp.concatenate([eps["x"].astype(seen.dtype)[None], seen]))
        c = folded(r, jnp.concatenate([first[None].astype(filtered.dtype), filtered]))
        return pull(r, taken(r, x, masked, c), c, weights)
    grads = pull(r, taken(r, folded(r, seen), masked, flat), flat, weights)

    def old() -> Grads:
        x = folded(r, eps["x"].astype(seen.dtype)[None])
        return pull(r, x, folded(r, first[None]), weights)

    none = lambda: {k: jnp.zeros_like(weights[k]) for k in r.keys}
    past = either(fresh, none, old)
    return {k: grads[k] + past[k].astype(grads[k].dtype) for k in r.keys}


def _pulled_one_by_one(decay: float, block: RelationBlock, c: Array, got: Signals) -> Grads:
    """Gradients from filtered inputs and cotangents."""
    r, eps, s, weights, *_ = block
    x = None
    if s.x is not None:
        seen = _all_seen(r, s.x)

        def step(old, now):
            new = (decay * old + now).astype(old.dtype)
            return new, new if got.every is None else old

        x = scan(step, eps["x"].astype(seen.dtype), seen, seen.shape[0])[1][:: got.every]
    pairs = [(x, c)] if got.every is None else [(x, c), (s.x, got.ct)]
    total = {k: jnp.zeros_like(weights[k]) for k in r.keys}
    for inputs, ct in pairs:
        flat = folded(r, ct)
        at = None if inputs is None else taken(r, folded(r, inputs), got.masked, flat)
        grads = pull(r, at, flat, weights)
        total = {k: total[k] + grads[k].astype(total[k].dtype) for k in r.keys}
    return total


def _like(r: Relation, c: Array) -> Array | None:
    """Inputs for a pull-back that reads none."""
    if r.operator.x is None:
        return None
    x = jax.eval_shape(lambda v: seen_input(r, v), r.operator.x)
    return jnp.zeros((folded(r, c).shape[0], *x.shape), x.dtype)


def _along(scale: Array, c: Array) -> Array:
    return scale.astype(c.real.dtype).reshape((-1, *(1,) * (c.ndim - 1)))


def _all_seen(r: Relation, x: Any) -> Array:
    """`seen_input` for every step and iteration."""
    each = jax.vmap(lambda v: seen_input(r, v))
    return each(x) if r.site.iterations is None else jax.vmap(each)(x)
