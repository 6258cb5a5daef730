"""Sums over the steps of a block, as matrix products wherever the operator is one; traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import not_supported
from ..engine import Fresh, Grads, Transition, product, running_placement, scan_time
from ..graph import HiddenParamOpRelation as Relation
from ._options import TraceDtype
from ._relation_rule import RelationBlock

Array = jax.Array

_UNROLL = 8  # steps of an element-wise recurrence that become one kernel on a GPU
PART_BYTES = 1 << 25  # a product that is added to a trace of more than this is computed in parts
PARTS = 4


def scan(body, carry, arrays, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """`scan_time` for cheap bodies."""
    unroll = 1 if jax.default_backend() == "cpu" else min(_UNROLL, length)
    return scan_time(body, carry, arrays, length, reverse=reverse, unroll=unroll)


def either(fresh: Fresh, if_fresh: Callable[[], Any], if_not: Callable[[], Any]) -> Any:
    """One of two results; None is as good as False."""
    if fresh is None or isinstance(fresh, bool) or running_placement() is not None:
        fresh = fresh is True
        return if_fresh() if fresh else if_not()
    return jax.lax.cond(fresh, if_fresh, if_not)


def folded(r: Relation, arrays: Any) -> Any:
    """Steps, or steps and iterations, as one leading axis of all these arrays."""
    if r.site.iterations is None:
        return arrays
    return jax.tree.map(lambda a: a.reshape((a.shape[0] * a.shape[1], *a.shape[2:])), arrays)


def iterations(r: Relation) -> tuple[int, ...]:
    """The axis of iterations that arrays of an operator in a loop have, or none."""
    return () if r.site.iterations is None else (r.site.iterations,)


def gathered(r: Relation, tree: Any, behind: int = 0) -> Any:
    """Values at units, `behind` axes from the end, where weights look them up; see `Placement`."""
    placement = running_placement()
    return tree if placement is None else placement.gathered(r.operator, tree, behind)


def summed_by_parts(
    r: Relation, function: Callable[..., Grads], *pairs: tuple[Any, int | dict[str, int]]
) -> Grads | None:
    """A sum over samples, on every device first: one sum of these, whatever it is made of.

    Pairs are of arguments and their axis of samples, or one by name. None if samples are not on
    several devices.
    """
    placement = running_placement()
    parts = 1 if placement is None else placement.parts_of(r)
    if parts == 1:
        return None

    def split(tree: Any, axis: int | dict[str, int]) -> Any:
        if isinstance(axis, dict):
            return {k: split(tree[k], i) for k, i in axis.items() if k in tree}
        shape = lambda a: (*a.shape[:axis], parts, a.shape[axis] // parts, *a.shape[axis + 1 :])
        return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(shape(a)), axis, 0), tree)

    sums = jax.vmap(function)(*(split(*pair) for pair in pairs))
    return {k: g.sum(0) for k, g in sums.items()}


def pull(r: Relation, x: Any, c: Array, weights: Grads) -> Grads:
    """Gradients of the weights from cotangents of y, summed over the leading axis of both."""
    return r.operator.pull_all(gathered(r, x), gathered(r, c), weights, r.keys)


def pull_each(items: Sequence[tuple[Relation, Any, Array, Grads]], whole: bool) -> list[Grads]:
    """`pull` of several relations; one product for those that read the same input, on a CPU.

    `whole` says that inputs are those of all steps, whatever counts.
    """
    # i = x @ W_i and f = x @ W_f with the cotangents c_i and c_f:  x^T [c_i, c_f] = [W_i', W_f'].
    alike: dict[Any, list[int]] = {}
    for n, item in enumerate(items):
        alike.setdefault((_joint_key(*item[:3]) if whole else None) or n, []).append(n)
    out: list[Grads] = [{} for _ in items]
    for numbers in alike.values():
        r, x, c, weights = items[numbers[0]]
        axes = r.operator.joint
        if len(numbers) == 1 or axes is None:
            out[numbers[0]] = pull(r, x, c, weights)
            continue
        parts = [items[n][2] for n in numbers]
        axis = axes["y"] - r.operator.y.ndim
        grads = pull(r, x, jnp.concatenate(parts, axis), weights)
        ends = np.cumsum([a.shape[axis] for a in parts])[:-1].tolist()
        each = {k: jnp.split(g, ends, axes[k]) for k, g in grads.items()}
        for i, n in enumerate(numbers):
            out[n] = {k: of[i] for k, of in each.items()}
    return out


def _joint_key(r: Relation, x: Any, c: Array) -> Any:
    """Equal for relations whose products may be joined; None if that is none."""
    op, site = r.operator, r.site
    if op.joint is None or site.x is None or site.levels or x is None:
        return None
    if jax.default_backend() != "cpu" or running_placement() is not None:
        return None
    shapes = {**op.shapes, "y": op.y}
    other = tuple(
        (k, s.dtype, np.delete(s.shape, op.joint[k]).tobytes()) for k, s in shapes.items()
    )
    static = tuple(sorted(op.params.items()))
    return op.primitive, static, other, site.x, c.shape[0], c.dtype, tuple(r.keys)


Finish = Callable[[Array], Array]  # how a trace is stored: its precision, and its bound


def with_deposits(
    block: RelationBlock, x: Any, v: Array, eps: Grads, D: Array | None, finish: Finish
) -> Grads:
    """Traces D eps + sum v (x) x, the sum over the leading axis; D is None where eps is zero."""
    r, weights = block.relation, block.weights
    op, lead = r.operator, len(r.slots.lanes)
    x, v = gathered(r, x), gathered(r, v, 1)
    first = jax.tree.map(lambda a: a[0], x)
    constant = set(r.keys) if x is None or v.shape[0] == 1 else op.constant_keys & set(r.keys)
    same = op.features(first, weights, r.keys) if constant else {}
    dtypes = dtypes_of(r, weights)

    def moved(D: Array, eps: Array) -> Array:
        transition = Transition.of(D, block.table, block.singular)
        return transition.slots(transition.apply(transition.vector(eps)))

    def after(k: str) -> Array:
        # For y = x @ W + b of 3 inputs and 2 units, K = 1, and v (steps, 2, 1) the deposits f moved
        # to the end of the block, three ways, the first that applies:
        #
        #     b    dy/db = 1 at all steps          (constant) the sum of v, (2, 1)
        #     W    a product over the steps        eps (3, 2, 1) <- D eps + x^T v, which the
        #                                          operator may do in one pass (`sum_steps`)
        #     W    of an operator without that     features (steps, 3, 1), v (steps, 1, 2, 1):
        #                                          each has axes of its own: an einsum
        #
        # Where they share their axes (an element-wise weight: (steps, 2) both), a product of arrays
        # of all steps would be as large as the steps times the trace: a loop adds up.
        spread, dtype = None if D is None else op.spread(k, D, lead), dtypes[k]

        def total(eps: Array, D: Array | None, deposit: Array) -> Array:
            real = not jnp.issubdtype(dtype, jnp.complexfloating)
            deposit = (deposit.real if real else deposit).astype(dtype)
            deposit = deposit * block.slopes[k][..., None] if k in block.slopes else deposit
            past = None if D is None else moved(D, eps.astype(dtype))
            new = jnp.broadcast_to(deposit, eps.shape) if past is None else past + deposit
            return finish(new)

        if k in constant:
            deposit = same[k][..., None] * op.spread(k, _over_steps(v), lead)
            return total(eps[k], spread, deposit)
        past = None if D is None else (D, eps[k].astype(dtype), moved)
        at_once = k not in block.slopes
        both = op.sum_steps(k, x, v, past if at_once else None)  # with D eps in it
        if both is not None:
            return total(eps[k], None if at_once else spread, both)
        tail = op.spread(k, v, lead + 1)
        axes = tail.shape[1 + lead : -1]

        def of(x: Any) -> Array:
            one = op.features(x, weights, r.keys)[k]
            return one.reshape((1,) * (len(axes) - one.ndim) + one.shape)

        one = jax.eval_shape(of, first)
        if _is_product(one.shape, axes):
            split = at_once and in_parts(eps[k])
            return _products_added(eps[k], spread, jax.vmap(of)(x), tail, lead, total, split)
        shape = (*r.slots.lanes, *np.broadcast_shapes(one.shape, axes), v.shape[-1])
        zero = jnp.zeros(shape, jnp.result_type(one.dtype, tail.dtype))
        plus = lambda total, now: (total + of(now[0])[..., None] * now[1], None)
        return total(eps[k], spread, jax.lax.scan(plus, zero, (x, tail))[0])

    return {k: after(k) for k in r.keys}


def _is_product(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether each factor has axes of its own: a sum over steps is then a matrix product."""
    # x (3, 1) and v (1, 2): own 3, shared 1, 3 <= 4 * 3. Of (3, 2) and (1, 2), features that differ
    # by the output: own 3, shared 2: a batch of 2 products. Of (2,) and (2,): own 1, no product.
    own = prod(n for n, m in zip(one, other, strict=True) if m == 1)
    shared = prod(n for n, m in zip(one, other, strict=True) if n == m)
    return own > 1 and prod(one) <= 4 * max(own * shared, 1)


def _over_steps(v: Array) -> Array:
    """The sum over the leading axis; a product on a CPU, whose reduction to few slots is slow."""
    if jax.default_backend() != "cpu":
        return v.sum(0)
    ones = jnp.ones((1, len(v)), v.dtype)
    return (ones @ v.reshape((len(v), -1))).reshape(v.shape[1:])


Total = Callable[[Array, Array | None, Array], Array]  # (trace, D, deposit) -> trace


def _products_added(
    eps: Array,
    D: Array | None,
    features: Array,
    tail: Array,
    lead: int,
    total: Total,
    split: bool,
) -> Array:
    """A trace with `_product` added; if `split`, in parts, in the memory of the trace.

    Then no second array of the size of the trace is needed; a part is some of the samples, usually.
    """
    own = np.broadcast_shapes(features.shape[1:], tail.shape[1 + lead : -1])
    shape = (*tail.shape[1 : 1 + lead], *own, tail.shape[-1])
    axis = next((a for a in range(lead, len(shape) - 1) if shape[a] > 1), None)
    if D is None or axis is None or shape != eps.shape or not split:
        return total(eps, D, _product(features, tail, lead).reshape(shape))
    count = shape[axis]
    size = max(n for n in range(1, -(-count // PARTS) + 1) if count % n == 0)

    def part(a: Array, axis: int, i: Array) -> Array:
        whole = a.shape[axis] == 1
        return a if whole else jax.lax.dynamic_slice_in_dim(a, i * size, size, axis)

    def body(i, eps):
        old = part(eps, axis, i)
        new = _product(part(features, 1 + axis - lead, i), part(tail, 1 + axis, i), lead)
        new = total(old, part(D, axis, i), new.reshape(old.shape))
        return jax.lax.dynamic_update_slice_in_dim(eps, new, i * size, axis)

    return jax.lax.fori_loop(0, count // size, body, eps)


def in_parts(traces: Any) -> bool:
    """Whether one of these traces is so large that what is added to it is computed in parts.

    Not where there are several devices: the samples may lie on all of them.
    """
    large = any(a.size * a.dtype.itemsize > PART_BYTES for a in jax.tree.leaves(traces))
    return large and jax.device_count() == 1


def _product(features: Array, tail: Array, lead: int) -> Array:
    """(L, *axes) and (L, *lanes, *axes, K), summed over L; axes of size one broadcast."""
    n = features.ndim - 1
    # features (L, 3, 1), tail (L, lanes, 1, 2, K): letters 0 for the steps, 1 and 2 for the axes, 3
    # for lanes, 4 for slots. Axes of size one get no letter, so that XLA sees a matrix product:
    #
    #     one    [0, 1]        other    [0, 3, 2, 4]        out    [3, 1, 2, 4]
    names = list(range(1, n + 1))
    lanes, slots = list(range(n + 1, n + 1 + lead)), [n + 1 + lead] * (tail.shape[-1] > 1)
    one = [0, *(a for a, size in zip(names, features.shape[1:], strict=True) if size != 1)]
    sizes = tail.shape[1 + lead : -1]
    other = [0, *lanes, *(a for a, size in zip(names, sizes, strict=True) if size != 1), *slots]
    out = [*lanes, *(a for a in names if a in one or a in other), *slots]
    dtype = jnp.result_type(features, tail)
    features = features.reshape([features.shape[0], *(s for s in features.shape[1:] if s != 1)])
    shape = [*tail.shape[: 1 + lead], *(s for s in sizes if s != 1), *tail.shape[-1:] * len(slots)]
    tail = tail.reshape(shape)
    return jnp.einsum(features.astype(dtype), one, tail.astype(dtype), other, out)


def taken(r: Relation, x: Any, masked: bool, c: Array) -> Any:
    """What is recorded of the steps at which `c` is not zero; the others repeat one of them.

    Where an operator in a branch did not run, or a loss does not count, all that meets the input is
    zero, but the derivative by the weights may not be a number there.
    """
    if x is None or not (masked or any(level.length is None for level in r.site.levels)):
        return x
    # Of four steps of which the second and fourth count: counts [F, T, F, T], index [1, 1, 1, 3].
    # The first and third contribute x_1 times zero instead of an x that may be infinite times zero.
    counts = jnp.any(c.reshape((c.shape[0], -1)) != 0, axis=1)
    index = jnp.where(counts, jnp.arange(c.shape[0]), jnp.argmax(counts))
    return jax.tree.map(lambda a: a[index], x)


def seen_input(r: Relation, x: Array | None) -> Array:
    """The input as an array that can be filtered: spikes may come as booleans or integers.

    Raises:
        NotSupportedError: the input is no number (an index), and no one-hot row stands for it.
    """
    if not r.operator.is_representable:
        raise not_supported(
            f"a trace of the inputs of {r.primitive.name}.",
            where=r.site.equation.where(),
            why="its input is an index, which cannot be averaged over time: only whole rows along "
            "the first axis of an array, looked up outside of vmap, map and scan, have one-hot "
            "vectors in its place",
            do="use a rule with a trace per weight (d_rtrl), or look up whole rows at once: w[k], "
            "outside of vmap and map",
        )
    seen = jnp.asarray(r.operator.represent(x))
    return seen if jnp.issubdtype(seen.dtype, jnp.inexact) else seen.astype(r.operator.y.dtype)


def storage(trace_dtype: TraceDtype) -> Callable[[Array], Array]:
    """How a trace is stored: as it is, or in another precision (complex stays complex)."""

    def stored(eps: Array) -> Array:
        if trace_dtype is None:
            return eps
        both = jnp.result_type(trace_dtype, jnp.complex64)
        return eps.astype(both if jnp.iscomplexobj(eps) else trace_dtype)

    return stored


def contract(
    blocks: Sequence[RelationBlock], traces: Sequence[Grads], signals: Sequence[Array]
) -> list[Grads]:
    """<signal, eps>: sum over slots, lanes and free positions, for each weight of each relation."""
    # The memory of a step, <lam, eps>, of W (3, 2) with the trace eps (3, 2, K): the signal (2, K)
    # spread along the inputs is (1, 2, K), and the sum runs over slots, and over the free axes (of
    # a batch: the first), which both have in front. What is left has the shape of W.
    pairs: dict[tuple[int, str], list[Array]] = {}
    for i, (b, eps, signal) in enumerate(zip(blocks, traces, signals, strict=True)):
        r = b.relation
        for k in r.keys:
            n_lead = eps[k].ndim - 1 - b.weights[k].ndim
            spread = r.operator.spread(k, gathered(r, signal, 1), len(r.slots.lanes))
            pairs[i, k] = [a.reshape((-1, *a.shape[n_lead:])) for a in (spread, eps[k])]
    sums = _inner(list(pairs.values()), any(b.singular for b in blocks))
    out: list[Grads] = [{} for _ in blocks]
    for (i, k), total in zip(pairs, sums, strict=True):
        out[i][k] = total.astype(blocks[i].weights[k].dtype)
    return out


def _inner(pairs: Sequence[Sequence[Array]], singular: bool) -> list[Array]:
    """The product of each pair, summed over the first and the last axis."""

    def terms(pair: Sequence[Array]) -> Array:
        dtype = jnp.result_type(*pair)
        return product(pair[0].astype(dtype), pair[1].astype(dtype), singular)

    # On a mesh the leading axis lies on several devices, and a loop would collect its slices.
    if jax.default_backend() != "cpu" or running_placement() is not None:
        return [terms(pair).sum((0, -1)) for pair in pairs]
    # XLA's CPU reduction over a leading axis is fifty times slower than the additions in a loop.
    out: list[Any] = [None] * len(pairs)
    for n in dict.fromkeys(eps.shape[0] for _, eps in pairs):
        here = [i for i, (_, eps) in enumerate(pairs) if eps.shape[0] == n]
        own = [tuple(pairs[i]) for i in here]
        zeros = [jnp.zeros(pair[1].shape[1:], jnp.result_type(*pair)) for pair in own]
        add = lambda totals, now: (jax.tree.map(jnp.add, totals, list(map(terms, now))), None)
        for i, total in zip(here, jax.lax.scan(add, zeros, own)[0], strict=True):
            out[i] = summed(total)
    return out


def summed(array: Array) -> Array:
    """The sum over slots; a few are added up: XLA's CPU reduction is far slower than that."""
    n = array.shape[-1]
    if n > 8:
        return array.sum(-1)
    return sum((array[..., k] for k in range(1, n)), array[..., 0])


def dtypes_of(r: Relation, weights: Grads) -> dict:
    # A real weight has a real trace: slots are real, and Re(f dy/dw) is what moves them.
    out = {}
    for k in r.keys:
        dtype = weights[k].dtype
        if jnp.issubdtype(dtype, jnp.complexfloating):
            real = jnp.result_type(r.slots.dtype, jnp.finfo(dtype).dtype)
            out[k] = jnp.result_type(real, jnp.complex64)
        else:
            out[k] = jnp.result_type(r.slots.dtype, dtype)
    return out
