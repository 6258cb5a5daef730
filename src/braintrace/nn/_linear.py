"""Dense layers: plain, with weights of fixed sign, with standardised weights, one per group."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import value_error
from ..ops import grouped_matmul, matmul
from ._shapes import KAIMING, ZERO, Init, Layer, Size, UnitArray, constant, initial, over_leading


class _Dense(Layer):
    """A layer with one matrix, of shape `_shape`, for the last axis of its input."""

    def __init__(self, in_size: Size, out_size: Size, name: str | None):
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        if self.in_size[:-1] != self.out_size[:-1]:
            raise value_error(
                f"{self._kind}: in_size {self.in_size} does not fit out_size {self.out_size}.",
                why="the layer acts on the last axis and keeps the axes before it.",
                do="make the sizes before the last one equal.",
            )
        self._shape = (self.in_size[-1], self.out_size[-1])

    def _initial(self, w_init: Init, b_init: Init | None) -> dict[str, UnitArray]:
        params = {"weight": initial(w_init, self._shape, f"{self._kind}: w_init")}
        if b_init is not None:
            params["bias"] = initial(b_init, self._shape[1:], f"{self._kind}: b_init")
        return params

    def _factor(self, name: str, value: Init | None) -> UnitArray | None:
        """An array that multiplies the weight, if there is one."""
        return None if value is None else constant(value, self._shape, f"{self._kind}: {name}")


class Linear(_Dense):
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

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = KAIMING,
        b_init: Init | None = ZERO,
        w_mask: Init | None = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(in_size, out_size, name)
        self.w_mask = self._factor("w_mask", w_mask)
        self.weight = param_type(self._initial(w_init, b_init))

    def update(self, x: UnitArray) -> UnitArray:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        weight, bias = self.weight.value["weight"], self.weight.value.get("bias")
        mask = None if self.w_mask is None else lambda weight: weight * self.w_mask
        return over_leading(lambda x: matmul(x, weight, bias, weight_fn=mask), x, axes=1)


class SignedWLinear(_Dense):
    """A dense layer with weights of fixed sign, `y = x @ (|W| * sign)`, for Dale's law.

    Signs of shape (in, 1) make each input excitatory or inhibitory. A weight that is exactly zero
    gets no gradient, so do not start with zeros. Other arguments are those of `Linear`.

    Args:
        w_init: initialiser of the weight, or its value; its signs do not matter.
        w_sign: array or initialiser that broadcasts to (in, out); None: all are positive.

    Attributes:
        weight: the parameter state, a matrix.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> sign = jnp.array([[1.0], [-1.0]])
        >>> layer = braintrace.nn.SignedWLinear(2, 3, w_init=-0.5, w_sign=sign)
        >>> layer(jnp.array([1.0, 3.0])).tolist()
        [-1.0, -1.0, -1.0]
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = KAIMING,
        w_sign: Init | None = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(in_size, out_size, name)
        self.w_sign = self._factor("w_sign", w_sign)
        self.weight = param_type(self._initial(w_init, None)["weight"])

    def update(self, x: UnitArray) -> UnitArray:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        weight = self.weight.value
        return over_leading(lambda x: matmul(x, weight, weight_fn=self._signed), x, axes=1)

    def _signed(self, weight: jax.Array) -> jax.Array:
        return jnp.abs(weight) if self.w_sign is None else jnp.abs(weight) * self.w_sign


class ScaledWSLinear(_Dense):
    """A dense layer with standardised weights, `y = x @ (standard(W) * mask * gain) + b`.

    `standard(W) = (W - mean) / sqrt(max(var * in, eps))`, with mean and variance over the inputs
    of each output. Weight, gain and bias are all trained online: their product is the operand. Of
    a weight with a unit, the numbers are standardised and the unit stays. Other arguments are those
    of `Linear`.

    Args:
        w_mask: array or initialiser that broadcasts to (in, out).
        ws_gain: whether there is a trained gain for each output, ones at first.
        eps: the least variance to divide by.

    Attributes:
        weight: the parameter state, a dictionary with `weight` and perhaps `bias` and `gain`.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> layer = braintrace.nn.ScaledWSLinear(3, 4)
        >>> layer(jnp.ones((2, 3))).shape, sorted(layer.weight.value)
        ((2, 4), ['bias', 'gain', 'weight'])
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = KAIMING,
        b_init: Init | None = ZERO,
        w_mask: Init | None = None,
        ws_gain: bool = True,
        eps: float = 1e-4,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(in_size, out_size, name)
        self.w_mask, self.eps = self._factor("w_mask", w_mask), eps
        params = self._initial(w_init, b_init)
        if ws_gain:
            params["gain"] = jnp.ones((1, self._shape[1]), params["weight"].dtype)
        self.weight = param_type(params)

    def update(self, x: UnitArray) -> UnitArray:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        params = self.weight.value
        weight, bias = self._operand(params), params.get("bias")
        return over_leading(lambda x: matmul(x, weight, bias), x, axes=1)

    def _operand(self, params: dict[str, UnitArray]) -> UnitArray:
        mantissa, unit = u.split_mantissa_unit(params["weight"])
        weight = _standard(mantissa, self.eps)
        if self.w_mask is not None:
            weight = weight * self.w_mask
        if "gain" in params:
            weight = weight * params["gain"]
        return weight if unit == u.UNITLESS else u.Quantity(weight, unit=unit)


def _standard(weight: jax.Array, eps: float) -> jax.Array:
    variance = jnp.var(weight, axis=0, keepdims=True) * weight.shape[0]
    centred = weight - jnp.mean(weight, axis=0, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.maximum(variance, eps))


class GroupedLinear(Layer):
    """A dense layer for every group of units, `y[g] = x[g] @ W[g] + b[g]`.

    Args:
        num_groups: number of groups.
        in_features: size of the input of a group.
        out_features: size of the output of a group.
        w_init: initialiser of the weight, called once per group with (in, out) so that its scale
            is that of one group; or the value, which broadcasts to (groups, in, out).
        b_init: initialiser of the bias (groups, out), or its value; None for no bias.
        name: name of the layer.
        param_type: class of the parameter state.

    Attributes:
        weight: the parameter state, a dictionary with `weight` and perhaps `bias`.

    Raises:
        ValueError: if a value has another shape.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.nn.GroupedLinear(2, 3, 4)(jnp.ones((5, 2, 3))).shape
        (5, 2, 4)
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        w_init: Init = KAIMING,
        b_init: Init | None = ZERO,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        self.in_size = (num_groups, in_features)
        self.out_size = (num_groups, out_features)
        shape, label = (in_features, out_features), "GroupedLinear: w_init"
        if callable(w_init):
            weight = u.math.stack([initial(w_init, shape, label) for _ in range(num_groups)])
        else:
            weight = initial(w_init, (num_groups, *shape), label)
        params = {"weight": weight}
        if b_init is not None:
            params["bias"] = initial(b_init, self.out_size, "GroupedLinear: b_init")
        self.weight = param_type(params)

    def update(self, x: UnitArray) -> UnitArray:
        """Apply the layer to the last two axes of x, whatever the axes before them."""
        weight, bias = self.weight.value["weight"], self.weight.value.get("bias")
        return over_leading(lambda x: grouped_matmul(x, weight, bias), x, axes=2)
