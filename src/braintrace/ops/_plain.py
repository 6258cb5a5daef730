"""Operators for what JAX itself writes: products, convolutions and look-ups of a trained operand.

They compute what the primitive of that name computes, with its precision and result type; their
operands are (input, weight) or (input, weight, bias), whichever side the weight was on.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..program import Atom, Equation
from ._conv import _features
from ._einsum_form import EinsumForm, biased_rules, weight_and_bias
from ._embedding import row_rules
from ._matmul import etp_mm, etp_mv
from ._operator import ETPPrimitive, Params, Rules, Shape, Shapes, Weights, register_primitive

# ---------------------------------------------------------------------------------- products


def _dot(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    equation: str,
    dimension_numbers: Any,
    weight_first: bool,
    order: tuple[int, ...],
    has_bias: bool = False,
    **how: Any,
) -> Array:
    pair = (weight, x) if weight_first else (x, weight)
    y = jnp.transpose(lax.dot_general(*pair, dimension_numbers, **how), order)
    return y if bias is None else y + bias


def _form_rules() -> Rules:
    """The rules of a contraction, whose letters are a static parameter."""
    of = lambda equation: biased_rules(EinsumForm.parse(equation))

    def named(name: str) -> Any:
        def rule(*args: Any, equation: str, **static: Any) -> Any:
            return getattr(of(equation), name)(*args)

        return rule

    return Rules(**{name: named(name) for name in ("features", "pull", "part", "of_part")})


plain_dot = register_primitive(
    "unmarked_dot_general", _dot, trainable_invars_fn=weight_and_bias, rules=_form_rules()
)


def dot_operator(
    params: Mapping[str, Any], left: Atom, right: Atom, weight_first: bool, out: Atom
) -> tuple[ETPPrimitive, Params]:
    """The operator for a `dot_general` of two operands, and its static parameters."""
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    letters = iter(string.ascii_lowercase + string.ascii_uppercase)
    l: list[str] = [""] * len(left.shape)
    r: list[str] = [""] * len(right.shape)
    for a, b in zip((*lb, *lc), (*rb, *rc), strict=True):
        l[a] = r[b] = next(letters)
    l, r = ([c or next(letters) for c in side] for side in (l, r))
    shared = {*(l[i] for i in (*lb, *lc))}
    y = [l[i] for i in lb] + [c for c in (*l, *r) if c not in shared]
    x, w = (r, l) if weight_first else (l, r)
    form = EinsumForm("".join(x), "".join(w), "".join(y))
    how = {k: v for k, v in params.items() if k != "dimension_numbers" and v is not None}
    same = how.get("preferred_element_type") in (None, jnp.result_type(left.dtype, right.dtype))
    if same and set(how) <= {"preferred_element_type"} and left.dtype == right.dtype == out.dtype:
        lines = {(1, ((0,), (0,))): etp_mv, (2, ((1,), (0,))): etp_mm}
        key = (len(left.shape), (tuple(lc), tuple(rc)))
        if not weight_first and not lb and len(right.shape) == 2 and key in lines:
            return lines[key], {}
    static = {
        "equation": f"{form.x},{form.w}->{form.y}",
        "dimension_numbers": ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb))),
        "weight_first": weight_first,
        "order": tuple(range(len(y))),
        **how,
    }
    return plain_dot, static


def transposed(params: Mapping[str, Any], permutation: Sequence[int]) -> Params:
    """The static parameters of a product whose result is transposed."""
    inputs, y = params["equation"].split("->")
    order = tuple(params["order"][i] for i in permutation)
    return {**params, "order": order, "equation": f"{inputs}->{''.join(y[i] for i in permutation)}"}


def takes_bias(eqn: Equation, bias: Atom) -> bool:
    """Whether an equation is a product that may have this bias, on the last axes of the result."""
    if eqn.primitive not in (etp_mm, etp_mv, plain_dot) or eqn.params.get("has_bias"):
        return False
    y, n = eqn.outputs[0], len(bias.shape)
    if eqn.primitive is etp_mm and n != 1:  # samples of its batch have no bias of their own
        return False
    return n > 0 and y.shape[len(y.shape) - n :] == bias.shape and bias.dtype == y.dtype


# ------------------------------------------------------------------------------- convolutions


def _conv_features(x: Array, shapes: Shapes, **params: Any) -> Weights | None:
    dropped = ("precision", "preferred_element_type")
    return _features(x, shapes, **{k: v for k, v in params.items() if k not in dropped})


plain_conv = register_primitive(
    "unmarked_conv", lax.conv_general_dilated, batched=True, rules=Rules(features=_conv_features)
)


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


plain_rows = register_primitive("unmarked_rows", _gather, rules=row_rules(_gather, _one_hot))
# Its input is an index, and no array stands for it in which the result is linear.
plain_gather = register_primitive(
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
