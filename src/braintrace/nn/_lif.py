"""Leaky integrate-and-fire neurons: the recurrent layer, and a read-out that spikes."""

from __future__ import annotations

from typing import Unpack

import jax
import saiunit as u

from ._shapes import KAIMING, Init, Size, UnitArray
from ._spiking import Options, Spike, SpikingCell


class LIFCell(SpikingCell):
    """Leaky integrate-and-fire neurons.

    `V = α reset(V) + W x + U z` with `α = exp(-dt / tau)` and the last spikes z; the new spikes
    `V > V_th` are returned. dt is `brainstate.environ.get_dt()` when the cell is built. Without
    `recurrent` the gradient of D_RTRL is that of BPTT; with it, paths through `U` are left out.

    Args:
        in_size: size of the input.
        out_size: number of neurons.
        tau: time constant of the membrane: a number, one per neuron, or an initialiser; without
            a unit it counts in that of dt.
        train_tau: whether tau is trained.
        **options: `recurrent`, `V_th`, `reset`, `surrogate`, `w_init`, `u_init`, `b_init` and
            `name` of `SpikingCell`.

    Raises:
        ValueError: if dt is not set, or dt / tau is not a plain positive number.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     cell = braintrace.nn.LIFCell(3, 4, surrogate="arctan")
        >>> cell.init_state(batch_size=2)
        >>> cell(jnp.ones((2, 3))).shape
        (2, 4)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: Init = 20.0 * u.ms,
        train_tau: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(in_size, out_size, **options)
        self.alpha = self.decay("tau", tau, train_tau)

    def update(self, x: UnitArray) -> jax.Array:
        """Advance one step; returns the new spikes."""
        V = self.V.value
        z = self.spikes(V)
        self.V.value = self.alpha() * self.after_reset(V, z) + self.current(x, z)
        return self.spikes(self.V.value)


class LeakySpikeReadout(LIFCell):
    """A leaky read-out that spikes: `V = exp(-dt / tau) reset(V) + W x`, spikes `V > V_th`.

    Nothing comes back from other outputs, so the gradient of D_RTRL is that of BPTT. For a
    read-out that does not spike see `LeakyRateReadout`. The arguments are those of `LIFCell`,
    without `recurrent` and `u_init`.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     readout = braintrace.nn.LeakySpikeReadout(3, 2, w_init=1.0)
        >>> readout.init_state()
        >>> readout(jnp.ones(3)).tolist()
        [1.0, 1.0]
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: Init = 5.0 * u.ms,
        train_tau: bool = False,
        V_th: Init = 1.0,
        reset: str = "soft",
        surrogate: str | Spike = "triangle",
        w_init: Init = KAIMING,
        b_init: Init | None = None,
        name: str | None = None,
    ):
        options = Options(V_th=V_th, reset=reset, surrogate=surrogate, w_init=w_init, b_init=b_init)
        options["recurrent"], options["name"] = False, name
        super().__init__(in_size, out_size, tau=tau, train_tau=train_tau, **options)
