"""Sparse and ragged products of JAX, in terms that the analysis follows.

bcoo_dot_general(data, indices, x)      the operator of `sparse_matmul`, if the indices are known;
                                        else y[row] = Σ data x[column] over the entries
ragged_dot_general(x, w, group_sizes)   y[i] = x[i] @ w[group of i]
shard_map of a function with weights    vmap of it over the parts of its operands
psum over a mapped axis                 the sum over that axis
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Structure, etp_sp_mm, etp_sp_mv
from ..program import (
    Atom,
    Equation,
    Program,
    Rewriting,
    Var,
    bind,
    evaluate,
    flatten,
    is_traced,
    prune,
    rewritten,
    write,
)
from ._fold import in_all_bodies
from ._reach import bits_of, reach
from ._sites import Around
from ._step import Step

Array = jax.Array
Known = Callable[[Atom], np.ndarray | None]  # the value of what depends on constants alone
Write = Callable[..., Any] | None


def expanded(step: Step, consts: Sequence[Any]) -> Step:
    """The step without products that only JAX's own rules know, nor weights in a `shard_map`."""
    trained = reach(step.program, step.entry_bits(step.params))

    def rewrite(program: Program, around: Around) -> Program:
        values = {} if around else dict(zip(program.consts, consts, strict=True))

        def written_out(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
            def known(atom: Atom) -> np.ndarray | None:
                (now,) = to.read([atom])
                return _known(replace(program, equations=tuple(to.equations)), now, values)

            form = _FORMS.get(eqn.name)
            function = None if form is None else form(eqn, known)
            return None if function is None else write(to, function, *eqn.inputs, rule=written_out)

        def rule(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
            plain = eqn.name == "shard_map" and not any(bits_of(a, trained) for a in eqn.inputs)
            return None if plain else written_out(to, eqn)

        return rewritten(program, rule)

    return in_all_bodies(step, rewrite)


def _known(program: Program, atom: Atom, values: Mapping[Var, Any]) -> np.ndarray | None:
    """The value of an atom, if it depends on constants alone."""
    cone = prune(program, [atom])
    used = {*cone.read}
    needed = [v for v in (*cone.consts, *cone.inputs) if v in used]
    if not all(v in values and not is_traced(values[v]) for v in needed):
        return None
    blank = [None] * len(cone.inputs)
    with jax.ensure_compile_time_eval():  # also inside of a transformation
        return np.asarray(evaluate(cone, [values.get(v) for v in cone.consts], blank)[0])


def _bcoo(eqn: Equation, known: Known) -> Write:
    """Entries by their indices, times a dense array."""
    data, indices, _ = eqn.inputs
    return _of_entries(eqn, data.shape, indices.shape, known(indices))


def _of_entries(
    eqn: Equation, data: tuple[int, ...], indices: tuple[int, ...], at: np.ndarray | None
) -> Write:
    """The product with a sparse matrix, or a batch of them where both have its axes first.

    None for entries that are blocks; `at` are the indices, if known.
    """
    batch = len(indices) - 2
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    shape, first = eqn.params["lhs_spinfo"].shape, tuple(range(batch))
    vector = len(data) == batch + 1 and len(shape) == batch + indices[-1]
    if not vector or tuple(lb) != first or tuple(rb) != first:
        return None
    one_matrix = len(shape) == batch + 2 and {*data[:batch], *indices[:batch]} <= {1}
    if at is not None and one_matrix and len(lc) == 1:
        return _operator(eqn, at.reshape(-1, 2), batch)

    def one(data: Array, indices: Array, x: Array) -> Array:
        free = [i for i in range(len(shape) - batch) if i + batch not in lc]
        x = jnp.moveaxis(x, [i - batch for i in rc], range(len(rc)))
        at = tuple(indices[:, i - batch] for i in lc)
        read = x.at[at].get(mode="fill", fill_value=0)  # entries that only pad are outside
        terms = data.reshape(-1, *[1] * (read.ndim - 1)) * read
        out = jnp.zeros((*(shape[i + batch] for i in free), *read.shape[1:]), terms.dtype)
        return out.at[tuple(indices[:, i] for i in free)].add(terms)

    def product(data: Array, indices: Array, x: Array) -> Array:
        mapped = one
        for _ in range(batch):
            mapped = jax.vmap(mapped)
        lead = x.shape[:batch]
        data, indices = (jnp.broadcast_to(a, lead + a.shape[batch:]) for a in (data, indices))
        return mapped(data, indices, x).astype(eqn.outputs[0].dtype)

    return product


def _operator(eqn: Equation, at: np.ndarray, batch: int) -> Write:
    """The operator for one matrix with entries at known places, times rows of x."""
    (lc, rc), _ = eqn.params["dimension_numbers"]
    read, written = lc[0] - batch, 1 - (lc[0] - batch)
    sizes = [eqn.params["lhs_spinfo"].shape[batch + i] for i in (read, written)]
    structure = Structure(at[:, read], at[:, written], (sizes[0], sizes[1]))

    def product(data: Array, indices: Array, x: Array) -> Array:
        x = jnp.moveaxis(x, rc[0], -1)
        operator, rows = (etp_sp_mv, x) if x.ndim == 1 else (etp_sp_mm, x.reshape(-1, sizes[0]))
        y = operator.bind(rows, data.reshape(-1), structure=structure)
        y = jnp.moveaxis(y.reshape(*x.shape[:-1], sizes[1]), -1, batch)
        return y.astype(eqn.outputs[0].dtype)

    return product


def _transposed(eqn: Equation, known: Known) -> Write:
    """The same entries with their indices in another order."""
    data, indices = eqn.inputs
    if len(data.shape) != 1 or len(indices.shape) != 2:
        return None
    order = list(eqn.params["permutation"])
    return lambda data, indices: (jnp.copy(data), jnp.stack([indices[:, i] for i in order], 1))


def _bcsr(eqn: Equation, known: Known) -> Write:
    """The same for compressed rows."""
    data, columns, ends, _ = eqn.inputs

    def indices(columns: Any, ends: Any) -> Array:
        entry = np.arange(columns.shape[-1])
        rows = (entry[:, None] >= ends[..., None, 1:]).sum(-1)
        return jnp.stack([rows.astype(columns.dtype), columns], -1)

    values = known(columns), known(ends)
    at = None if any(v is None for v in values) else np.asarray(indices(*values))
    product = _of_entries(eqn, data.shape, (*columns.shape, 2), at)
    if product is None:
        return None
    return lambda data, columns, ends, x: product(data, indices(columns, ends), x)


def _ragged(eqn: Equation, known: Known) -> Write:
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


def _shard_map(eqn: Equation, known: Known) -> Write:
    """The function of each device, mapped over the parts of the arrays: its operators are seen.

    Two devices, x of shape (4, 3) with `P("d")` and w with `P()`: x becomes (2, 2, 3), the function
    is mapped over the first axis of x, and its y of shape (2, 2, n) becomes (4, n).
    """
    p = eqn.params
    manual = p.get("newly_manual_axes") or p["mesh"].axis_names
    sizes = {k: n for k, n in p["mesh"].shape.items() if k in manual}
    program, consts = flatten(p["jaxpr"])
    if any(e.bodies for e in program.equations):
        return None

    def axes_of(spec: Any, rank: int) -> list[str | None]:
        """Axes of the mesh, each before the axis of the array (None) that is divided along it."""
        out: list[str | None] = []
        for names in (*spec, *[None] * (rank - len(spec))):
            out += [*((names,) if isinstance(names, str) else names or ()), None]
        return out

    def split(array: Array, spec: Any) -> Array:
        # (4, 3) by P("d") on two devices: axes ["d", None, None], sizes [2, 2, 3], and the axes of
        # the mesh come first, in its order: (2, 2, 3), the devices before what each of them has.
        axes, shape, parts = axes_of(spec, array.ndim), iter(array.shape), 1
        sizes_of_axes = []
        for k in axes:
            sizes_of_axes.append(next(shape) // parts if k is None else sizes[k])
            parts = 1 if k is None else parts * sizes[k]
        own = [i for i, k in enumerate(axes) if k is None]
        order = [*(axes.index(k) for k in sizes if k in axes), *own]
        return array.reshape(sizes_of_axes).transpose(order)

    def joined(array: Array, spec: Any, shape: tuple[int, ...]) -> Array:
        axes = axes_of(spec, len(shape))
        here = tuple(slice(None) if k in axes else 0 for k in sizes)  # the same on the others
        first, own = [k for k in sizes if k in axes], count(len([k for k in sizes if k in axes]))
        order = [next(own) if k is None else first.index(k) for k in axes]
        return array[here].transpose(order).reshape(shape)

    def one(*arrays: Array) -> list[Array]:
        return evaluate(program, consts, arrays, _on_one_device)

    def mapped(*arrays: Array) -> list[Array]:
        function = one
        for k in reversed(sizes):  # the innermost first
            at = tuple(0 if k in axes_of(s, a.ndim) else None for s, a in pairs(arrays))
            function = jax.vmap(function, at, axis_name=k, axis_size=sizes[k])
        outs = function(*(split(a, spec) for spec, a in pairs(arrays)))
        shapes = [v.shape for v in eqn.outputs]
        return list(map(joined, outs, p["out_specs"], shapes))

    def pairs(arrays: Sequence[Array]) -> list[tuple[Any, Array]]:
        return list(zip(p["in_specs"], arrays, strict=True))

    return mapped


def _on_one_device(eqn: Equation, values: list[Any]) -> list[Any]:
    """An equation inside of a `shard_map`, in the terms of a mapped function."""
    if eqn.name in ("pvary", "pcast"):  # says by which devices a value differs
        return values
    if eqn.name == "psum_invariant":
        return [jax.lax.psum(v, eqn.params["axes"]) for v in values]
    return bind(eqn, values)


def _psum(eqn: Equation, known: Known) -> Write:
    """A sum over an axis that had a name, before a `vmap` in the step gave it a place."""
    axes = eqn.params["axes"]
    by_place = all(isinstance(a, int) for a in axes)
    return (lambda *arrays: [jnp.sum(a, axes) for a in arrays]) if by_place else None


_FORMS: dict[str, Callable[[Equation, Known], Write]] = {
    "bcoo_dot_general": _bcoo,
    "bcoo_transpose": _transposed,
    "bcsr_dot_general": _bcsr,
    "ragged_dot_general": _ragged,
    "shard_map": _shard_map,
    "psum": _psum,
}
