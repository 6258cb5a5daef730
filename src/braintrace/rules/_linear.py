"""Products with D, the kept Jacobian between slots, along the steps of a block."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..engine import Signals, Steps, mix
from ..graph import HiddenParamOpRelation as Relation
from ._block import scan

Array = jax.Array


def space(r: Relation) -> tuple:
    """Relations with the same slots share D, and all that is made of it."""
    s = r.slots
    return s.lanes, s.y_shape, s.width, s.dtype, s.destination.tobytes()


def _spaces(relations: Sequence[Relation]) -> dict[tuple, int]:
    """The different spaces of slots, and the first relation in each."""
    out: dict[tuple, int] = {}
    for i, r in enumerate(relations):
        out.setdefault(space(r), i)
    return out


def later(
    relations: Sequence[Relation], steps: Sequence[Steps], signals: Sequence[Signals]
) -> dict[tuple, tuple[Array, Array]]:
    """Per space, the cotangent at the entry of the block, and after each step."""
    spaces = _spaces(relations)
    firsts = list(spaces.values())
    if not firsts:
        return {}
    few = [relations[i].slots.table is None for i in firsts]
    D = [slim(jnp.swapaxes(steps[i].D, -1, -2), 2) for i in firsts]
    length = D[0].shape[0]
    lam = [slim(_each_step(signals[i], length), 1) for i in firsts]
    exits = [None if (e := signals[i].exits) is None else slim(e, 1) for i in firsts]
    single = [steps[i].D.shape[-1] == 1 for i in firsts]
    masked = signals[firsts[0]].masked

    def back_by(d, q, few, single):
        out = (d * q if single else mix(d, q, few)).astype(q.dtype)
        if not masked:
            return out
        return jnp.where(q == 0 if single else (q == 0).all(-1, keepdims=True), 0, out)

    def back(qs, now):
        D, lam, exits = now
        qs = [q if e is None else q + e for q, e in zip(qs, exits, strict=True)]
        each = zip(qs, D, lam, few, single, strict=True)
        return [l + back_by(d, q, f, s) for q, d, l, f, s in each], qs

    start = [jnp.zeros(l.shape[1:], l.dtype) for l in lam]
    out = scan(back, start, (D, lam, exits), length, reverse=True)
    first, q = ([wide(a, s, 1) for a, s in zip(f, single, strict=True)] for f in out)
    return dict(zip(spaces, zip(first, q, strict=True), strict=True))


def _each_step(s: Signals, length: int) -> Array:
    """Cotangents at the entries of windows as one per step, zero within a window."""
    if s.lam.shape[0] == length:
        return s.lam
    full = jnp.zeros((length, *s.lam.shape[1:]), s.lam.dtype)
    return full.at[:: s.every].set(s.lam)


def onward(
    relations: Sequence[Relation], steps: Sequence[Steps]
) -> dict[tuple, tuple[Array, Array]]:
    """Per space, the product of D over the block, and over the steps after each one."""
    spaces = _spaces(relations)
    firsts = list(spaces.values())
    if not firsts:
        return {}
    single = [steps[i].D.shape[-1] == 1 for i in firsts]
    D = [slim(steps[i].D, 2) for i in firsts]

    def back(ps, now):
        each = zip(ps, now, single, strict=True)
        return [p * d if s else times(p, d) for p, d, s in each], ps

    start = [
        jnp.ones(d.shape[1:], d.dtype)
        if s
        else jnp.broadcast_to(jnp.eye(d.shape[-1], dtype=d.dtype), d.shape[1:])
        for d, s in zip(D, single, strict=True)
    ]
    out = scan(back, start, D, D[0].shape[0], reverse=True)
    whole, after = ([wide(a, s, 2) for a, s in zip(f, single, strict=True)] for f in out)
    return dict(zip(spaces, zip(whole, after, strict=True), strict=True))


def slim(array: Array, axes: int) -> Array:
    """Without the axes of a single slot: a loop should not have to copy them into place."""
    return array.reshape(array.shape[:-axes]) if array.shape[-1] == 1 else array


def wide(array: Array, single: bool, axes: int) -> Array:
    """The inverse of `slim`."""
    return array.reshape(array.shape + (1,) * axes) if single else array


def times(a: Array, b: Array) -> Array:
    """A product of matrices; of small ones written out."""
    n = a.shape[-1]
    if n == 1:
        return a * b
    if n > 4:
        return a @ b
    terms = [a[..., :, m, None] * b[..., None, m, :] for m in range(n)]
    return sum(terms[1:], terms[0])


def moved(r: Relation, after: Array, f: Array) -> Array:
    """P f, for every step and iteration."""
    return jax.vmap(lambda p, v: turned(r, p, v))(after, f)


def turned(r: Relation, D: Array, v: Array) -> Array:
    """D v, for every iteration."""
    few = r.slots.table is None
    if r.site.iterations is None:
        return mix(D, v, few)
    return jax.vmap(lambda one: mix(D, one, few))(v)


def tail(r: Relation, f: Array, q: Array, masked: bool) -> Array:
    """f q, the cotangent at y, for every step and iteration."""
    lead = 1
    if r.site.iterations is not None:
        q, lead = q[:, None], 2
    out = summed(jnp.where(q == 0, 0, f * q) if masked else f * q)
    return out.sum(lead) if r.slots.lanes else out


def summed(array: Array) -> Array:
    """The sum over slots; a few are added up: XLA's CPU reduction is far slower than that."""
    n = array.shape[-1]
    if n > 8:
        return array.sum(-1)
    return sum((array[..., k] for k in range(1, n)), array[..., 0])
