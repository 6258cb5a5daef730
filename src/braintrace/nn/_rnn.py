"""Recurrent cells without gates of their own: the plain and the minimal one."""

from __future__ import annotations

from collections.abc import Callable

import jax

from ._cell import ORTHOGONAL, Activation, Array, Cell, join
from ._shapes import XAVIER, ZERO, Init, Size


class ValinaRNNCell(Cell):
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

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        state_init: Init = ZERO,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        activation: Activation = "relu",
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, activation, name)
        self.W = self._layer("xh", w_init, b_init)

    def _next(self, x: Array, h: Array) -> Array:
        return self.activation(self.W(join(x, h)))


class MinimalRNNCell(Cell):
    """The minimal recurrent network: `z = φ(x)`, `f = σ(W_u[z, h])`, `h = f h + (1 - f) z`.

    D_RTRL has a trace for all weights; φ is also read through W_u, and `h` feeds back through W_u:
    these paths are left out, so no parameter is exact. Other arguments are those of `GRUCell`.

    Args:
        phi: φ, a function or module from the input to the units; by default a `Linear` layer.
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        phi: Callable[[Array], Array] | None = None,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name=name)
        self.phi: Callable[[Array], Array] = phi or self._layer("x", w_init, b_init)
        self.W_u = self._layer("hh", w_init, b_init)  # reads [z, h], both of the size of h

    def _next(self, x: Array, h: Array) -> Array:
        z = self.phi(x)
        f = jax.nn.sigmoid(self.W_u(join(z, h)))
        return f * h + (1 - f) * z
