"""Sums over the steps of a block, as matrix products wherever the operator is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import not_supported
from ..engine import Fresh, Grads
from ..graph import HiddenParamOpRelation as Relation

Array = jax.Array

_UNROLL = 8  # steps of an element-wise recurrence that become one kernel on a GPU


def scan(body, carry, arrays, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """`lax.scan` for cheap bodies; a single step is written out."""
    if length == 1:
        carry, out = body(carry, jax.tree.map(lambda a: a[0], arrays))
        return carry, jax.tree.map(lambda a: a[None], out)
    unroll = 1 if jax.default_backend() == "cpu" else min(_UNROLL, length)
    return jax.lax.scan(body, carry, arrays, length, reverse=reverse, unroll=unroll)


def either(fresh: Fresh, if_fresh: Callable[[], Any], if_not: Callable[[], Any]) -> Any:
    """One of two results; None is as good as False."""
    if fresh is None or isinstance(fresh, bool):
        return if_fresh() if fresh else if_not()
    return jax.lax.cond(fresh, if_fresh, if_not)


def folded(r: Relation, arrays: Any) -> Any:
    """Steps, or steps and iterations, as one leading axis of all these arrays."""
    if r.site.iterations is None:
        return arrays
    return jax.tree.map(lambda a: a.reshape((a.shape[0] * a.shape[1], *a.shape[2:])), arrays)


def first(arrays: Any) -> Any:
    """What was recorded of the first step."""
    return jax.tree.map(lambda a: a[0], arrays)


def pull(r: Relation, x: Any, c: Array, weights: Grads) -> Grads:
    """Gradients of the weights from cotangents of y, summed over the leading axis of both."""
    return r.operator.pull_all(x, c, weights, r.keys)


def grown(r: Relation, x: Any, v: Array, weights: Grads, dtypes: dict) -> Grads:
    """The sum over the leading axis of v (x) x, in the coordinates of the trace."""
    op, lead, length = r.operator, len(r.slots.lanes), v.shape[0]
    if x is None or length == 1:
        features = op.features(first(x), weights, r.keys)
        total = v.sum(0)
        return {
            k: _real(features[k][..., None] * op.spread(k, total, lead), dtypes[k]) for k in r.keys
        }
    out, alone = {}, op.constant_keys
    for k in r.keys:
        if k in alone:
            one = op.features(first(x), weights, r.keys)[k]
            out[k] = _real(one[..., None] * op.spread(k, v.sum(0), lead), dtypes[k])
            continue
        tail = op.spread(k, v, lead + 1)
        axes = tail.shape[1 + lead : -1]

        def of(x: Any, k=k, axes=axes) -> Array:
            one = op.features(x, weights, r.keys)[k]
            return one.reshape((1,) * (len(axes) - one.ndim) + one.shape)

        one = jax.eval_shape(of, first(x))
        shape = (*r.slots.lanes, *np.broadcast_shapes(one.shape, axes), v.shape[-1])
        if _is_product(one.shape, axes):
            total = _product(jax.vmap(of)(x), tail, lead).reshape(shape)
        else:
            zero = jnp.zeros(shape, jnp.result_type(one.dtype, tail.dtype))
            add = lambda total, now, of=of: (total + of(now[0])[..., None] * now[1], None)
            total = jax.lax.scan(add, zero, (x, tail))[0]
        out[k] = _real(total, dtypes[k])
    return out


def _real(array: Array, dtype: Any) -> Array:
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        array = array.real
    return array.astype(dtype)


def _is_product(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether each factor has axes of its own: a sum over steps is then a matrix product."""
    own = prod(n for n, m in zip(one, other, strict=True) if m == 1)
    return own > 1 and prod(one) <= 4 * max(own * _shared(one, other), 1)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return prod(n for n, m in zip(one, other, strict=True) if n == m)


def _product(features: Array, tail: Array, lead: int) -> Array:
    """(L, *axes) and (L, *lanes, *axes, K), summed over L; axes of size one broadcast."""
    n = features.ndim - 1
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
    counts = jnp.any(c.reshape((c.shape[0], -1)) != 0, axis=1)
    index = jnp.where(counts, jnp.arange(c.shape[0]), jnp.argmax(counts))
    return jax.tree.map(lambda a: a[index], x)


def seen_input(r: Relation, x: Array | None) -> Array:
    """The input as an array that can be filtered: spikes may come as booleans or integers.

    Raises:
        NotSupportedError: the input is no number (an index), and the operator is mapped.
    """
    if not r.operator.is_representable:
        raise not_supported(
            f"a trace of the inputs of {r.primitive.name} inside of vmap, map or scan.",
            where=r.site.equation.where(),
            why="its input is an index, which cannot be averaged over time",
            do="use a rule with a trace per weight (d_rtrl), or look up all rows at once, "
            "outside of vmap and map",
        )
    seen = jnp.asarray(r.operator.represent(x))
    return seen if jnp.issubdtype(seen.dtype, jnp.inexact) else seen.astype(r.operator.y.dtype)
