"""The dense layer whose weights keep their signs."""

from __future__ import annotations

from typing import Any

import brainstate
import jax.numpy as jnp
from brainstate.nn import init

from ..ops import matmul
from ._shapes import Init, Size, check_leading, constant, initial, over_leading

_KAIMING = init.KaimingNormal()


class SignedWLinear(brainstate.nn.Module):
    """A dense layer with weights of fixed sign, `y = x @ (|W| * sign)`, for Dale's law.

    Signs of shape (in, 1) make each input excitatory or inhibitory. A weight that is exactly zero
    gets no gradient, so do not start with zeros.

    Args:
        in_size: size of the input; of a tuple, the last number counts.
        out_size: size of the output; of a tuple, the last number counts.
        w_init: initialiser of the weight, or its value; its signs do not matter.
        w_sign: array or initialiser that broadcasts to (in, out); None: all are positive.
        name: name of the layer.
        param_type: class of the parameter state.

    Attributes:
        weight: the parameter state, a matrix.

    Raises:
        ValueError: if the leading sizes of input and output differ, or a value has another shape.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> sign = jnp.array([[1.0], [-1.0]])
        >>> layer = braintrace.nn.SignedWLinear(2, 3, w_init=-0.5, w_sign=sign)
        >>> layer(jnp.array([1.0, 3.0])).tolist()
        [-1.0, -1.0, -1.0]
    """

    __module__ = "braintrace.nn"

    in_size: Any
    out_size: Any

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = _KAIMING,
        w_sign: Init | None = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        check_leading("SignedWLinear", self.in_size, self.out_size)
        shape = (self.in_size[-1], self.out_size[-1])
        self.w_sign = None if w_sign is None else constant(w_sign, shape, "SignedWLinear: w_sign")
        self.weight = param_type(initial(w_init, shape, "SignedWLinear: w_init"))

    def update(self, x: Any) -> Any:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        weight = self.weight.value
        return over_leading(lambda x: matmul(x, weight, weight_fn=self._signed), x, axes=1)

    def _signed(self, weight: Any) -> Any:
        return jnp.abs(weight) if self.w_sign is None else jnp.abs(weight) * self.w_sign
