"""Spiking neurons whose membrane oscillates, and units that send changes only."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import saiunit as u

from ._cell import Activation, Array, Cell, activation_of
from ._shapes import KAIMING, Init, Size, UnitArray, initial
from ._spiking import Options, Spike, SpikingCell
from ._surrogate import surrogate as surrogate_of
from ._time import check_positive, steps_per


class ResonateCell(SpikingCell):
    """Resonate-and-fire neurons: a membrane that turns, and spikes at the top of its turn.

    `I = α (cos ω I - sin ω reset(V)) + W x + U z` and `V = α (sin ω I + cos ω reset(V))` from the
    states of the last step, with `α = exp(-dt / tau)`, `ω = 2π dt / period` and the last spikes z;
    the new spikes `V > V_th` are returned. A neuron answers inputs that come once a period.
    Without `recurrent` the gradient of D_RTRL is that of BPTT. The other arguments are those of
    `LIFCell`.

    Args:
        period: of the oscillation: a number, one per neuron, or an initialiser; without a unit it
            counts in that of dt.

    Raises:
        ValueError: as `LIFCell`, or if dt / period is not a plain positive number.
    """

    state_names = ("V", "I")

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: Init = 20.0 * u.ms,
        period: Init = 20.0 * u.ms,
        train_tau: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(in_size, out_size, **options)
        self.alpha = self.decay("tau", tau, train_tau)
        self.omega = 2 * jnp.pi * steps_per(self._kind, "period", self.per_neuron("period", period))

    def update(self, x: UnitArray) -> jax.Array:
        """Advance one step; returns the new spikes."""
        V, I, alpha = self.V.value, self.I.value, self.alpha()
        z = self.spikes(V)
        V = self.after_reset(V, z)
        cos, sin = jnp.cos(self.omega), jnp.sin(self.omega)
        self.V.value = alpha * (sin * I + cos * V)
        self.I.value = alpha * (cos * I - sin * V) + self.current(x, z)
        return self.spikes(self.V.value)


class SigmaDeltaCell(Cell):
    """Units that add up changes, and send how far their activation has moved since they last sent.

    `s = s + W x`, `d = φ(s) - r`; where `|d| > threshold` a unit sends `y = d`, and `r = r + y`
    is what its receivers know. Inputs are changes, too, so nothing is sent while nothing moves.
    D_RTRL is exact: nothing comes back to other units.

    Args:
        in_size: size of the input.
        out_size: number of units.
        threshold: the smallest change that is sent, a number or one per unit.
        activation: φ, by name or as a function.
        surrogate: what the derivative of sending is taken to be: a name, or a function of
            `|d| / threshold - 1`.
        w_init: initialiser of the weight.
        name: name of the cell.

    Raises:
        ValueError: if a threshold is not positive, or no activation or surrogate has this name.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.SigmaDeltaCell(3, 2, w_init=1.0)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).tolist(), cell(jnp.zeros(3)).tolist()
        ([3.0, 3.0], [0.0, 0.0])
    """

    state_names = ("s", "r")

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        threshold: Init = 0.1,
        activation: Activation = "relu",
        surrogate: str | Spike = "triangle",
        w_init: Init = KAIMING,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, name=name)
        self.activation, self.surrogate = activation_of(activation), surrogate_of(surrogate)
        self.threshold = initial(threshold, self.out_size, "SigmaDeltaCell: threshold")
        why = "it is the smallest change that is sent."
        check_positive("SigmaDeltaCell: the threshold", threshold, self.threshold, why)
        self.W = self._layer("x", w_init, None)

    def update(self, x: Array) -> Array:
        """Advance one step; returns what is sent."""
        self.s.value = self.s.value + self.W(x)
        change = self.activation(self.s.value) - self.r.value
        y = change * self.surrogate(jnp.abs(change) / self.threshold - 1)
        self.r.value = self.r.value + y
        return y
