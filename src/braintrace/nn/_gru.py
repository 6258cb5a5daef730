"""Gated recurrent units: gates of the input and the state, one state per unit."""

from __future__ import annotations

import jax

from ._cell import Array, Gated, join


class GRUCell(Gated):
    """The gated recurrent unit.

    `z = σ(Wz[x, h])`, `r = σ(Wr[x, h])`, `h = (1 - z) h + z φ(Wh[x, r h])`.

    Args:
        in_size: size of the input.
        out_size: number of units.
        w_init: initialiser of the weights, orthogonal by default.
        b_init: initialiser of the biases; None for no bias.
        state_init: initialiser of the state.
        activation: φ, by name or as a function, tanh by default.
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

    _reads = (("Wz", "xh"), ("Wr", "xh"), ("Wh", "xh"))

    def _next(self, x: Array, h: Array) -> Array:
        xh = join(x, h)
        z, r = jax.nn.sigmoid(self.Wz(xh)), jax.nn.sigmoid(self.Wr(xh))
        return (1 - z) * h + z * self.activation(self.Wh(join(x, r * h)))


class GRUResetAfterCell(Gated):
    """The gated recurrent unit whose reset gate acts after the recurrent product, as on GPUs.

    `z = σ(Wz[x, h])`, `r = σ(Wr[x, h])`, `h = (1 - z) h + z φ(Wx x + r (Wh h))`.

    In `GRUCell` the reset gate reaches the state through Wh only, and has no trace. Here all four
    weights have one under D_RTRL; it leaves out `h` feeding back through the layers. The arguments
    are those of `GRUCell`.
    """

    _reads = (("Wz", "xh"), ("Wr", "xh"), ("Wx", "x"), ("Wh", "h"))

    def _next(self, x: Array, h: Array) -> Array:
        xh = join(x, h)
        z, r = jax.nn.sigmoid(self.Wz(xh)), jax.nn.sigmoid(self.Wr(xh))
        return (1 - z) * h + z * self.activation(self.Wx(x) + r * self.Wh(h))


class MGUCell(Gated):
    """The minimal gated unit: `f = σ(Wf[x, h])`, `h = (1 - f) h + f φ(Wh[x, f h])`.

    D_RTRL has a trace for both weights, and leaves out what passes Wh or Wf on its way to `h`.
    The arguments are those of `GRUCell`.
    """

    _reads = (("Wf", "xh"), ("Wh", "xh"))

    def _next(self, x: Array, h: Array) -> Array:
        f = jax.nn.sigmoid(self.Wf(join(x, h)))
        return (1 - f) * h + f * self.activation(self.Wh(join(x, f * h)))


class CFNCell(Gated):
    """The chaos-free network.

    `f = σ(Wf[x, h])`, `i = σ(Wi[x, h])`, `h = f φ(h) + i φ(Wh x)`.

    D_RTRL has a trace for all weights, and leaves out `h` feeding back through the two gates. The
    arguments are those of `GRUCell`.
    """

    _reads = (("Wf", "xh"), ("Wi", "xh"), ("Wh", "x"))

    def _next(self, x: Array, h: Array) -> Array:
        xh = join(x, h)
        f, i = jax.nn.sigmoid(self.Wf(xh)), jax.nn.sigmoid(self.Wi(xh))
        return f * self.activation(h) + i * self.activation(self.Wh(x))
