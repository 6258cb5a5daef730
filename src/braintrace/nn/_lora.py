"""The layer of low rank, by itself or beside another one."""

from __future__ import annotations

from collections.abc import Callable

import brainstate
from brainstate.nn import init

from .._errors import type_error, value_error
from ..ops import lora_matmul
from ._shapes import Init, Layer, Size, UnitArray, initial, over_leading

_LECUN = init.LecunNormal()


class LoRA(Layer):
    """A layer of low rank beside another one, `y = x @ lora_a @ lora_b / rank + base(x)`.

    The base is trained like any other layer as long as its weights are in a `ParamState`. To
    freeze a trained base, put them in another state:
    `base.weight = brainstate.LongTermState(base.weight.value)`. Together with a zero `lora_b_init`
    the layer then starts as the base and learns the difference.

    Args:
        in_features: size of the input.
        lora_rank: the rank.
        out_features: size of the output.
        base_module: a layer, or any function of the input, whose result is added.
        kernel_init: initialiser of `lora_a` (in, rank) and `lora_b` (rank, out).
        param_type: class of the parameter state.
        in_size: size of the input, if it has axes before the last; the output keeps them.
        lora_b_init: initialiser of `lora_b` alone, or its value.

    Attributes:
        weight: the parameter state, a dictionary with `lora_a` and `lora_b`.

    Raises:
        TypeError: if the base cannot be called.
        ValueError: if the rank is not positive, or `in_size` does not end in `in_features`.

    Example:
        >>> import brainstate, jax.numpy as jnp, braintrace
        >>> base = braintrace.nn.Linear(3, 4, param_type=brainstate.LongTermState)
        >>> layer = braintrace.nn.LoRA(3, 2, 4, base_module=base, lora_b_init=0.0)
        >>> bool((layer(jnp.ones(3)) == base(jnp.ones(3))).all())
        True
        >>> list(layer.states(brainstate.ParamState))
        [('weight',)]
    """

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Callable[[UnitArray], UnitArray] | None = None,
        kernel_init: Init = _LECUN,
        param_type: type = brainstate.ParamState,
        in_size: Size | None = None,
        lora_b_init: Init | None = None,
    ):
        super().__init__()
        self.in_size = in_features if in_size is None else in_size
        self.out_size = (*self.in_size[:-1], out_features)
        self.in_features, self.out_features = in_features, out_features
        self.lora_rank, self.base_module = lora_rank, base_module
        _check(self)
        b_init = kernel_init if lora_b_init is None else lora_b_init
        a = initial(kernel_init, (in_features, lora_rank), "LoRA: kernel_init")
        b = initial(b_init, (lora_rank, out_features), "LoRA: lora_b_init")
        self.weight = param_type({"lora_a": a, "lora_b": b})

    def update(self, x: UnitArray) -> UnitArray:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        a, b = self.weight.value["lora_a"], self.weight.value["lora_b"]
        y = over_leading(lambda x: lora_matmul(x, a, b, alpha=1 / self.lora_rank), x, axes=1)
        return y if self.base_module is None else y + self.base_module(x)


def _check(layer: LoRA) -> None:
    if layer.lora_rank < 1:
        raise value_error(
            f"LoRA: lora_rank is {layer.lora_rank}.",
            why="the product of the factors has that rank.",
            do="give a rank of 1 or more.",
        )
    if layer.in_size[-1] != layer.in_features:
        raise value_error(
            f"LoRA: in_size {layer.in_size} does not end in in_features {layer.in_features}.",
            why="the layer acts on the last axis.",
            do="make them equal, or leave in_size out.",
        )
    if layer.base_module is not None and not callable(layer.base_module):
        raise type_error(
            f"LoRA: base_module has type {type(layer.base_module).__name__}.",
            why="the base is called with the input, and its result is added.",
            do="pass a layer such as braintrace.nn.Linear, or a function.",
        )
