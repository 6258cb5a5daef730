"""Products with D, the kept Jacobian between slots, along the steps of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..engine import Signals, kernels_allowed, mix
from ..graph import HiddenParamOpRelation as Relation
from ._block import scan
from ._relation_rule import Blocks, RelationBlock


def space(r: Relation) -> tuple:
    """Relations with the same slots share D and its products."""
    s = r.slots
    # A parameter of one row that all samples share has the slots of a product with a batch.
    shape = s.shape if s.table is not None else tuple(n for n in s.shape if n != 1)
    return shape, s.width, s.dtype, s.analysed.tobytes()


def _shaped(array: Array, old: Relation, new: Relation, behind: int) -> Array:
    """An array at the slots of one relation in the shape of another one's, of the same space."""
    before, after = old.slots.shape, new.slots.shape
    if before == after:
        return array
    if behind:  # slot by slot: the compiler sees through a stack, but not through its reshape
        each = [_shaped(a, old, new, behind - 1) for a in jnp.unstack(array, axis=-behind)]
        return jnp.stack(each, -behind)
    front = array.ndim - len(before)
    sizes = iter([n for n, full in zip(array.shape[front:], before, strict=True) if full != 1])
    return array.reshape((*array.shape[:front], *(1 if n == 1 else next(sizes) for n in after)))


def later(blocks: Blocks, signals: Sequence[Signals]) -> list[tuple[Array, Array]]:
    """Per relation, the cotangent at the entry of the block, and after each step."""
    pairs = list(zip(blocks, signals, strict=True))
    firsts = {space(b.relation): (b, s) for b, s in reversed(pairs)}
    if not firsts:
        return []
    few = [b.relation.slots.table is None for b, _ in firsts.values()]
    single = [b.steps.D.shape[-1] == 1 for b, _ in firsts.values()]
    D = [slim(b.steps.D, 2) for b, _ in firsts.values()]
    length = blocks[0].steps.f.shape[0]
    same, varying = constant(D)
    lam = [slim(each_step(s.lam, s.every, length), 1) for _, s in firsts.values()]
    exits = [None if s.exits is None else slim(s.exits, 1) for _, s in firsts.values()]
    masked = signals[0].masked

    def back_by(d, q, few, single):
        # Transposed here: that of all steps at once would be a copy.
        out = (d * q if single else mix(jnp.swapaxes(d, -1, -2), q, few)).astype(q.dtype)
        if not masked:
            return out
        return jnp.where(q == 0 if single else (q == 0).all(-1, keepdims=True), 0, out)

    def back(qs, now):
        D, lam, exits = now
        D = merged(same, D)
        qs = [q if e is None else q + e for q, e in zip(qs, exits, strict=True)]
        each = zip(qs, D, lam, few, single, strict=True)
        return [l + back_by(d, q, f, s) for q, d, l, f, s in each], qs

    start = [jnp.zeros(l.shape[1:], l.dtype) for l in lam]
    ends = scan(back, start, (varying, lam, exits), length, reverse=True)
    first, q = ([wide(a, s, 1) for a, s in zip(f, single, strict=True)] for f in ends)
    by_space = dict(zip(firsts, zip(first, q, strict=True), strict=True))
    out = []
    for r in (b.relation for b in blocks):
        at_entry, each = by_space[space(r)]
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

    `add_up` sums the latter over the steps for operators without an input: one entry is left. And
    it may have axes of size one, along which it repeats.
    """
    inside = kernels_allowed()  # else P of all steps is stored: products of all are faster
    small = [inside and add_up and _repeats(b) for b in blocks]
    out: dict[int, tuple[Array, Array]] = {}
    for kind in (True, False):
        numbers = [i for i, s in enumerate(small) if s is kind]
        results = _onward([blocks[i] for i in numbers], add_up, inside, kind) if numbers else []
        out.update(zip(numbers, results, strict=True))
    return [out[i] for i in range(len(blocks))]


def _repeats(b: RelationBlock) -> bool:
    """Whether D and f are the same at all steps, and along some axis of y or lanes."""
    r, (_, _, D, _, slots) = b.relation, b.steps
    if slots is None or not r.operator.has_axes or any(len(a) > 1 for a in (D, *slots)):
        return False
    return np.broadcast_shapes(D.shape[1:-2], *(a.shape[1:] for a in slots)) != r.slots.shape


def _onward(blocks: Blocks, add_up: bool, inside: bool, small: bool) -> list[tuple[Array, Array]]:
    firsts = {space(b.relation): b for b in reversed(blocks)}
    numbers = [list(firsts).index(space(b.relation)) for b in blocks]
    of = [firsts[space(b.relation)].relation for b in blocks]
    single = [b.steps.D.shape[-1] == 1 for b in firsts.values()]
    D = [slim(b.steps.D, 2) for b in firsts.values()]
    sums = [inside and add_up and b.steps.x is None for b in blocks]
    f = [_parts(b, r, inside) for b, r in zip(blocks, of, strict=True)]
    same, varying = constant(D)
    f_same, f_varying = zip(*map(constant, f), strict=True)
    length = blocks[0].steps.f.shape[0]

    def back(carry, now):
        (ps, totals), (ds, fs) = carry, now
        ds = merged(same, ds)
        each = zip(ps, ds, single, strict=True)
        new = [p * d if one else times(p, d) for p, d, one in each]
        if not inside:
            return (new, totals), ps
        vs = move(ps, map(merged, f_same, fs))
        totals = [t + v if s else t for t, v, s in zip(totals, vs, sums, strict=True)]
        return (new, totals), [None if s else v for v, s in zip(vs, sums, strict=True)]

    def move(ps, fs):
        out = []
        for b, i, parts in zip(blocks, numbers, fs, strict=True):
            v = parts[0] if len(parts) == 1 else jnp.stack(jnp.broadcast_arrays(*parts), -1)
            out.append(ps[i] * v if single[i] else moved(b.relation, ps[i], v))
        return out

    start = []
    for i, (b, d, one) in enumerate(zip(firsts.values(), D, single, strict=True)):
        units = d.shape[1:] if one else d.shape[1:-2]
        if inside and b.relation.slots.table is None:
            own = [
                a.shape[1:] for n, parts in zip(numbers, f, strict=True) if n == i for a in parts
            ]
            units = np.broadcast_shapes(units, *own) if small else b.relation.slots.shape
        eye = jnp.ones((), d.dtype) if one else jnp.eye(d.shape[-1], dtype=d.dtype)
        start.append(jnp.broadcast_to(eye, (*units, *eye.shape)))
    like = jax.eval_shape(move, start, [[a[0] for a in parts] for parts in f])
    zeros = [jnp.zeros(v.shape, v.dtype) if s else None for v, s in zip(like, sums, strict=True)]
    slices = varying, f_varying if inside else None
    (products, totals), vs = scan(back, (start, zeros), slices, length, reverse=True)
    vs = vs if inside else jax.vmap(move)(vs, f)
    out = []
    for b, r, i, total, v in zip(blocks, of, numbers, totals, vs, strict=True):
        product = wide(products[i], single[i], 2)
        if r.slots.table is None:
            product = jnp.broadcast_to(product, (*r.slots.shape, *product.shape[-2:]))
        v = wide(v if total is None else total[None], single[i], 1)
        out.append((_shaped(product, r, b.relation, 2), _shaped(v, r, b.relation, 1)))
    return out


def _parts(b: RelationBlock, of: Relation, inside: bool) -> list[Array]:
    """f slot by slot, without what repeats; for loops outside of kernels, as one array."""
    if inside and b.steps.slots is not None:
        return [_shaped(a, b.relation, of, 0) for a in b.steps.slots]
    return [slim(_shaped(b.steps.f, b.relation, of, 1), 1)]


def merged(same: Sequence[Array | None], varying: Sequence[Array | None]) -> list[Any]:
    """The inverse of `constant`, at one step."""
    return [v if s is None else s for s, v in zip(same, varying, strict=True)]


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
    terms = [a[..., m : m + 1] * b[..., m : m + 1, :] for m in range(n)]
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
