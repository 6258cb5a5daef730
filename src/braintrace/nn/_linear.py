"""The dense layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u
from brainstate.nn import init

from .._errors import message
from ..ops import matmul

Size = int | Sequence[int]
Init = Callable[..., Any] | Any

_KAIMING = init.KaimingNormal()
_ZERO = init.ZeroInit()


def initial(value: Init, shape: tuple[int, ...]) -> Any:
    """An initialiser's array of this shape, or a given value broadcast to it."""
    value = u.math.asarray(init.param(value, shape, allow_none=False))
    # The dtype of a Python number is weak until an update makes it strong: a second compilation.
    strong = jax.tree.map(lambda a: jnp.asarray(a, a.dtype), value)
    return u.math.broadcast_to(strong, shape)


def batched(value: Init, shape: tuple[int, ...], batch_size: int | None) -> Any:
    """The initial value of a state, with a leading batch axis if there is one."""
    return initial(value, shape if batch_size is None else (batch_size, *shape))


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
        ValueError: if the leading sizes of input and output differ.

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
        if self.in_size[:-1] != self.out_size[:-1]:
            raise ValueError(
                message(
                    f"Linear: in_size {self.in_size} does not fit out_size {self.out_size}.",
                    why="the layer acts on the last axis and keeps the axes before it.",
                    do="make the sizes before the last one equal.",
                )
            )
        shape = (self.in_size[-1], self.out_size[-1])
        self.w_mask = None if w_mask is None else initial(w_mask, shape)
        params = {"weight": initial(w_init, shape)}
        if b_init is not None:
            params["bias"] = initial(b_init, shape[1:])
        self.weight = param_type(params)

    def update(self, x: Any) -> Any:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        params = self.weight.value
        folded = x.reshape((-1, x.shape[-1])) if jnp.ndim(x) > 2 else x
        mask = None if self.w_mask is None else self._mask
        y = matmul(folded, params["weight"], params.get("bias"), weight_fn=mask)
        return y.reshape((*x.shape[:-1], y.shape[-1])) if jnp.ndim(x) > 2 else y

    def _mask(self, weight: Any) -> Any:
        return weight * self.w_mask
