"""Two low-pass factors per operator instead of one trace per weight.

    eps_x_t = a_x eps_x_{t-1} + x_t              (a bias has the input 1)
    eps_f_t = a_f D_t eps_f_{t-1} + (1 - a_f) f_t
    g_t     = pull(eps_x_t, a_f <lam_t, eps_f_{t-1}> + (1 - a_f) ct_t) / (1 - a_f^t)

where ct_t is the cotangent of the operator's output within the step, and t counts trace steps. In
windows ct goes to the weights as it is, and the entry cotangent meets the factors at the entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import HiddenParamOpRelation as Relation
from ._linear import turned
from ._rule import Fresh, Grads, Rule, Signals, Steps
from ._stretch import folded, pull, scan, taken
from ._trace import storage

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

    def through(
        relations: Sequence[Relation],
        traces: Sequence[dict],
        steps: Sequence[Steps],
        after: bool,
    ) -> tuple[list[dict], list[dict]]:
        """The factors at the end, and at every step: f before it, the others before or after."""
        start, given = [], []
        for r, eps, s in zip(relations, traces, steps, strict=True):
            entry, now = {**eps, "f": eps["f"].astype(s.f.dtype)}, {"f": s.f, "D": s.D}
            if s.x is not None:
                now["x"] = _all_seen(r, s.x)
                entry["x"] = entry["x"].astype(now["x"].dtype)
            start.append(entry)
            given.append(now)

        def one(r: Relation, old: dict, now: dict) -> dict:
            new = {
                "f": decay_f * turned(r, now["D"], old["f"]) + (1 - decay_f) * now["f"],
                "one": decay_x * old["one"] + 1,
                "steps": old["steps"] + 1,
            }
            if "x" in old:
                new["x"] = decay_x * old["x"] + now["x"]
            return jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)

        def step(olds, nows):
            news = [one(*each) for each in zip(relations, olds, nows, strict=True)]
            pairs = zip(olds, news, strict=True)
            return news, [{**(new if after else old), "f": old["f"]} for old, new in pairs]

        return scan(step, start, given, steps[0].f.shape[0])

    def advance(
        relations: Sequence[Relation],
        traces: Sequence[dict],
        steps: Sequence[Steps],
        weights: Sequence[Grads],
        fresh: Fresh,
    ) -> list[dict]:
        if not relations:
            return []
        last, _ = through(relations, traces, steps, True)
        return [
            jax.tree.map(lambda new, old: new.astype(old.dtype), end, dict(eps))
            for end, eps in zip(last, traces, strict=True)
        ]

    def pulled(r: Relation, eps: dict, c: Array, weights: Grads, masked: bool) -> Grads:
        """Gradients from the filtered inputs and the cotangents at some steps."""
        correction = 1 - jnp.asarray(decay_f, eps["one"].dtype) ** eps["steps"]
        scale = 1 / jnp.where(correction > 0, correction, 1).astype(c.real.dtype)
        c = c * _along(scale, c)
        x = taken(r, folded(r, eps["x"]), masked, folded(r, c)) if "x" in eps else None
        constant = r.operator.constant_keys
        rows = c * _along(eps["one"].astype(c.real.dtype), c)
        plain = pull(r, x, folded(r, c), weights)
        ones = pull(r, x, folded(r, rows), weights) if constant & set(r.keys) else plain
        return {k: (ones if k in constant else plain)[k] for k in r.keys}

    def credit(
        relations: Sequence[Relation],
        traces: Sequence[dict],
        steps: Sequence[Steps],
        signals: Sequence[Signals],
        weights: Sequence[Grads],
        fresh: Fresh,
    ) -> list[Grads]:
        every = signals[0].every
        _, factors = through(relations, traces, steps, every is None)
        out = []
        for r, eps, s, got, w in zip(relations, factors, steps, signals, weights, strict=True):
            if every is None:
                c = decay_f * _remembered(r, eps["f"], got) + (1 - decay_f) * got.ct
                out.append(pulled(r, eps, c, w, got.masked))
                continue
            entry = jax.tree.map(lambda a: a[::every], eps)
            past = pulled(r, entry, _remembered(r, entry["f"], got), w, got.masked)
            c, x = folded(r, got.ct), None if s.x is None else folded(r, s.x)
            now = pull(r, taken(r, x, got.masked, c), c, w)
            out.append({k: now[k] + past[k].astype(now[k].dtype) for k in r.keys})
        return out

    words = "the trace of every weight: two filtered factors stand for it"
    return Rule(init, advance, credit, approximates=words)


def _along(scale: Array, c: Array) -> Array:
    return scale.reshape((-1, *(1,) * (c.ndim - 1)))


def _remembered(r: Relation, f: Array, got: Signals) -> Array:
    """<lam, eps_f> at y, for every step and turn."""
    lam, lane = got.lam, 1
    if r.site.turns is not None:
        lam, lane = lam[:, None], 2
    total = (jnp.where(lam == 0, 0, lam * f) if got.masked else lam * f).sum(-1)
    return total.sum(lane) if r.slots.lanes else total


def _all_seen(r: Relation, x: Array) -> Array:
    """`_seen` for every step and turn."""
    each = jax.vmap(lambda v: _seen(r, v))
    return each(x) if r.site.turns is None else jax.vmap(each)(x)


def _seen(r: Relation, x: Array | None) -> Array:
    """The input as numbers that can be filtered: spikes may come as booleans or integers."""
    seen = jnp.asarray(r.operator.represent(x))
    return seen if jnp.issubdtype(seen.dtype, jnp.inexact) else seen.astype(r.operator.y.dtype)
