"""Products with D, the kept Jacobian between slots, along the steps of a block."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from ..engine import Signals, kernels_allowed, mix
from ..graph import HiddenParamOpRelation as Relation
from ._block import scan
from ._relation_rule import Blocks


def space(r: Relation) -> tuple:
    """Relations with the same slots share D and its products."""
    s = r.slots
    # A parameter of one row that all samples share has the slots of a product with a batch.
    shape = s.shape if s.table is not None else tuple(n for n in s.shape if n != 1)
    return shape, s.width, s.dtype, s.analysed.tobytes()


def _shaped(array: Array, old: Relation, new: Relation, behind: int) -> Array:
    """An array at the slots of one relation in the shape of another one's, of the same space."""
    front = array.ndim - behind - len(old.slots.shape)
    shape = (*array.shape[:front], *new.slots.shape, *array.shape[array.ndim - behind :])
    return array if old.slots.shape == new.slots.shape else array.reshape(shape)


def later(blocks: Blocks, signals: Sequence[Signals]) -> list[tuple[Array, Array]]:
    """Per relation, the cotangent at the entry of the block, and after each step."""
    pairs = list(zip(blocks, signals, strict=True))
    firsts = {space(b.relation): (b, s) for b, s in reversed(pairs)}
    if not firsts:
        return []
    few = [b.relation.slots.table is None for b, _ in firsts.values()]
    single = [b.steps.D.shape[-1] == 1 for b, _ in firsts.values()]
    D = [slim(jnp.swapaxes(b.steps.D, -1, -2), 2) for b, _ in firsts.values()]
    length = blocks[0].steps.f.shape[0]
    same, varying = constant(D)
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
        D = [d if c is None else c for c, d in zip(same, D, strict=True)]
        qs = [q if e is None else q + e for q, e in zip(qs, exits, strict=True)]
        each = zip(qs, D, lam, few, single, strict=True)
        return [l + back_by(d, q, f, s) for q, d, l, f, s in each], qs

    start = [jnp.zeros(l.shape[1:], l.dtype) for l in lam]
    ends = scan(back, start, (varying, lam, exits), length, reverse=True)
    first, q = ([wide(a, s, 1) for a, s in zip(f, single, strict=True)] for f in ends)
    found = dict(zip(firsts, zip(first, q, strict=True), strict=True))
    out = []
    for r in (b.relation for b in blocks):
        at_entry, each = found[space(r)]
        of = firsts[space(r)][0].relation
        out.append((_shaped(at_entry, of, r, 1), _shaped(each, of, r, 1)))
    return out


def each_step(array: Array, every: int | None, length: int) -> Array:
    """Cotangents at the entries of windows as one per step, zero within a window."""
    if array.shape[0] == length:
        return array
    return jnp.zeros((length, *array.shape[1:]), array.dtype).at[::every].set(array)


def onward(blocks: Blocks, add_up: bool) -> list[tuple[Array, Array]]:
    """Per relation, the product of D over the block, and f of every step moved to its end.

    `add_up` sums the latter over the steps for operators without an input: one entry is left.
    """
    firsts = {space(b.relation): b for b in reversed(blocks)}
    if not firsts:
        return []
    numbers = [list(firsts).index(space(b.relation)) for b in blocks]
    of = [firsts[space(b.relation)].relation for b in blocks]
    single = [b.steps.D.shape[-1] == 1 for b in firsts.values()]
    D = [slim(b.steps.D, 2) for b in firsts.values()]
    inside = kernels_allowed()  # else P of all steps is stored: products of all are faster
    sums = [inside and add_up and b.steps.x is None for b in blocks]
    f = [slim(_shaped(b.steps.f, b.relation, r, 1), 1) for b, r in zip(blocks, of, strict=True)]

    def back(carry, now):
        (ps, totals), (ds, fs) = carry, now
        ds = [d if c is None else c for c, d in zip(same, ds, strict=True)]
        each = zip(ps, ds, single, strict=True)
        new = [p * d if one else times(p, d) for p, d, one in each]
        if not inside:
            return (new, totals), ps
        vs = move(ps, fs)
        totals = [t + v if s else t for t, v, s in zip(totals, vs, sums, strict=True)]
        return (new, totals), [None if s else v for v, s in zip(vs, sums, strict=True)]

    def move(ps, fs):
        each = zip(blocks, numbers, fs, strict=True)
        return [ps[i] * v if single[i] else moved(b.relation, ps[i], v) for b, i, v in each]

    start = [
        jnp.ones(d.shape[1:], d.dtype)
        if s
        else jnp.broadcast_to(jnp.eye(d.shape[-1], dtype=d.dtype), d.shape[1:])
        for d, s in zip(D, single, strict=True)
    ]
    same, varying = constant(D)
    zeros = [jnp.zeros(a.shape[1:], a.dtype) if s else None for a, s in zip(f, sums, strict=True)]
    slices, length = (varying, f if inside else None), f[0].shape[0]
    (products, totals), vs = scan(back, (start, zeros), slices, length, reverse=True)
    vs = vs if inside else jax.vmap(move)(vs, f)
    out = []
    for b, r, i, total, v in zip(blocks, of, numbers, totals, vs, strict=True):
        both = (
            wide(products[i], single[i], 2),
            wide(v if total is None else total[None], single[i], 1),
        )
        out.append((_shaped(both[0], r, b.relation, 2), _shaped(both[1], r, b.relation, 1)))
    return out


def constant(D: Sequence[Array]) -> tuple[list[Array | None], list[Array | None]]:
    """Each D that is the same at all steps, and each that is not."""
    return [d[0] if len(d) == 1 else None for d in D], [None if len(d) == 1 else d for d in D]


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
    times = lambda f, q: jnp.where(q == 0, 0, f * q) if masked else f * q
    n = f.shape[-1]
    if n > 8:
        out = times(f, q).sum(-1)
    else:  # a few slots are added up: XLA's CPU reduction is far slower than that
        terms = [times(f[..., k], q[..., k]) for k in range(n)]
        out = sum(terms[1:], terms[0])
    return out.sum(lane) if r.slots.lanes else out
