"""Gated cells without a nonlinearity on the state."""

from __future__ import annotations

import jax

from ._cell import ORTHOGONAL, XAVIER, ZERO, Activation, Array, Cell, join
from ._shapes import Init, Size


class MiniGRU(Cell):
    """One gate of the input and the state: `z = σ(W_z[x, h])`, `h = (1 - z) h + z W_x x`.

    D_RTRL has a trace for both weights, and leaves out `h` feeding back through W_z. Without that
    way back it is `MinGRUCell`, where D_RTRL is exact.

    Args:
        in_size: size of the input.
        out_size: number of units.
        w_init: initialiser of the weights.
        b_init: initialiser of the biases; None for no bias.
        state_init: initialiser of the state.
        name: name of the cell.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.MiniGRU(3, 4)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace.nn"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name=name)
        self.W_z = self._gate(w_init, b_init)
        self.W_x = self._input(w_init, b_init)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        h = self.h.value
        z = jax.nn.sigmoid(self.W_z(join(x, h)))
        self.h.value = (1 - z) * h + z * self.W_x(x)
        return self.h.value


class MiniLSTM(Cell):
    """Two gates of the input and the state.

    `f = σ(W_f[x, h])`, `i = σ(W_i[x, h])`, `h = f h + i W_x x`.

    D_RTRL has a trace for all weights, and leaves out `h` feeding back through the gates. Without
    that way back it is `MinLSTMCell`, where D_RTRL is exact.

    Args:
        in_size: size of the input.
        out_size: number of units.
        w_init: initialiser of the weights.
        b_init: initialiser of the biases; None for no bias.
        state_init: initialiser of the state.
        name: name of the cell.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.MiniLSTM(3, 4)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace.nn"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name=name)
        self.W_f = self._gate(w_init, b_init)
        self.W_i = self._gate(w_init, b_init)
        self.W_x = self._input(w_init, b_init)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        h = self.h.value
        xh = join(x, h)
        f, i = jax.nn.sigmoid(self.W_f(xh)), jax.nn.sigmoid(self.W_i(xh))
        self.h.value = f * h + i * self.W_x(x)
        return self.h.value


class MinGRUCell(Cell):
    """One gate of the input only: `z = σ(Wz x)`, `h = (1 - z) h + z g(Wh x)`.

    Nothing feeds back but `h` itself, element by element, so D_RTRL is exact for all weights. A
    bias of Wz at `-log(n)` remembers about n steps; `b_init` sets those of both layers.

    Args:
        in_size: size of the input.
        out_size: number of units.
        w_init: initialiser of the weights.
        b_init: initialiser of the biases; None for no bias.
        state_init: initialiser of the state.
        activation: g, by name or as a function; "identity" is the plain form, "positive" the one
            of the form in log space, `x + 1/2` above zero and `σ(x)` below.
        name: name of the cell.

    Raises:
        ValueError: if no activation has this name.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.MinGRUCell(3, 4)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace.nn"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: Activation = "identity",
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, activation, name)
        self.Wz = self._input(w_init, b_init)
        self.Wh = self._input(w_init, b_init)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        z = jax.nn.sigmoid(self.Wz(x))
        self.h.value = (1 - z) * self.h.value + z * self.activation(self.Wh(x))
        return self.h.value


class MinLSTMCell(Cell):
    """Two normalised gates of the input only.

    `f = σ(Wf x)`, `i = σ(Wi x)`, `h = f/(f + i) h + i/(f + i) g(Wh x)`.

    Nothing feeds back but `h` itself, element by element, so D_RTRL is exact for all weights.

    Args:
        in_size: size of the input.
        out_size: number of units.
        w_init: initialiser of the weights.
        b_init: initialiser of the biases; None for no bias.
        state_init: initialiser of the state.
        activation: g, by name or as a function; "identity" is the plain form, "positive" the one
            of the form in log space, `x + 1/2` above zero and `σ(x)` below.
        name: name of the cell.

    Raises:
        ValueError: if no activation has this name.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.MinLSTMCell(3, 4)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace.nn"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: Activation = "identity",
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, activation, name)
        self.Wf = self._input(w_init, b_init)
        self.Wi = self._input(w_init, b_init)
        self.Wh = self._input(w_init, b_init)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        # f/(f + i) = σ(log f - log i): no 0/0 where both gates are shut.
        ratio = jax.nn.log_sigmoid(self.Wf(x)) - jax.nn.log_sigmoid(self.Wi(x))
        keep, take = jax.nn.sigmoid(ratio), jax.nn.sigmoid(-ratio)
        self.h.value = keep * self.h.value + take * self.activation(self.Wh(x))
        return self.h.value
