"""Spiking neurons with a second, slow state: by threshold, by membrane, by currents."""

from __future__ import annotations

from typing import Unpack

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import value_error
from ._shapes import ZERO, Init, Size, UnitArray, batched
from ._spiking import Options, SpikingCell
from ._time import refuted


class ALIFCell(SpikingCell):
    """Leaky integrate-and-fire neurons with a threshold that rises with every spike.

    `V = α reset(V) + W x + U z`, `a = ρ a + z`, with `α = exp(-dt / tau)`, `ρ = exp(-dt / tau_a)`
    and the last spikes z; the new spikes `V > V_th + beta a` are returned. dt is read when the
    cell is built. Without `recurrent` the gradient of D_RTRL is that of BPTT. `train_tau` trains
    both time constants; the other arguments are those of `LIFCell`.

    Args:
        tau_a: time constant of the threshold.
        beta: how far a spike raises the threshold.

    Raises:
        ValueError: as `LIFCell`, or if beta is no voltage like `V_th`.
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: Init = 20.0 * u.ms,
        tau_a: Init = 200.0 * u.ms,
        beta: Init = 0.5,
        train_tau: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(in_size, out_size, **options)
        self.alpha, self.rho = self._decays(train_tau, tau=tau, tau_a=tau_a)
        (self.beta,) = self._voltages(beta=beta)

    def init_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        """Create the membrane `V` and the adaptation `a`, a plain number, both at zero."""
        super().init_state(batch_size)
        self.a = brainstate.HiddenState(batched(ZERO, self.out_size, batch_size))

    def update(self, x: UnitArray) -> jax.Array:
        """Advance one step; returns the new spikes."""
        V, a = self.V.value, self.a.value
        z = self.spikes(V, self.V_th + self.beta * a)
        self.V.value = self.alpha() * self.after_reset(V, z) + self.current(x, z)
        self.a.value = self.rho() * a + z
        return self.spikes(self.V.value, self.V_th + self.beta * self.a.value)


class AdLIFCell(SpikingCell):
    """Leaky integrate-and-fire neurons with a slow variable that follows membrane and spikes.

    `V = α reset(V) + W x + U z - (1 - α) w`, then `w = ρ w + (1 - ρ) (a reset(V) + b z)` from the
    new V and its spikes z, which are returned; `α = exp(-dt / tau)`, `ρ = exp(-dt / tau_w)`, dt
    as it is when the cell is built. As w reads the new V (symplectic Euler), an oscillation below
    the threshold shrinks by `sqrt(α ρ)` in a step, whatever a is. Without `recurrent` the
    gradient of D_RTRL is that of BPTT. `train_tau` trains both time constants; the other arguments
    are those of `LIFCell`.

    Args:
        tau_w: time constant of w.
        a: how much w follows the membrane.
        b: how much w follows the spikes, a voltage.

    Raises:
        ValueError: as `LIFCell`, or if b is no voltage like `V_th`, or the membrane is unstable
            with this a.
    """

    state_names = ("V", "w")

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: Init = 20.0 * u.ms,
        tau_w: Init = 100.0 * u.ms,
        a: Init = 1.0,
        b: Init = 1.0,
        train_tau: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(in_size, out_size, **options)
        self.alpha, self.rho = self._decays(train_tau, tau=tau, tau_w=tau_w)
        self.a = self.per_neuron("a", a)
        (self.b,) = self._voltages(b=b)
        _expect_stable(self.a, self.alpha(), self.rho())

    def update(self, x: UnitArray) -> jax.Array:
        """Advance one step; returns the new spikes."""
        V, w, alpha, rho = self.V.value, self.w.value, self.alpha(), self.rho()
        z = self.spikes(V)
        V = alpha * self.after_reset(V, z) + self.current(x, z) - (1 - alpha) * w
        z = self.spikes(V)
        self.V.value = V
        self.w.value = rho * w + (1 - rho) * (self.a * self.after_reset(V, z) + self.b * z)
        return z


class GIFCell(SpikingCell):
    """Generalised integrate-and-fire neurons: every spike starts two currents of their own.

    `V = α reset(V) + W x + U z + I1 + I2`, `I1 = ρ1 I1 + A1 z`, `I2 = ρ2 I2 + A2 z`, with the
    last spikes z, the new currents, and `exp(-dt / tau)` of each time constant; the new spikes
    `V > V_th` are returned. dt is read when the cell is built. Without `recurrent` the gradient
    of D_RTRL is that of BPTT. `train_tau` trains the three time constants; the other arguments are
    those of `LIFCell`.

    Args:
        tau_1: time constant of the first current.
        tau_2: time constant of the second one.
        A_1: what a spike adds to the first current, a voltage per step; positive: bursts.
        A_2: what a spike adds to the second one; negative: adaptation.

    Raises:
        ValueError: as `LIFCell`, or if A_1 or A_2 is no voltage like `V_th`.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     cell = braintrace.nn.GIFCell(3, 4, V_th=20.0 * u.mV, A_2=-0.2 * u.mV)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (4,)
    """

    state_names = ("V", "I1", "I2")

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: Init = 20.0 * u.ms,
        tau_1: Init = 10.0 * u.ms,
        tau_2: Init = 500.0 * u.ms,
        A_1: Init = 0.05,
        A_2: Init = -0.01,
        train_tau: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(in_size, out_size, **options)
        decays = self._decays(train_tau, tau=tau, tau_1=tau_1, tau_2=tau_2)
        self.alpha, self.rho_1, self.rho_2 = decays
        self.A_1, self.A_2 = self._voltages(A_1=A_1, A_2=A_2)

    def update(self, x: UnitArray) -> jax.Array:
        """Advance one step; returns the new spikes."""
        V = self.V.value
        z = self.spikes(V)
        self.I1.value = self.rho_1() * self.I1.value + self.A_1 * z
        self.I2.value = self.rho_2() * self.I2.value + self.A_2 * z
        own = self.I1.value + self.I2.value
        self.V.value = self.alpha() * self.after_reset(V, z) + self.current(x, z) + own
        return self.spikes(self.V.value)


# Below the threshold (V, w) is multiplied by [[α, α - 1], [(1 - ρ) a α, ρ - (1 - ρ) (1 - α) a]],
# of determinant α ρ < 1: a pair of complex eigenvalues is stable. Real ones are between -1 and 1
# where the characteristic polynomial is positive at both: a > -1, and a below the bound.
def _expect_stable(a: jax.Array, alpha: jax.Array, rho: jax.Array) -> None:
    bound = (1 + alpha) * (1 + rho) / ((1 - alpha) * (1 - rho))
    if refuted((a > -1) & (a < bound)):
        raise value_error(
            f"AdLIFCell: a is {a}.",
            why="the membrane would grow without input; it is stable for a between -1 and "
            f"{float(jnp.min(bound)):.3g} with these time constants.",
            do="choose a within, or longer time constants.",
        )
