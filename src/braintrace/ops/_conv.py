"""Convolutions, with their kernel positions as features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._errors import value_error
from ._contraction import with_bias_features
from ._operator import ETPPrimitive, Params, Rules, Shapes, Weights
from ._twin import folds
from ._units import AnyArray, Hook, Operand, UnitArray, bias_operand, bind, hooked, operand


def _convolve(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    **window: Any,
) -> Array:
    dtype = jnp.result_type(x, weight)
    y = lax.conv_general_dilated(
        x.astype(dtype), weight.astype(dtype), dimension_numbers=dimension_numbers, **window
    )
    if bias is None:
        return y
    if bias.ndim == 1:
        bias = lax.broadcast_in_dim(bias, y.shape, (dimension_numbers.out_spec[1],))
    return y + bias


def _features(
    x: Array,
    shapes: Shapes,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    batch_group_count: int = 1,
    feature_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    **window: Any,
) -> Weights | None:
    # y[b, o, s] = Σ_{c, k} patch[b, group(o) c, k, s] w[o, c, k]: the features are the patches.
    if batch_group_count != 1:
        return None
    dims, kernel = dimension_numbers, shapes["weight"].shape
    out, in_, *at = dims.rhs_spec
    sizes = [kernel[a] for a in at]
    patches = lax.conv_general_dilated_patches(
        jnp.transpose(x, dims.lhs_spec),
        sizes,
        precision=lax.Precision.HIGHEST,  # a copy: it must not round
        **window,
    )
    n, space = len(sizes), patches.shape[2:]
    groups = feature_group_count
    patches = patches.reshape((x.shape[dims.lhs_spec[0]], groups, kernel[in_], *sizes, *space))
    if groups > 1:
        patches = jnp.repeat(patches, kernel[out] // groups, axis=1)
    # The axes of `patches`: batch, out, in, kernel positions, output positions.
    source = {out: 1, in_: 2, **{a: 3 + i for i, a in enumerate(at)}}
    place = {dims.out_spec[0]: 0, **{a: 3 + n + i for i, a in enumerate(dims.out_spec[2:])}}
    order = [place[a] for a in sorted(place)] + [source[a] for a in range(len(kernel))]
    return with_bias_features(jnp.transpose(patches, order), shapes)


def _batch_axes(operands: Sequence[Array], params: Params) -> tuple[int, int] | None:
    # Batch groups, and a bias that differs along the batch, fix what the batch axis means.
    dims = params["dimension_numbers"]
    if len(operands) > 2 and operands[2].ndim > 1:
        at = operands[2].ndim - len(dims.out_spec) + dims.out_spec[0]
        if at >= 0 and operands[2].shape[at] != 1:
            return None
    if params.get("batch_group_count", 1) != 1:
        return None
    return dims.lhs_spec[0], dims.out_spec[0]


_primitive = partial(
    ETPPrimitive,
    function=_convolve,
    weights=("weight", "bias"),
    rules=Rules(features=_features),
)
etp_conv, plain_conv = _primitive("etp_conv"), _primitive("unmarked_conv")
etp_conv.twin = folds(etp_conv, _batch_axes)


def conv(
    x: AnyArray,
    kernel: AnyArray,
    bias: AnyArray | None = None,
    *,
    strides: int | Sequence[int] = (1,),
    padding: str | Sequence[tuple[int, int]] = "SAME",
    lhs_dilation: int | Sequence[int] | None = None,
    rhs_dilation: int | Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: Any = None,
    kernel_fn: Hook = None,
    bias_fn: Hook = None,
) -> UnitArray:
    """Convolve a batch with a trained kernel, as `jax.lax.conv_general_dilated`.

    Args:
        x: batched input; (batch, channels, *space) unless `dimension_numbers` says otherwise.
        kernel: trained kernel; (out, in, *space) by default.
        bias: optional; a vector goes to the output channels, more axes broadcast as they are.
        strides: step of the window; one number serves all axes.
        padding: 'SAME', 'VALID', or (low, high) for every axis.
        lhs_dilation: dilation of the input.
        rhs_dilation: dilation of the kernel.
        feature_group_count: number of groups of channels.
        batch_group_count: number of groups of the batch.
        dimension_numbers: order of the axes, as in `jax.lax`.
        kernel_fn: differentiable function of the kernel without its unit.
        bias_fn: the same for the bias.

    Returns:
        The convolution, in the product of the two units.

    Raises:
        ValueError: if the shapes do not fit.
        saiunit.UnitMismatchError: if the bias has another unit than the product.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.conv(jnp.ones((2, 3, 8)), jnp.ones((4, 3, 5))).shape
        (2, 4, 8)
    """
    op = "conv"
    x_, k = operand(op, "x", x), hooked(op, "kernel", kernel, "kernel_fn", kernel_fn)
    n = x_.ndim - 2
    if n < 1 or k.ndim != x_.ndim:
        raise value_error(
            f"{op}: {x_} does not fit {k}.",
            why="the input has a batch axis, a channel axis and at least one axis of space; "
            "the kernel has as many axes.",
            do="add a batch axis of size 1 with x[None], or a missing kernel axis.",
        )
    dims = lax.conv_dimension_numbers(x_.shape, k.shape, dimension_numbers)
    _check_channels(x_, k, dims, feature_group_count)
    static: dict[str, Any] = dict(
        window_strides=per_axis(op, "strides", strides, n),
        padding=padding
        if isinstance(padding, str)
        else tuple((int(a), int(b)) for a, b in padding),
        lhs_dilation=per_axis(op, "lhs_dilation", lhs_dilation, n),
        rhs_dilation=per_axis(op, "rhs_dilation", rhs_dilation, n),
        feature_group_count=int(feature_group_count),
        batch_group_count=int(batch_group_count),
        dimension_numbers=dims,
    )
    unit = x_.unit * k.unit
    b = bias_operand(op, bias, unit, bias_fn)
    if b is not None:
        y = jax.eval_shape(lambda *args: _convolve(*args, **static), x_.value, k.value)
        _check_bias(b, y.shape, dims.out_spec[1])
    return bind(etp_conv, x_, k, bias=b, unit=unit, **static)


def per_axis(owner: str, name: str, value: int | Sequence[int] | None, n: int) -> tuple[int, ...]:
    """One positive number per axis of space, by default 1."""
    sizes = np.atleast_1d(1 if value is None else value)
    whole = sizes.ndim == 1 and np.issubdtype(sizes.dtype, np.integer)
    if not whole or len(sizes) not in (1, n) or np.any(sizes < 1):
        raise value_error(
            f"{owner}: {name} is {value!r}.",
            why=f"there are {n} axes of space." if n > 1 else "there is one axis of space.",
            do=f"give one positive integer, or {n}." if n > 1 else "give a positive integer.",
        )
    return tuple(int(a) for a in np.broadcast_to(sizes, (n,)))


def _check_channels(x: Operand, k: Operand, dims: lax.ConvDimensionNumbers, groups: int) -> None:
    have, want = x.shape[dims.lhs_spec[1]], k.shape[dims.rhs_spec[1]] * groups
    if have != want:
        raise value_error(
            f"conv: {x} does not fit {k}.",
            why=f"the input has {have} channels, the kernel reads {want} "
            f"(feature_group_count={groups}).",
            do="make the channels agree; dimension_numbers says which axis they are.",
        )


def _check_bias(bias: Operand, y: tuple[int, ...], channel: int) -> None:
    shape = bias.shape
    if bias.ndim == 1:
        fits, do = shape == (y[channel],), f"give it the shape ({y[channel]},)."
    else:
        pairs = zip(shape[::-1], y[::-1], strict=False)
        fits = bias.ndim <= len(y) and all(a in (1, b) for a, b in pairs)
        do = f"give it a shape that broadcasts to {y}."
    if not fits:
        raise value_error(
            f"conv: {bias} does not fit the output {y}.",
            why="a vector is added along the output channels, more axes as they are.",
            do=do,
        )
