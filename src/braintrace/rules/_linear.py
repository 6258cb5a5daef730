"""Sums over the steps of a block along D, the kept Jacobian between slots, forward and backward.

Per step eps <- D eps + f (x) x, and the memory of a step is <lam, eps>. Written out for a block of
two steps from a trace eps_0, with P_s the product of all D after step s:

    eps_1 = D_1 eps_0 + f_1 x_1
    eps_2 = D_2 D_1 eps_0 + D_2 f_1 x_1 + f_2 x_2        = P_0 eps_0 + sum_s P_s f_s x_s
    <lam_1, eps_0> + <lam_2, eps_1>
          = <lam_1 + D_1^T lam_2, eps_0> + <lam_2, f_1> x_1
          = <q_0, eps_0> + sum_s <q_s, f_s> x_s          with q_2 = 0, q_{s-1} = lam_s + D_s^T q_s

`adjoints` computes all q, backward; `products_to_end` P_0 and all P_s f_s, also backward. Both are
element-wise loops over arrays of places: no weight, and nothing of the size of a trace, is in them.
Relations with the same slots share D, and its loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import tree_map

from ..engine import Signals, Transition, kernels_allowed, product
from ..graph import HiddenParamOpRelation as Relation
from ..graph import Slots
from ._block import scan
from ._relation_rule import Blocks, RelationBlock


def slot_space(r: Relation, once: bool = True) -> tuple:
    """Relations with the same slots share D and its products; `once` for what others repeat."""
    s = r.slots
    shape, destinations = s.run if once else (s.shape, s.analysed.tobytes())
    # A parameter of one row that all samples share has the slots of a product with a batch.
    shape = shape if s.table is not None else tuple(n for n in shape if n != 1)
    return shape, s.width, s.dtype, destinations


def _shaped(array: Array, before: tuple[int, ...], after: tuple[int, ...], behind: int) -> Array:
    """An array at slots of one shape in another shape, of the same space.

    Axes of size one come and go, and those of which `array` is a run repeat it.
    """
    if before == after:
        return array
    if behind:  # slot by slot: the compiler sees through a stack, but not through its reshape
        each = [_shaped(a, before, after, behind - 1) for a in jnp.unstack(array, axis=-behind)]
        return jnp.stack(each, -behind)
    front = array.ndim - len(before)
    sizes = iter([n for n, full in zip(array.shape[front:], before, strict=True) if full != 1])
    return array.reshape((*array.shape[:front], *(1 if n == 1 else next(sizes) for n in after)))


def _run(array: Array, r: Relation, behind: int) -> Array:
    """An array at the slots of a relation, at the part that others repeat."""
    s = r.slots
    front = array.ndim - behind - len(s.y_shape)
    # One product for three gates of two units, y (6,), all of which move h (2,): slots 0 1 0 1 0 1,
    # runs ((0, 2),), since the second and third pair repeat the first. D of all slots is
    # [a, b, a, b, a, b]; its run [a, b] is what loops carry. `_repeated` is the way back.
    for axis, (run, n) in enumerate(zip(s.runs, s.y_shape, strict=True), front):
        if run != (0, n) and array.shape[axis] == n:
            array = jax.lax.slice_in_dim(array, *run, axis=axis)
    return array


def _repeated(array: Array, r: Relation) -> Array:
    """The inverse of `_run`; an axis along which all is the same stays one entry."""
    s = r.slots
    front = array.ndim - len(s.y_shape)
    for axis, ((start, stop), n) in enumerate(zip(s.runs, s.y_shape, strict=True), front):
        length = stop - start
        if 1 < length < n and array.shape[axis] == length:
            lead, after = array.shape[:axis], array.shape[axis + 1 :]
            many = jnp.expand_dims(array, axis)
            many = jnp.broadcast_to(many, (*lead, n // length, length, *after))
            array = many.reshape((*lead, n, *after))
    return array


def _from_run(array: Array, old: Relation, new: Relation, behind: int) -> Array:
    """An array at the run of one relation at all slots of another one, of the same space."""
    before, after = (r.slots.run[0] for r in (old, new))
    if before == after == new.slots.shape:
        return array
    if behind:  # slot by slot, as in `_shaped`
        each = [_from_run(a, old, new, behind - 1) for a in jnp.unstack(array, axis=-behind)]
        return jnp.stack(each, -behind)
    return _repeated(_shaped(array, before, after, 0), new)


class Steady(NamedTuple):
    """Maps of all steps of a block, apart: those that are the same at each, and those that vary."""

    same: list[Transition | None]
    varying: list[Transition | None]

    def at(self, now: Sequence[Transition | None]) -> list[Transition]:
        """All of them at one step, from the slices of those that vary."""
        return [v if s is None else s for s, v in zip(self.same, now, strict=True)]  # type: ignore


def steady(maps: Sequence[Transition]) -> Steady:
    """Apart, by whether they have one entry along the steps."""
    once = [d.places[0] == 1 for d in maps]
    same = [jax.tree.map(lambda a: a[0], d) if o else None for d, o in zip(maps, once, strict=True)]
    return Steady(same, [None if o else d for d, o in zip(maps, once, strict=True)])


def spaces(relations: Sequence[Relation]) -> dict[tuple, Relation]:
    """The first relation of every space of slots."""
    return {slot_space(r): r for r in reversed(relations)}


def _at_relations(
    relations: Sequence[Relation], of_spaces: Sequence[Array], behind: int
) -> list[Array]:
    """Arrays at the run of every space as arrays at the slots of every relation."""
    firsts = spaces(relations)
    at = dict(zip(firsts, zip(of_spaces, firsts.values(), strict=True), strict=True))
    found = [(*at[slot_space(r)], r) for r in relations]
    return [_from_run(a, of, r, behind) for a, of, r in found]


def at_slots_of(relations: Sequence[Relation], of_spaces: Sequence[Array]) -> list[Array]:
    """Cotangents of every space at all slots of every relation."""
    pairs = zip(relations, _at_relations(relations, of_spaces, 1), strict=True)
    return [jnp.broadcast_to(a, (*r.slots.shape, *a.shape[-1:])) for r, a in pairs]


def maps_of(relations: Sequence[Relation], of_spaces: Sequence[Array]) -> list[Array]:
    """Maps of every space as those of every relation, one at each place."""
    pairs = zip(relations, _at_relations(relations, of_spaces, 2), strict=True)
    return [jnp.broadcast_to(a, (*_places(r.slots), *a.shape[-2:])) for r, a in pairs]


def _places(slots: Slots) -> tuple[int, ...]:
    """Where slots have a map of their own."""
    return slots.shape if slots.table is None else slots.table.index.shape[:-2]


def no_adjoints(relations: Sequence[Relation], dtype: Any, copies: int) -> list[Array]:
    """Per space zeros at its slots, `copies` of each."""
    zeros = lambda s: jnp.zeros((*_places(s), copies * s.width), dtype)
    return [_run(zeros(r.slots), r, 1) for r in spaces(relations).values()]


def identities(relations: Sequence[Relation], copies: int) -> list[Array]:
    """Per space the map that leaves its slots as they are, `copies` of each."""
    out = []
    for r in spaces(relations).values():
        s, n = r.slots, copies * r.slots.width
        eye = jnp.broadcast_to(jnp.eye(n, dtype=s.dtype), (*_places(s), n, n))
        out.append(_run(eye, r, 2))
    return out


class Adjoints(NamedTuple):
    """Cotangents q at the slots: before a block, per space, and after each step, per relation."""

    before: list[Array]
    each: list[Array]


def adjoints(
    blocks: Blocks, signals: Sequence[Signals], after: Sequence[Array] | None = None
) -> Adjoints:
    """The cotangents of a block from those `after` it, per space; None if nothing is."""
    pairs = list(zip(blocks, signals, strict=True))
    # Three products into the same two units, h' = a * h + x @ W + s @ V + b, have slots [h0, h1]
    # three times, so one D = [a, a] and one loop serves all of them:
    #
    #     firsts    {slots of h: W}        lam and D of W stand for the space
    #     back      q <- lam_t + D q       from the last step to the first, on arrays (2,)
    #     each      q after every step     given to W, V and b (`_at_relations`)
    #
    # What reaches a parameter differs by its f and x only, which come in later (`at_output`).
    firsts = {slot_space(b.relation): (b, s) for b, s in reversed(pairs)}
    if not firsts:
        return Adjoints([], [])
    D = [_once(b) for b, _ in firsts.values()]
    maps, length = steady(D), blocks[0].steps.f.shape[0]
    got = [(d, b.relation, s) for d, (b, s) in zip(D, firsts.values(), strict=True)]
    at = lambda d, r, a: d.vector(_run(a, r, 1))
    lam = [at(d, r, each_step(s.lam, s.every, length)) for d, r, s in got]
    exits = [None if s.exits is None else at(d, r, s.exits) for d, r, s in got]
    masked = signals[0].masked

    def back(qs, now):
        varying, lam, exits = now
        qs = [q if e is None else tree_map(jnp.add, q, e) for q, e in zip(qs, exits, strict=True)]
        pulled = [d.transpose(q, masked) for d, q in zip(maps.at(varying), qs, strict=True)]
        return tree_map(lambda l, a: l + a.astype(l.dtype), lam, pulled), qs

    start = tree_map(lambda l: jnp.zeros(l.shape[1:], l.dtype), lam)
    if after is not None:
        given = [d.vector(a) for d, a in zip(D, after, strict=True)]
        start = tree_map(lambda a, zero: a.astype(zero.dtype), given, start)
    ends = scan(back, start, (maps.varying, lam, exits), length, reverse=True)
    before, each = ([d.slots(a) for a, d in zip(of, D, strict=True)] for of in ends)
    return Adjoints(before, _at_relations([b.relation for b in blocks], each, 1))


def _once(b: RelationBlock) -> Transition:
    """D of the part of its slots that others repeat."""
    return b.map(_run(b.steps.D, b.relation, 2))


def each_step(array: Array, every: int | None, length: int) -> Array:
    """Cotangents at the entries of windows as one per step, zero within a window."""
    if array.shape[0] == length:
        return array
    return jnp.zeros((length, *array.shape[1:]), array.dtype).at[::every].set(array)


def products_to_end(blocks: Blocks, add_up: bool) -> list[tuple[Array, Array]]:
    """Per relation, the product of D over the block, and f of every step moved to its end.

    `add_up` sums the latter over the steps for operators without an input: one entry is left. And
    it may have axes of size one, along which it repeats.
    """
    if not kernels_allowed():
        maps, moved = _products_of_all(blocks)
        return list(zip(maps_of([b.relation for b in blocks], maps), moved, strict=True))
    small = [add_up and _repeats(b) for b in blocks]
    out: dict[int, tuple[Array, Array]] = {}
    for kind in (True, False):
        numbers = [i for i, s in enumerate(small) if s is kind]
        if numbers:
            results = _products_to_end([blocks[i] for i in numbers], add_up, kind)
            out.update(zip(numbers, results, strict=True))
    return [out[i] for i in range(len(blocks))]


def _repeats(b: RelationBlock) -> bool:
    """Whether D and f are the same at all steps, and along some axis of y or lanes."""
    r, (_, _, D, _, slots) = b.relation, b.steps
    if slots is None or not r.operator.has_axes or any(len(a) > 1 for a in (D, *slots)):
        return False
    return np.broadcast_shapes(D.shape[1:-2], *(a.shape[1:] for a in slots)) != r.slots.shape


def moved_on(blocks: Blocks, after: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Per space, the product of D over the block and what comes `after`, maps from its end on.

    And per relation, f of every step moved as far, summed for operators without an input.
    """
    maps, moved = _products_of_all(blocks, after)
    sums = [b.steps.x is None for b in blocks]
    return maps, [v.sum(0, keepdims=True) if s else v for v, s in zip(moved, sums, strict=True)]


def _products_of_all(
    blocks: Blocks, after: Sequence[Array] | None = None
) -> tuple[list[Array], list[Array]]:
    """Products by space, from `after` on, and f moved by relation.

    P of all steps is stored: outside of kernels its products with all f at once are faster.
    """
    firsts = {slot_space(b.relation): b for b in reversed(blocks)}
    D = [_once(b) for b in firsts.values()]
    maps, length = steady(D), blocks[0].steps.f.shape[0] if blocks else 0

    # Backward, so that the carry P is the product of what comes after: P_L = 1, P_{t-1} = P_t D_t,
    # and what a step returns is the P_t that moves its own deposit f_t x_t to the end of the block:
    #
    #     t     D    P after the step    moved
    #     2     3    1                   1 f_2 x_2
    #     1     2    3                   3 f_1 x_1        P of the block: 3 * 2 = 6
    def back(products, varying):
        return [p.compose(d) for p, d in zip(products, maps.at(varying), strict=True)], products

    start = [d.identity(d.places[1:]) for d in D]
    if after is not None:
        start = [b.map(a) for b, a in zip(firsts.values(), after, strict=True)]
    ends = scan(back, start, maps.varying, length, reverse=True)
    products, each = ([p.jacobian for p in of] for of in ends)
    moved = []
    for b, P in zip(blocks, _at_relations([b.relation for b in blocks], each, 2), strict=True):
        move = partial(each_iteration, b.relation)
        p = b.map(P)
        moved.append(p.slots(jax.vmap(move)(p, p.vector(b.steps.f))))
    return products, moved


def _products_to_end(blocks: Blocks, add_up: bool, small: bool) -> list[tuple[Array, Array]]:
    """f is moved within the loop; `small` with no more places than D and f have."""
    firsts = {slot_space(b.relation, once=False): b for b in reversed(blocks)}
    numbers = [list(firsts).index(slot_space(b.relation, once=False)) for b in blocks]
    of = [firsts[slot_space(b.relation, once=False)].relation for b in blocks]
    D = [b.transition for b in firsts.values()]
    maps, length = steady(D), blocks[0].steps.f.shape[0]
    sums = [add_up and b.steps.x is None for b in blocks]
    f = [_parts(b, r) for b, r in zip(blocks, of, strict=True)]
    # Parts of f that are the same at all steps stay out of the loop, as maps do.
    f_same = [[a[0] if len(a) == 1 else None for a in parts] for parts in f]
    f_varying = [[None if len(a) == 1 else a for a in parts] for parts in f]

    def move(products, tails):
        out = []
        for b, i, parts in zip(blocks, numbers, tails, strict=True):
            f = parts[0] if len(parts) == 1 else products[i].vector_of(parts)
            out.append(each_iteration(b.relation, products[i], f))
        return out

    def back(carry, now):
        (products, totals), (varying, tails) = carry, now
        new = [p.compose(d) for p, d in zip(products, maps.at(varying), strict=True)]
        both = zip(f_same, tails, strict=True)
        parts = [[b if a is None else a for a, b in zip(*pair, strict=True)] for pair in both]
        moved = move(products, parts)
        added = zip(totals, moved, sums, strict=True)
        totals = [tree_map(jnp.add, t, v) if s else t for t, v, s in added]
        return (new, totals), [None if s else v for v, s in zip(moved, sums, strict=True)]

    start = []
    for i, (b, d) in enumerate(zip(firsts.values(), D, strict=True)):
        places = d.places[1:]
        if b.relation.slots.table is None:
            tails = [a for n, parts in zip(numbers, f, strict=True) if n == i for a in parts]
            shapes = [a.shape[1:] for a in tails]
            places = np.broadcast_shapes(places, *shapes) if small else b.relation.slots.shape
        start.append(d.identity(places))
    like = jax.eval_shape(move, start, [[a[0] for a in parts] for parts in f])
    zero = lambda v: tree_map(lambda a: jnp.zeros(a.shape, a.dtype), v)
    zeros = [zero(v) if s else None for v, s in zip(like, sums, strict=True)]
    (products, totals), moved = scan(
        back, (start, zeros), (maps.varying, f_varying), length, reverse=True
    )
    out = []
    for b, r, i, total, v in zip(blocks, of, numbers, totals, moved, strict=True):
        matrix = products[i].jacobian
        if r.slots.table is None:
            matrix = jnp.broadcast_to(matrix, (*r.slots.shape, *matrix.shape[-2:]))
        v = D[i].slots(v if total is None else tree_map(lambda a: a[None], total))
        before, after = r.slots.shape, b.relation.slots.shape
        out.append((_shaped(matrix, before, after, 2), _shaped(v, before, after, 1)))
    return out


def _parts(b: RelationBlock, of: Relation) -> list[Array]:
    """f slot by slot, without what repeats; as one array where there are many."""
    before, after = b.relation.slots.shape, of.slots.shape
    if b.steps.slots is not None:
        return [_shaped(a, before, after, 0) for a in b.steps.slots]
    return [b.transition.vector(_shaped(b.steps.f, before, after, 1))]


def each_iteration(r: Relation, D: Transition, v: Array) -> Array:
    """D v, of every iteration of an operator in a loop."""
    return D.apply(v) if r.site.iterations is None else jax.vmap(D.apply)(v)


def at_output(b: RelationBlock, f: Array, q: Array, masked: bool) -> Array:
    """<f, q>, the cotangent at y, for every step and iteration."""
    r, lane, how = b.relation, 1, (b.singular, masked)
    if r.site.iterations is not None:
        q, lane = q[:, None], 2
    n = f.shape[-1]
    if n > 8:
        out = product(q, f, *how).sum(-1)
    else:  # a few slots are added up: XLA's CPU reduction is far slower than that
        pairs = zip(jnp.unstack(q, axis=-1), jnp.unstack(f, axis=-1), strict=True)
        terms = [product(a, b, *how) for a, b in pairs]
        out = sum(terms[1:], terms[0])
    return out.sum(lane) if r.slots.lanes else out
