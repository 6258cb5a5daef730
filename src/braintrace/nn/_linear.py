"""The dense layer."""

from __future__ import annotations

from typing import Any

import brainstate
from brainstate.nn import init

from ..ops import matmul
from ._shapes import Init, Size, check_leading, constant, initial, over_leading

_KAIMING = init.KaimingNormal()
_ZERO = init.ZeroInit()


class Linear(brainstate.nn.Module):
    """A dense layer `y = x @ (W * mask) + b`, trained online.

    Args:
        in_size: size of the input; of a tuple, the last number counts.
        out_size: size of the output; of a tuple, the last number counts.
        w_init: initialiser of the weight, or its value.
        b_init: initialiser of the bias, or its value; None for no bias.
        w_mask: array or initialiser of shape (in, out) that multiplies the weight.
        name: name of the layer.
        param_type: class of the parameter state.

    Attributes:
        weight: the one parameter state, a dictionary with `weight` and perhaps `bias`.

    Raises:
        ValueError: if the leading sizes of input and output differ, or a value has another shape.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.nn.Linear(3, 4)(jnp.ones((2, 3))).shape
        (2, 4)
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
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        check_leading("Linear", self.in_size, self.out_size)
        shape = (self.in_size[-1], self.out_size[-1])
        self.w_mask = None if w_mask is None else constant(w_mask, shape, "Linear: w_mask")
        params = {"weight": initial(w_init, shape, "Linear: w_init")}
        if b_init is not None:
            params["bias"] = initial(b_init, shape[1:], "Linear: b_init")
        self.weight = param_type(params)

    def update(self, x: Any) -> Any:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        return over_leading(self._apply, x, axes=1)

    def _apply(self, x: Any) -> Any:
        params = self.weight.value
        mask = None if self.w_mask is None else self._mask
        return matmul(x, params["weight"], params.get("bias"), weight_fn=mask)

    def _mask(self, weight: Any) -> Any:
        return weight * self.w_mask
