"""Sparse layers: `y = x @ S(w) + b`, with one trained number per non-zero of a fixed structure."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._errors import value_error
from ._einsum_form import weight_and_bias, with_bias_features
from ._operator import ETPPrimitive, Rules, Shapes, Weights, register_primitive
from ._structure import Structure, structure_of
from ._twin import twins
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


def _presynaptic(x: Array, structure: Structure) -> Array:
    # The input at every non-zero, which come first; 0 at entries that only pad the data vector.
    return jnp.moveaxis(x, -1, 0).at[structure.rows].get(mode="fill", fill_value=0)


def _multiply(
    x: Array, weight: Array, bias: Array | None = None, *, structure: Structure, **static: object
) -> Array:
    # Non-zeros first, so that gather and scatter move whole rows of the batch.
    weight = weight.reshape(weight.shape + (1,) * (x.ndim - 1))
    products = _presynaptic(x, structure) * weight
    out = jnp.zeros((structure.shape[1], *x.shape[:-1]), products.dtype)
    y = jnp.moveaxis(out.at[structure.cols].add(products, mode="promise_in_bounds"), 0, -1)
    return y if bias is None else y + bias


def _features(x: Array, shapes: Shapes, *, structure: Structure, **static: object) -> Weights:
    return with_bias_features(jnp.moveaxis(_presynaptic(x, structure), 0, -1), shapes)


def _gathered() -> int:
    # Numbers gathered at a time: on a CPU they stay in its cache, elsewhere they fill the device.
    return 2**18 if jax.default_backend() == "cpu" else 2**24


def _sampled(x: Array, v: Array, structure: Structure) -> Array:
    """Per non-zero, x of its row times v of its column, summed over the steps.

    x is (in, steps, *batch), v (out, steps, *lanes, *batch, slots), both with their units first, so
    that a non-zero gathers whole rows; the result is (non-zeros, *lanes, *batch, slots). A chunk of
    non-zeros at a time: rows of all of them would be as large as the trace times the steps.
    """
    lanes = v.ndim - x.ndim - 1
    axes = [0, 1, *range(2 + lanes, v.ndim - 1)]

    def chunk(where: tuple[Array, Array]) -> Array:
        rows, cols = where
        here = x.at[rows].get(mode="fill", fill_value=0)
        return jnp.einsum(here, axes, v[cols], [*range(v.ndim)], [0, *range(2, v.ndim)])

    size = max(1, _gathered() // max(1, prod(v.shape[1:])))
    rows, cols = structure.rows, structure.cols
    if size >= len(rows):
        return chunk((jnp.asarray(rows), jnp.asarray(cols)))
    padding = -len(rows) % size
    rows = np.pad(rows, (0, padding), constant_values=structure.shape[0]).reshape(-1, size)
    cols = np.pad(cols, (0, padding)).reshape(-1, size)
    out = jax.lax.map(chunk, (jnp.asarray(rows), jnp.asarray(cols)))
    return out.reshape(-1, *out.shape[2:])[: structure.size]


def _sum_steps(
    key: str, x: Array, values: Array, *, structure: Structure, **static: object
) -> Array | None:
    if key != "weight" or jnp.iscomplexobj(x) or jnp.iscomplexobj(values):
        return None
    out = _sampled(jnp.moveaxis(x, -1, 0), jnp.moveaxis(values, -2, 0), structure)
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
        return jnp.take(values, structure.cols, axis=lead + rank - 1)

    return register_primitive(
        name,
        _multiply,
        batched=rank == 2,
        trainable_invars_fn=weight_and_bias,
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
