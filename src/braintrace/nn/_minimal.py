"""Gated cells without a nonlinearity on the state."""

from __future__ import annotations

import jax

from ._cell import ORTHOGONAL, Array, Cell, Gated, join
from ._shapes import XAVIER, ZERO, Init, Size


class _Mini(Cell):
    """The constructor of the cells whose gates read the state."""

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
        self._add_layers(w_init, b_init)


class _Min(Gated):
    """The cells whose gates do not."""

    _w_init, _activation = XAVIER, "identity"


class MiniGRU(_Mini):
    """One gate of the input and the state: `z = σ(W_z[x, h])`, `h = (1 - z) h + z W_x x`.

    D_RTRL has a trace for both weights, and leaves out `h` feeding back through W_z. `MinGRUCell`
    has no such feedback, and D_RTRL is exact for it. The arguments are those of `GRUCell`, without
    `activation`.
    """

    _reads = (("W_z", "xh"), ("W_x", "x"))

    def _next(self, x: Array, h: Array) -> Array:
        z = jax.nn.sigmoid(self.W_z(join(x, h)))
        return (1 - z) * h + z * self.W_x(x)


class MiniLSTM(_Mini):
    """Two gates of the input and the state.

    `f = σ(W_f[x, h])`, `i = σ(W_i[x, h])`, `h = f h + i W_x x`.

    D_RTRL has a trace for all weights, and leaves out `h` feeding back through the gates.
    `MinLSTMCell` has no such feedback, and D_RTRL is exact for it. The arguments are those of
    `MiniGRU`.
    """

    _reads = (("W_f", "xh"), ("W_i", "xh"), ("W_x", "x"))

    def _next(self, x: Array, h: Array) -> Array:
        xh = join(x, h)
        f, i = jax.nn.sigmoid(self.W_f(xh)), jax.nn.sigmoid(self.W_i(xh))
        return f * h + i * self.W_x(x)


class MinGRUCell(_Min):
    """One gate of the input only: `z = σ(Wz x)`, `h = (1 - z) h + z g(Wh x)`.

    Nothing feeds back but `h` itself, element by element, so D_RTRL is exact for all weights. A
    bias of Wz at `-log(n)` remembers about n steps; `b_init` sets those of both layers.
    Other arguments are those of `GRUCell`.

    Args:
        activation: g, by name or as a function; "identity" is the plain form, "positive" the one
            of the form in log space, `x + 1/2` above zero and `σ(x)` below.

    Raises:
        ValueError: if no activation has this name.
    """

    _reads = (("Wz", "x"), ("Wh", "x"))

    def _next(self, x: Array, h: Array) -> Array:
        z = jax.nn.sigmoid(self.Wz(x))
        return (1 - z) * h + z * self.activation(self.Wh(x))


class MinLSTMCell(_Min):
    """Two normalised gates of the input only.

    `f = σ(Wf x)`, `i = σ(Wi x)`, `h = f/(f + i) h + i/(f + i) g(Wh x)`.

    Nothing feeds back but `h` itself, element by element, so D_RTRL is exact for all weights. The
    arguments are those of `MinGRUCell`.
    """

    _reads = (("Wf", "x"), ("Wi", "x"), ("Wh", "x"))

    def _next(self, x: Array, h: Array) -> Array:
        # f/(f + i) = σ(log f - log i): no 0/0 where both gates are shut.
        ratio = jax.nn.log_sigmoid(self.Wf(x)) - jax.nn.log_sigmoid(self.Wi(x))
        keep, take = jax.nn.sigmoid(ratio), jax.nn.sigmoid(-ratio)
        return keep * h + take * self.activation(self.Wh(x))
