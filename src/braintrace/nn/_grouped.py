"""One dense layer per group of units."""

from __future__ import annotations

import brainstate
import saiunit as u

from ..ops import grouped_matmul
from ._shapes import KAIMING, ZERO, Init, Layer, UnitArray, initial, over_leading


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
