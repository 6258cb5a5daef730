"""The dense layer with standardised weights."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u
from brainstate.nn import init

from ..ops import matmul
from ._shapes import Init, Size, check_leading, constant, initial, over_leading

_KAIMING = init.KaimingNormal()
_ZERO = init.ZeroInit()


class ScaledWSLinear(brainstate.nn.Module):
    """A dense layer with standardised weights, `y = x @ (standard(W) * mask * gain) + b`.

    `standard(W) = (W - mean) / sqrt(max(var * in, eps))`, with mean and variance over the inputs
    of each output. Weight, gain and bias are all trained online: their product is the operand. Of
    a weight with a unit, the numbers are standardised and the unit is kept.

    Args:
        in_size: size of the input; of a tuple, the last number counts.
        out_size: size of the output; of a tuple, the last number counts.
        w_init: initialiser of the weight, or its value.
        b_init: initialiser of the bias, or its value; None for no bias.
        w_mask: array or initialiser that broadcasts to (in, out).
        ws_gain: whether there is a trained gain for each output, ones at first.
        eps: the least variance to divide by.
        name: name of the layer.
        param_type: class of the parameter state.

    Attributes:
        weight: the parameter state, a dictionary with `weight` and perhaps `bias` and `gain`.

    Raises:
        ValueError: if the leading sizes of input and output differ, or a value has another shape.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> layer = braintrace.nn.ScaledWSLinear(3, 4)
        >>> layer(jnp.ones((2, 3))).shape, sorted(layer.weight.value)
        ((2, 4), ['bias', 'gain', 'weight'])
    """

    __module__ = "braintrace.nn"

    in_size: Any
    out_size: Any

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = _KAIMING,
        b_init: Init | None = _ZERO,
        w_mask: Init | None = None,
        ws_gain: bool = True,
        eps: float = 1e-4,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        check_leading("ScaledWSLinear", self.in_size, self.out_size)
        shape = (self.in_size[-1], self.out_size[-1])
        label = "ScaledWSLinear: w_mask"
        self.w_mask = None if w_mask is None else constant(w_mask, shape, label)
        self.eps = eps
        params = {"weight": initial(w_init, shape, "ScaledWSLinear: w_init")}
        if b_init is not None:
            params["bias"] = initial(b_init, shape[1:], "ScaledWSLinear: b_init")
        if ws_gain:
            params["gain"] = jnp.ones((1, shape[1]), params["weight"].dtype)
        self.weight = param_type(params)

    def update(self, x: Any) -> Any:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        params = self.weight.value
        weight, bias = self._operand(params), params.get("bias")
        return over_leading(lambda x: matmul(x, weight, bias), x, axes=1)

    def _operand(self, params: dict[str, Any]) -> Any:
        numbers, unit = u.split_mantissa_unit(params["weight"])
        weight = _standard(numbers, self.eps)
        if self.w_mask is not None:
            weight = weight * self.w_mask
        if "gain" in params:
            weight = weight * params["gain"]
        return weight if unit == u.UNITLESS else u.Quantity(weight, unit=unit)


def _standard(weight: jax.Array, eps: float) -> jax.Array:
    variance = jnp.var(weight, axis=0, keepdims=True) * weight.shape[0]
    centred = weight - jnp.mean(weight, axis=0, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.maximum(variance, eps))
