"""Low-rank layers: `y = alpha x @ B @ A + b`, which are dense layers in the effective B @ A."""

from __future__ import annotations

from functools import partial

import numpy as np
from jax import Array

from .._errors import value_error
from ._contraction import with_bias_features
from ._operator import ETPPrimitive, Rules, Shapes, Weights
from ._products import check_product
from ._twin import twins
from ._units import AnyArray, Hook, Operand, UnitArray, bias_operand, bind, hooked, operand


def _effective(weights: Weights, *, alpha: complex = 1.0) -> Weights:
    bias = {k: w for k, w in weights.items() if k == "bias"}
    return {"weight": alpha * (weights["lora_b"] @ weights["lora_a"]), **bias}


def _product(x, lora_b, lora_a, bias=None, *, alpha=1.0):
    y = alpha * (x @ lora_b @ lora_a)
    return y if bias is None else y + bias


def _linear(x: Array, weights: Weights, **static: object) -> Array:
    return x @ weights["weight"] + weights.get("bias", 0)


def _features(x: Array, shapes: Shapes, **static: object) -> Weights:
    return with_bias_features(x[..., None], shapes)


_RULES = Rules(effective=_effective, linear=_linear, features=_features)
_primitive = partial(
    ETPPrimitive, function=_product, weights=("lora_b", "lora_a", "bias"), rules=_RULES
)
etp_lora_mm, etp_lora_mv = twins(_primitive("etp_lora_mm"), _primitive("etp_lora_mv"))


def lora_matmul(
    x: AnyArray,
    B: AnyArray,
    A: AnyArray,
    *,
    alpha: AnyArray = 1.0,
    bias: AnyArray | None = None,
    b_fn: Hook = None,
    a_fn: Hook = None,
    bias_fn: Hook = None,
) -> UnitArray:
    """Multiply by a trained matrix of low rank: `alpha * x @ b_fn(B) @ a_fn(A) + bias_fn(bias)`.

    Args:
        x: input of shape (in,) or (batch, in).
        B: factor that faces the input, (in, rank).
        A: factor that faces the output, (rank, out).
        alpha: scale of the product.
        bias: optional vector of shape (out,), in the unit of the product.
        b_fn: differentiable function of B without its unit.
        a_fn: the same for A.
        bias_fn: the same for the bias.

    Returns:
        The product, of shape (out,) or (batch, out).

    Raises:
        ValueError: if the shapes do not fit.
        saiunit.UnitMismatchError: if the bias has another unit than the product.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.lora_matmul(jnp.ones((2, 8)), jnp.ones((8, 1)), jnp.ones((1, 4))).shape
        (2, 4)
    """
    op = "lora_matmul"
    x_ = operand(op, "x", x)
    b, a = hooked(op, "B", B, "b_fn", b_fn), hooked(op, "A", A, "a_fn", a_fn)
    if isinstance(alpha, np.number):
        alpha = alpha.item()
    if not isinstance(alpha, (int, float, complex)):
        # A scale that is itself computed, or has a unit, belongs to the factor.
        scale, alpha = operand(op, "alpha", alpha), 1.0
        b = Operand(b.label, b.value * scale.value, b.unit * scale.unit)
    check_product(op, x_, b)
    if a.ndim != 2 or a.shape[0] != b.shape[1]:
        raise value_error(
            f"{op}: {b} does not fit {a}.",
            why="the factors are (in, rank) and (rank, out).",
            do="give both the same rank.",
        )
    unit = x_.unit * b.unit * a.unit
    c = bias_operand(op, bias, unit, bias_fn, a.shape[1:])
    primitive = etp_lora_mv if x_.ndim == 1 else etp_lora_mm
    return bind(primitive, x_, b, a, bias=c, unit=unit, alpha=alpha)
