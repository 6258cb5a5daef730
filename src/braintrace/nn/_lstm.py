"""Long short-term memories: gates of the input and the output, two states per unit."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp

from ..ops import element_wise
from ._cell import Activation, Array, Cell, Gated, join
from ._shapes import XAVIER, ZERO, Init, Size


class LSTMCell(Gated):
    """The long short-term memory, with gates `i, g, f, o = Wi[x, h], Wg[x, h], Wf[x, h], Wo[x, h]`.

    `c = σ(f + 1) c + σ(i) φ(g)`, `h = σ(o) φ(c)`.

    The arguments are those of `GRUCell`; the weights are drawn by Xavier's rule by default.
    """

    state_names = ("c", "h")
    _reads = (("Wi", "xh"), ("Wg", "xh"), ("Wf", "xh"), ("Wo", "xh"))
    _w_init = XAVIER

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new `h`."""
        xh = join(x, self.h.value)
        i, g, f, o = self.Wi(xh), self.Wg(xh), self.Wf(xh), self.Wo(xh)
        self.c.value = jax.nn.sigmoid(f + 1) * self.c.value + jax.nn.sigmoid(i) * self.activation(g)
        self.h.value = jax.nn.sigmoid(o) * self.activation(self.c.value)
        return self.h.value


class URLSTMCell(Cell):
    """The LSTM with a refined gate and uniformly initialised forget times.

    With gates `f, r, u, o` of `[x, h]` without biases: `f' = σ(f + b)`, `r' = σ(r - b)`,
    `g = 2 r' f' + (1 - 2 r') f'²`, `c = g c + (1 - g) φ(u)`, `h = σ(o) φ(c)`. The forget gates
    σ(b) start uniform between 1/n and 1 - 1/n for n units.

    D_RTRL has a trace for all weights, and leaves out `h` feeding back through the gates. The
    arguments are those of `GRUCell`, without `b_init`.
    """

    state_names = ("c", "h")
    _reads = (("Wu", "xh"), ("Wf", "xh"), ("Wr", "xh"), ("Wo", "xh"))

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        state_init: Init = ZERO,
        activation: Activation = "tanh",
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, activation, name)
        self._add_layers(w_init, None)
        edge = 1 / max(self.out_size[-1], 2)
        uniform = brainstate.random.uniform(edge, 1 - edge, self.out_size)
        self.bias = brainstate.ParamState(-jnp.log(1 / uniform - 1))

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new `h`."""
        xh = join(x, self.h.value)
        bias = element_wise(self.bias.value)
        f, r = jax.nn.sigmoid(self.Wf(xh) + bias), jax.nn.sigmoid(self.Wr(xh) - bias)
        g = 2 * r * f + (1 - 2 * r) * f**2
        self.c.value = g * self.c.value + (1 - g) * self.activation(self.Wu(xh))
        self.h.value = jax.nn.sigmoid(self.Wo(xh)) * self.activation(self.c.value)
        return self.h.value
