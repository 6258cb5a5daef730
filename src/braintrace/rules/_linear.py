"""Products with D, the kept Jacobian between slots, along the steps of a block."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from ..engine import Signals, mix
from ..graph import HiddenParamOpRelation as Relation
from ._block import scan
from ._relation_rule import Blocks


def space(r: Relation) -> tuple:
    """Relations with the same slots share D and its products."""
    s = r.slots
    return s.lanes, s.y_shape, s.width, s.dtype, s.destination.tobytes()


def later(blocks: Blocks, signals: Sequence[Signals]) -> dict[tuple, tuple[Array, Array]]:
    """Per space, the cotangent at the entry of the block, and after each step."""
    pairs = list(zip(blocks, signals, strict=True))
    firsts = {space(b.relation): (b, s) for b, s in reversed(pairs)}
    if not firsts:
        return {}
    few = [b.relation.slots.table is None for b, _ in firsts.values()]
    single = [b.steps.D.shape[-1] == 1 for b, _ in firsts.values()]
    D = [slim(jnp.swapaxes(b.steps.D, -1, -2), 2) for b, _ in firsts.values()]
    length = D[0].shape[0]
    lam = [slim(each_step(s.lam, s.every, length), 1) for _, s in firsts.values()]
    exits = [None if s.exits is None else slim(s.exits, 1) for _, s in firsts.values()]
    masked = signals[0].masked

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
    return dict(zip(firsts, zip(first, q, strict=True), strict=True))


def each_step(array: Array, every: int | None, length: int) -> Array:
    """Cotangents at the entries of windows as one per step, zero within a window."""
    if array.shape[0] == length:
        return array
    return jnp.zeros((length, *array.shape[1:]), array.dtype).at[::every].set(array)


def onward(blocks: Blocks) -> dict[tuple, tuple[Array, Array]]:
    """Per space, the product of D over the block, and over the steps after each one."""
    firsts = {space(b.relation): b.steps.D for b in reversed(blocks)}
    if not firsts:
        return {}
    single = [d.shape[-1] == 1 for d in firsts.values()]
    D = [slim(d, 2) for d in firsts.values()]

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
    total, after = ([wide(a, s, 2) for a, s in zip(f, single, strict=True)] for f in out)
    return dict(zip(firsts, zip(total, after, strict=True), strict=True))


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


def moved(r: Relation, D: Array, v: Array) -> Array:
    """D v, for every iteration."""
    few = r.slots.table is None
    if r.site.iterations is None:
        return mix(D, v, few)
    return jax.vmap(lambda one: mix(D, one, few))(v)


def at_output(r: Relation, f: Array, q: Array, masked: bool) -> Array:
    """<f, q>, the cotangent at y, for every step and iteration."""
    lane = 1
    if r.site.iterations is not None:
        q, lane = q[:, None], 2
    out = _summed(jnp.where(q == 0, 0, f * q) if masked else f * q)
    return out.sum(lane) if r.slots.lanes else out


def _summed(array: Array) -> Array:
    """The sum over slots; a few are added up: XLA's CPU reduction is far slower than that."""
    n = array.shape[-1]
    if n > 8:
        return array.sum(-1)
    return sum((array[..., k] for k in range(1, n)), array[..., 0])
