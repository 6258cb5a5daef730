"""Sparse layers: `y = x @ S(w) + b`, with one trained number per non-zero of a fixed structure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import value_error
from ..program import DerivedPrimitive
from ._contraction import with_bias_features
from ._operator import ETPPrimitive, Past, Rules, Shapes, Weights
from ._structure import Structure, structure_of
from ._twin import becomes, twins, unit_parts
from ._units import (
    AnyArray,
    Hook,
    Operand,
    UnitArray,
    bias_operand,
    bind,
    expect_axes,
    hooked,
    operand,
)

_LARGE = 2**17  # non-zeros; with fewer of them a gradient gains nothing
_FEW_EVENTS = 8  # one input in eight, or fewer, is not zero
_EVENTS = 2**13  # non-zeros at a time


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _rows_of(array: Array, index: Array, is_padded: bool = False) -> Array:
    """Rows of an array; with padding, 0 for those outside of it."""
    if is_padded:
        return array.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _presynaptic(x: Array, structure: Structure) -> Array:
    # The input at every non-zero, which come first; 0 at entries that only pad the data vector.
    return _rows_of(jnp.moveaxis(x, -1, 0), structure.arrays[0], structure.is_padded)


def _product(
    x: Array, weight: Array, *others: Any, out: int, is_padded: bool, by_row: bool
) -> Array:
    # Non-zeros first, so that gather and scatter move whole rows of the batch.
    *bias, rows, cols, _ = others
    weight = weight.reshape(weight.shape + (1,) * (x.ndim - 1))
    products = _rows_of(jnp.moveaxis(x, -1, 0), rows, is_padded) * weight
    y = jnp.zeros((out, *x.shape[:-1]), products.dtype)
    how: dict[str, Any] = dict(mode="promise_in_bounds", wrap_negative_indices=False)
    y = jnp.moveaxis(y.at[cols].add(products, **how), 0, -1)
    return y + bias[0] if bias else y


def _facts(structure: Structure) -> dict[str, Any]:
    names = ("is_padded", "by_row")
    return {"out": structure.shape[1], **{k: getattr(structure, k) for k in names}}


def _multiply(x: Array, *others: Array, structure: Structure, **static: object) -> Array:
    indices = (structure.rows, structure.cols, structure.starts)
    return _product(x, *others, *indices, **_facts(structure))


@cache
def _event_loop() -> Callable | None:
    """The product as a loop over non-zero inputs that numba compiles; None if it is not there."""
    try:
        import numba
        from brainevent import numba_kernel
    except ImportError:
        return None

    def loop(x, weight, cols, starts, y):
        y[:] = 0
        for i in range(len(x)):
            if x[i] != 0:
                for j in range(starts[i], starts[i + 1]):
                    y[cols[j]] += x[i] * weight[j]

    kernel, struct = numba.njit(loop), jax.ShapeDtypeStruct
    return lambda *out: numba_kernel(kernel, struct(*out), vmap_method="sequential")


def _by_events(x: Array, weight: Array, *others: Array, **facts: Any) -> Array:
    """The same product. Of a few non-zero inputs, the non-zeros in their rows are all it reads."""
    *bias, _, cols, starts = others
    many = x.shape[-1] // _FEW_EVENTS
    if not (facts["by_row"] and x.ndim == 1 and len(weight) >= _LARGE and _on_cpu()):
        return _product(x, weight, *others, **facts)
    dtype = jnp.result_type(x, weight)
    # The compiler cannot split a function of another one over devices.
    alone = jax.device_count() == 1 and dtype in (jnp.float32, jnp.float64)
    if alone and (loop := _event_loop()) is not None:
        y = loop((facts["out"],), dtype)(x.astype(dtype), weight.astype(dtype), cols, starts)
        return y + bias[0] if bias else y

    def of_events() -> Array:
        (active,) = jnp.nonzero(x, size=many, fill_value=x.shape[-1])
        last = starts[active + 1]  # of an input that only fills up: as many as are before it
        ends = jnp.cumsum(last - starts[active])
        size = min(_EVENTS, len(weight))

        def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
            start, y = state
            number = start + jnp.arange(size)
            # The input that each of the next non-zeros belongs to: how many inputs ended before.
            marks = (
                jnp.zeros(size, ends.dtype)
                .at[ends - start]
                .add(ends >= start, mode="drop", wrap_negative_indices=False)
            )
            event = jnp.minimum(jnp.sum(ends < start) + jnp.cumsum(marks), many - 1)
            at = jnp.minimum(last[event] - ends[event] + number, len(weight) - 1)
            value = jnp.where(number < ends[-1], x[active[event]] * weight[at], 0)
            return start + size, y.at[cols[at]].add(value, mode="promise_in_bounds")

        zeros = jnp.zeros(facts["out"], jnp.result_type(x, weight))
        more = lambda state: state[0] < ends[-1]
        y = jax.lax.while_loop(more, step, (jnp.zeros((), ends.dtype), zeros))[1]
        return y + bias[0] if bias else y

    few = jnp.count_nonzero(x) <= many
    return jax.lax.cond(few, of_events, lambda: _product(x, weight, *others, **facts))


product = DerivedPrimitive("sparse_product", _product, _by_events)
product.twin = becomes(product)


class _Sparse(ETPPrimitive):
    """Where the indices are arguments of the program, the product reads those."""

    def call(self, *args: Any, **params: Any) -> Any:
        indices = params["structure"].arguments
        if indices is None or params.get("mapped"):
            return self.bind(*args, **params)
        return product.bind(*args, *indices, **_facts(params["structure"]))


def _features(x: Array, shapes: Shapes, *, structure: Structure, **static: object) -> Weights:
    return with_bias_features(jnp.moveaxis(_presynaptic(x, structure), 0, -1), shapes)


def _gathered() -> int:
    # Numbers gathered at a time: on a CPU they stay in its cache, elsewhere they fill the device.
    return 2**18 if _on_cpu() else 2**24


def _sampled(x: Array, v: Array, structure: Structure, past: Past | None = None) -> Array:
    """Per non-zero, x of its row times v of its column, summed over the steps.

    x is (in, steps, *batch), v (out, steps, *lanes, *batch, slots), both with their units first, so
    that a non-zero gathers whole rows; the result is (non-zeros, *lanes, *batch, slots). A chunk of
    non-zeros at a time: rows of all of them would be as large as the trace times the steps.
    """
    # Non-zeros (row, column) = (0, 1), (2, 1), (2, 0) of a (3, 2) matrix, two steps: the first one
    # is x[0, t] v[1, t], summed over t. `here` gathers x as rows [0, 2, 2], v as columns [1, 1, 0].
    lanes = v.ndim - x.ndim - 1
    axes = [0, 1, *range(2 + lanes, v.ndim - 1)]
    indices = structure.arrays[:2]

    def chunk(rows: Array, cols: Array, eps: Array | None) -> Array:
        here = _rows_of(x, rows, structure.is_padded)
        out = jnp.einsum(here, axes, _rows_of(v, cols), [*range(v.ndim)], [0, *range(2, v.ndim)])
        if past is None or eps is None:
            return out
        D, _, product = past
        return product(_rows_of(D, cols), eps) + out

    size = max(1, _gathered() // max(1, prod(v.shape[1:])))

    def all_of(rows: Array, cols: Array, eps: Array | None) -> Array:
        count = len(rows)
        if size >= count:
            return chunk(rows, cols, eps)

        def step(i: Array, out: Array) -> Array:
            start = jnp.minimum(i * size, count - size)  # the last one overlaps
            part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size)
            now = chunk(*jax.tree.map(part, (rows, cols, eps)))
            return jax.lax.dynamic_update_slice_in_dim(out, now, start, 0)

        one = jax.eval_shape(chunk, rows, cols, eps)
        return jax.lax.fori_loop(0, -(-count // size), step, jnp.zeros(one.shape, one.dtype))

    args = (*indices, None if past is None else past[1])
    parts = unit_parts()
    if parts <= 1 or structure.size % parts:
        return all_of(*args)
    # Every device loops over its own synapses: a slice of all of them would be sent to each.
    split = lambda a: a.reshape((parts, a.shape[0] // parts, *a.shape[1:]))
    out = jax.vmap(all_of)(*jax.tree.map(split, args))
    return out.reshape((-1, *out.shape[2:]))


def _sum_steps(
    key: str,
    x: Array,
    values: Array,
    past: Past | None,
    *,
    structure: Structure,
    **static: object,
) -> Array | None:
    if key != "weight" or jnp.iscomplexobj(x) or jnp.iscomplexobj(values):
        return None
    if past is not None:
        D, eps, product = past
        past = jnp.moveaxis(D, -3, 0), jnp.moveaxis(eps, -2, 0), product
    out = _sampled(jnp.moveaxis(x, -1, 0), jnp.moveaxis(values, -2, 0), structure, past)
    return jnp.moveaxis(out, 0, -2)


def _pull(
    x: Array, c: Array, shapes: Shapes, *, structure: Structure, **static: object
) -> Weights | None:
    if jnp.iscomplexobj(x) or jnp.iscomplexobj(c):
        return None
    flat = lambda a: a.reshape(-1, a.shape[-1]).T
    grads = {"weight": _sampled(flat(x), flat(c)[..., None], structure)[:, 0]}
    if "bias" in shapes:
        grads["bias"] = c.sum(range(c.ndim - 1))
    return grads


def _free(key: str, y: tuple[int, ...], **static: object) -> tuple[int, ...] | None:
    return y[:-1] if key == "weight" else None


def _primitive(name: str, rank: int) -> ETPPrimitive:
    def spread(key: str, values: Array, lead: int, *, structure: Structure, **static: object):
        # A non-zero is tied to the one output unit of its column.
        if key != "weight":
            return None
        values = jnp.moveaxis(values, lead + rank - 1, 0)
        return jnp.moveaxis(_rows_of(values, structure.arrays[1]), 0, lead + rank - 1)

    return _Sparse(
        name,
        _multiply,
        weights=("weight", "bias"),
        rules=Rules(
            features=_features, spread=spread, free=_free, pull=_pull, sum_steps=_sum_steps
        ),
    )


etp_sp_mm, etp_sp_mv = twins(_primitive("etp_sp_mm", 2), _primitive("etp_sp_mv", 1))


def sparse_matmul(
    x: AnyArray,
    weight: AnyArray | None = None,
    *,
    sparse_mat: Any,
    bias: AnyArray | None = None,
    weight_fn: Hook = None,
    bias_fn: Hook = None,
    weight_data: AnyArray | None = None,
) -> UnitArray:
    """Multiply by a sparse matrix whose non-zeros are trained: `x @ S(weight_fn(weight)) + bias`.

    Args:
        x: input of shape (in,) or (batch, in).
        weight: the non-zeros, in the order of the structure's own data vector (for scipy formats
            without one, of its `tocoo()`); a single number serves all of them.
        sparse_mat: structure of shape (in, out): CSR, CSC or COO of brainevent or saiunit, BCOO
            or BCSR of jax, or any scipy.sparse matrix. Its own values are not read.
        bias: optional vector of shape (out,), in the unit of the product.
        weight_fn: differentiable function of the weight without its unit.
        bias_fn: the same for the bias.
        weight_data: another spelling of `weight`.

    Returns:
        The product, of shape (out,) or (batch, out).

    Raises:
        TypeError: if the structure has another format, or the weight is missing.
        ValueError: if the shapes do not fit.
        saiunit.UnitMismatchError: if the bias has another unit than the product.

    Example:
        >>> import jax.numpy as jnp, numpy as np, braintrace
        >>> from jax.experimental.sparse import BCOO
        >>> mat = BCOO.fromdense(np.eye(3))
        >>> braintrace.sparse_matmul(jnp.ones(3), jnp.arange(3.), sparse_mat=mat).tolist()
        [0.0, 1.0, 2.0]
    """
    op = "sparse_matmul"
    if (weight is None) == (weight_data is None):
        raise TypeError(f"{op}: weight and weight_data are two names of one array; pass one.")
    weight = weight if weight_data is None else weight_data
    structure = structure_of(sparse_mat)
    x_, w = operand(op, "x", x), hooked(op, "weight", weight, "weight_fn", weight_fn)
    if w.shape in ((), (1,)):
        w = Operand(w.label, jnp.broadcast_to(w.value, (structure.size,)), w.unit)
    _check_shapes(x_, w, structure)
    unit = x_.unit * w.unit
    b = bias_operand(op, bias, unit, bias_fn, structure.shape[1:])
    primitive = etp_sp_mv if x_.ndim == 1 else etp_sp_mm
    return bind(primitive, x_, w, bias=b, unit=unit, structure=structure)


def _check_shapes(x: Operand, w: Operand, structure: Structure) -> None:
    why = "the input is (in,) or (batch, in), so that every trace has its batch."
    expect_axes("sparse_matmul", x, (1, 2), why=why, do="reshape the leading axes into one.")
    if x.shape[-1] != structure.shape[0]:
        raise value_error(
            f"sparse_matmul: {x} does not fit sparse_mat {structure.shape}.",
            why=f"the last axis of x, {x.shape[-1]}, meets the rows of the matrix, "
            f"{structure.shape[0]}.",
            do="make these two sizes equal, or transpose the matrix.",
        )
    if w.shape != (structure.size,):
        raise value_error(
            f"sparse_matmul: {w} does not have the shape ({structure.size},).",
            why=f"sparse_mat stores {structure.size} values.",
            do="give one weight per stored value, in the order of sparse_mat.data.",
        )
