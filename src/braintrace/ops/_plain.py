"""Operators for what JAX itself writes: products, convolutions and look-ups of a trained operand.

They compute what the primitive of that name computes, with its precision and result type; their
operands are (input, weight) or (input, weight, bias), whichever side the weight was on.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..program import Atom, Equation
from ._contraction import Contraction, etp_mm, etp_mv, plain_dot
from ._embedding import row_rules
from ._operator import ETPPrimitive, Params, Rules, Shape

# ---------------------------------------------------------------------------------- products


_PLAIN = {"ab,bc->ac": (etp_mm, "bi,io->bo"), "a,ab->b": (etp_mv, "i,io->o")}


def dot_operator(
    params: Mapping[str, Any], left: Atom, right: Atom, weight_first: bool
) -> tuple[ETPPrimitive, Params, tuple[int, ...]]:
    """The operator for a `dot_general`, its static parameters, and the order of its axes in that.

    The axes of x come first in y: `W @ x` mapped over samples, of shape (out, samples), is the
    product "ab,cb->ac", of shape (samples, out), and then a transposition, (1, 0).
    """
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    if weight_first:
        left, right, lc, rc, lb, rb = right, left, rc, lc, rb, lb
    letters = iter(string.ascii_lowercase)
    x = [next(letters) for _ in left.shape]
    same = dict(zip((*rb, *rc), (*lb, *lc), strict=True))
    w = [x[same[i]] if i in same else next(letters) for i in range(len(right.shape))]
    batch = [x[i] for i in lb]
    free_x, free_w = ([a for a in side if not (a in x and a in w)] for side in (x, w))
    order = [*batch, *(free_w + free_x if weight_first else free_x + free_w)]
    y = [*batch, *free_x, *free_w]
    equation = str(Contraction(*map("".join, (x, w, y))))
    how = {k: v for k, v in params.items() if k != "dimension_numbers" and v is not None}
    own = jnp.result_type(left.dtype, right.dtype)
    how = {k: v for k, v in how.items() if k != "preferred_element_type" or v != own}
    primitive, equation = _PLAIN.get(equation, (plain_dot, equation))
    return primitive, {"equation": equation, **how}, tuple(map(y.index, order))


def with_bias(eqn: Equation, bias: Atom) -> Params | None:
    """The static parameters of a product with this bias on its last axes, if it may have that.

    Samples have no bias of their own: its axes are axes of the weight.
    """
    y, n = eqn.outputs[0], len(bias.shape)
    if eqn.primitive not in (etp_mm, etp_mv, plain_dot) or not 0 < n <= len(y.shape):
        return None
    form = Contraction.parse(eqn.params["equation"])
    last = form.y[len(y.shape) - n :]
    fits = y.shape[len(y.shape) - n :] == bias.shape and bias.dtype == y.dtype
    if form.bias is not None or not fits or not {*last} <= {*form.w}:
        return None
    return {**eqn.params, "equation": str(replace(form, bias=last))}


# ------------------------------------------------------------------------------- convolutions


def conv_static(params: Mapping[str, Any]) -> Params:
    """The static parameters of the operator for a `conv_general_dilated`."""
    return {k: v for k, v in params.items() if k not in ("lhs_shape", "rhs_shape", "out_sharding")}


# ----------------------------------------------------------------------------------- look-ups


def _gather(x: Array, weight: Array, **params: Any) -> Array:
    return lax.gather(weight, x, **params)


def _one_hot(x: Array, table: Shape, mode: Any = None, **static: object) -> Array:
    """Indices as one-hot rows; one outside of the table is none, or the nearest if clipped."""
    index = x[..., 0]
    if lax.GatherScatterMode.from_any(mode) == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, table.shape[0] - 1)
    return jax.nn.one_hot(index, table.shape[0], dtype=table.dtype)


plain_rows = ETPPrimitive("unmarked_rows", _gather, rules=row_rules(_gather, _one_hot))
# Its input is an index, and no array stands for it in which the result is linear.
plain_gather = ETPPrimitive(
    "unmarked_gather", _gather, rules=Rules(represent=lambda x, shapes, **static: None)
)


def gather_operator(
    params: Mapping[str, Any], table: Atom, indices: Atom
) -> tuple[ETPPrimitive, Params]:
    """The operator for a `gather` from a trained array: rows of a table, or anything else."""
    dims, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    rank, axes = len(indices.shape) - 1, len(table.shape)
    rows = (
        axes >= 2
        and tuple(dims.start_index_map) == (0,)
        and tuple(dims.collapsed_slice_dims) == (0,)
        and tuple(dims.offset_dims) == tuple(range(rank, rank + axes - 1))
        and not dims.operand_batching_dims
        and sizes == (1, *table.shape[1:])
        and np.ndim(params.get("fill_value") or 0) == 0
    )
    static = {k: v for k, v in params.items() if k != "out_sharding"}
    return (plain_rows if rows else plain_gather), static
