"""Sparse and ragged products written out: gathers, products and sums, which the analysis follows.

bcoo_dot_general(data, indices, x)         y[row] = Σ data x[column] over the entries
ragged_dot_general(x, w, group_sizes)      y = x[i] @ w[group of i], a row at a time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxpr import Atom, Equation, Program, close, shape_of, trace
from ._fold import rewritten
from ._sites import Around
from ._step import Step

Array = jax.Array


def expanded(step: Step) -> Step:
    """The step without products that only JAX's own rules know."""

    def rewrite(program: Program, around: Around) -> Program:
        parts = [_written_out(eqn) for eqn in program.equations]
        if all(len(part) == 1 for part in parts):
            return program
        return replace(program, equations=tuple(eqn for part in parts for eqn in part))

    return rewritten(step, rewrite)


def _written_out(eqn: Equation) -> list[Equation]:
    """The equations that an equation stands for; the same one if it is of another kind."""
    write = _FORMS.get(eqn.name)
    function = None if write is None else write(eqn)
    if function is None:
        return [eqn]
    inner = close(*trace(function, *map(shape_of, eqn.inputs)))
    new: dict[Atom, Any] = dict(zip(inner.inputs, eqn.inputs, strict=True))
    new |= zip(inner.outputs, eqn.outputs, strict=True)
    renamed = lambda atoms: tuple(new.get(a, a) for a in atoms)
    return [
        replace(
            e,
            inputs=renamed(e.inputs),
            outputs=renamed(e.outputs),
            source=eqn.source,
            callers=eqn.callers,
        )
        for e in inner.equations
    ]


def _bcoo(eqn: Equation) -> Callable[..., Array] | None:
    """Entries by their indices, times a dense array."""
    data, indices, _ = eqn.inputs
    return _of_entries(eqn, data.shape, indices.shape)


def _of_entries(
    eqn: Equation, data: tuple[int, ...], indices: tuple[int, ...]
) -> Callable[..., Array] | None:
    """The product with a sparse matrix, or a batch of them where both have its axes first.

    None for entries that are blocks.
    """
    batch = len(indices) - 2
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    shape, first = eqn.params["lhs_spinfo"].shape, tuple(range(batch))
    vector = len(data) == batch + 1 and len(shape) == batch + indices[-1]
    if not vector or tuple(lb) != first or tuple(rb) != first:
        return None

    def product(data: Array, indices: Array, x: Array) -> Array:
        def one(data: Array, indices: Array, x: Array) -> Array:
            free = [i for i in range(len(shape) - batch) if i + batch not in lc]
            x = jnp.moveaxis(x, [i - batch for i in rc], range(len(rc)))
            at = tuple(indices[:, i - batch] for i in lc)
            read = x.at[at].get(mode="fill", fill_value=0)  # entries that only pad are outside
            terms = data.reshape(-1, *[1] * (read.ndim - 1)) * read
            out = jnp.zeros((*(shape[i + batch] for i in free), *read.shape[1:]), terms.dtype)
            return out.at[tuple(indices[:, i] for i in free)].add(terms)

        for _ in range(batch):
            one = jax.vmap(one)
        lead = x.shape[:batch]
        data, indices = (jnp.broadcast_to(a, lead + a.shape[batch:]) for a in (data, indices))
        return one(data, indices, x).astype(eqn.outputs[0].dtype)

    return product


def _transposed(eqn: Equation) -> Callable[..., Any] | None:
    """The same entries with their indices in another order."""
    data, indices = eqn.inputs
    if len(data.shape) != 1 or len(indices.shape) != 2:
        return None
    order = list(eqn.params["permutation"])
    return lambda data, indices: (jnp.copy(data), jnp.stack([indices[:, i] for i in order], 1))


def _bcsr(eqn: Equation) -> Callable[..., Array] | None:
    """The same for compressed rows."""
    data, columns, *_ = eqn.inputs
    product = _of_entries(eqn, data.shape, (*columns.shape, 2))
    if product is None:
        return None

    def of_rows(data: Array, columns: Array, ends: Array, x: Array) -> Array:
        entry = jnp.arange(columns.shape[-1])
        rows = jnp.sum(entry[:, None] >= ends[..., None, 1:], -1, dtype=columns.dtype)
        return product(data, jnp.stack([rows, columns], -1), x)

    return of_rows


def _ragged(eqn: Equation) -> Callable[..., Array] | None:
    """Rows of x in groups, each with a matrix of its own."""
    p = eqn.params
    dims = p["ragged_dot_dimension_numbers"]
    plain = (((1,), (1,)), ((), ()))
    as_lists = lambda d: tuple(tuple(map(tuple, pair)) for pair in d)
    if (
        p.get("group_offset") is not None
        or len(eqn.inputs) != 3
        or as_lists(dims.dot_dimension_numbers) != plain
        or (*dims.lhs_ragged_dimensions, *dims.rhs_group_dimensions) != (0, 0)
    ):
        return None
    how = {k: p[k] for k in ("precision", "preferred_element_type")}

    def product(x: Array, w: Array, sizes: Array) -> Array:
        row, ends = jnp.arange(x.shape[0])[:, None], jnp.cumsum(sizes)
        group = jnp.sum(row >= ends, 1)
        own = w.at[group].get(mode="fill", fill_value=0)  # rows after the last group have none
        return jax.lax.dot_general(x, own, (((1,), (1,)), ((0,), (0,))), **how)

    return product


_FORMS: dict[str, Callable[[Equation], Callable[..., Array] | None]] = {
    "bcoo_dot_general": _bcoo,
    "bcoo_transpose": _transposed,
    "bcsr_dot_general": _bcsr,
    "ragged_dot_general": _ragged,
}
