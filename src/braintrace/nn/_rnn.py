"""Recurrent cells; `[a, b]` is the concatenation of a and b, and W a `Linear` layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init

from .._errors import message
from ._linear import Init, Linear, Size, batched

Array = jax.Array

_ZERO = init.ZeroInit()
_XAVIER = init.XavierNormal()
_ORTHOGONAL = init.Orthogonal()

ACTIVATIONS = tuple(
    """
    celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid mish relu
    relu6 selu sigmoid silu soft_sign softplus squareplus swish tanh
    """.split()
)


def activation_of(name: str | Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function of its own, or one of `brainstate.nn` by name."""
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(
            message(
                f"There is no activation {name!r}.",
                why=f"the known names are {', '.join(ACTIVATIONS)}.",
                do="use one of these names, or pass a function.",
            )
        )
    return getattr(brainstate.nn, name)


class _Cell(brainstate.nn.Module):
    """What the cells share: sizes, and hidden states called `state_names`."""

    state_names: tuple[str, ...] = ("h",)

    in_size: Any
    out_size: Any

    def __init__(
        self, in_size: Size, out_size: Size, state_init: Init, activation: Any, name: str | None
    ):
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        self.state_init = state_init
        self.activation = activation_of(activation)

    def _gate(self, w_init: Init, b_init: Init | None) -> Linear:
        size = self.in_size[-1] + self.out_size[-1]
        return Linear((*self.in_size[:-1], size), self.out_size, w_init, b_init)

    def _initial(self, batch_size: int | None) -> Any:
        return batched(self.state_init, self.out_size, batch_size)

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Make the hidden states, with a leading batch axis if `batch_size` is given."""
        for name in self.state_names:
            setattr(self, name, brainstate.HiddenState(self._initial(batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the hidden states to their initial values."""
        for name in self.state_names:
            getattr(self, name).value = self._initial(batch_size)


class ValinaRNNCell(_Cell):
    """The plain recurrent cell, `h = φ(W[x, h])`.

    Args:
        in_size: size of the input.
        out_size: number of units.
        state_init: initialiser of the state.
        w_init: initialiser of the weights.
        b_init: initialiser of the bias; None for no bias.
        activation: φ, by name or as a function.
        name: name of the cell.

    Raises:
        ValueError: if no activation has this name.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.ValinaRNNCell(3, 4)
        >>> cell.init_state(batch_size=2)
        >>> cell(jnp.ones((2, 3))).shape
        (2, 4)
    """

    __module__ = "braintrace.nn"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        state_init: Init = _ZERO,
        w_init: Init = _XAVIER,
        b_init: Init | None = _ZERO,
        activation: str | Callable[[Array], Array] = "relu",
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, activation, name)
        self.W = self._gate(w_init, b_init)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        self.h.value = self.activation(self.W(_join(x, self.h.value)))
        return self.h.value


class GRUCell(_Cell):
    """The gated recurrent unit.

    `z = σ(Wz[x, h])`, `r = σ(Wr[x, h])`, `h = (1 - z) h + z φ(Wh[x, r h])`.

    Args:
        in_size: size of the input.
        out_size: number of units.
        w_init: initialiser of the weights.
        b_init: initialiser of the biases; None for no bias.
        state_init: initialiser of the state.
        activation: φ, by name or as a function.
        name: name of the cell.

    Raises:
        ValueError: if no activation has this name.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace.nn"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = _ORTHOGONAL,
        b_init: Init | None = _ZERO,
        state_init: Init = _ZERO,
        activation: str | Callable[[Array], Array] = "tanh",
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, activation, name)
        self.Wz = self._gate(w_init, b_init)
        self.Wr = self._gate(w_init, b_init)
        self.Wh = self._gate(w_init, b_init)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        h = self.h.value
        xh = _join(x, h)
        z, r = jax.nn.sigmoid(self.Wz(xh)), jax.nn.sigmoid(self.Wr(xh))
        self.h.value = (1 - z) * h + z * self.activation(self.Wh(_join(x, r * h)))
        return self.h.value


class LSTMCell(_Cell):
    """The long short-term memory, with gates `i, g, f, o = Wi[x, h], Wg[x, h], Wf[x, h], Wo[x, h]`.

    `c = σ(f + 1) c + σ(i) φ(g)`, `h = σ(o) φ(c)`.

    Args:
        in_size: size of the input.
        out_size: number of units.
        w_init: initialiser of the weights.
        b_init: initialiser of the biases; None for no bias.
        state_init: initialiser of the states.
        activation: φ, by name or as a function.
        name: name of the cell.

    Raises:
        ValueError: if no activation has this name.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.LSTMCell(3, 4)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace.nn"

    state_names = ("c", "h")

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = _XAVIER,
        b_init: Init | None = _ZERO,
        state_init: Init = _ZERO,
        activation: str | Callable[[Array], Array] = "tanh",
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, activation, name)
        self.Wi = self._gate(w_init, b_init)
        self.Wg = self._gate(w_init, b_init)
        self.Wf = self._gate(w_init, b_init)
        self.Wo = self._gate(w_init, b_init)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new `h`."""
        xh = _join(x, self.h.value)
        i, g, f, o = self.Wi(xh), self.Wg(xh), self.Wf(xh), self.Wo(xh)
        kept = jax.nn.sigmoid(f + 1) * self.c.value
        self.c.value = kept + jax.nn.sigmoid(i) * self.activation(g)
        self.h.value = jax.nn.sigmoid(o) * self.activation(self.c.value)
        return self.h.value


def _join(x: Array, h: Array) -> Array:
    return jnp.concatenate([x, h], axis=-1)
