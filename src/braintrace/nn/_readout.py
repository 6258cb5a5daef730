"""Leaky read-outs of rates or spikes: with the filter before the weight, or behind it."""

from __future__ import annotations

import brainstate
import jax.numpy as jnp
import saiunit as u

from ..ops import matmul
from ._cell import Cell
from ._shapes import KAIMING, ZERO, Init, Size, UnitArray, initial, over_leading
from ._time import in_ms, steps_per, time_step

_TAU = 5.0 * u.ms


class _Readout(Cell):
    """A weight and a filter of what comes in or goes out: of `_filters`."""

    state_names = ("r",)
    _filters = "out_size"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Init = _TAU,
        w_init: Init = KAIMING,
        r_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, r_init, name=name)
        self.state_size = getattr(self, self._filters)
        self.tau, self.r_init = tau, r_init
        taus = initial(tau, self.state_size, f"{self._kind}: tau")
        self.dt, ratio = time_step(self._kind), steps_per(self._kind, "tau", taus)
        self.decay = jnp.exp(-ratio)
        shape = (self.in_size[-1], self.out_size[-1])
        self.W = brainstate.ParamState(initial(w_init, shape, f"{self._kind}: w_init"))

    def time_constants(self) -> dict[str, UnitArray]:
        """The time constant `tau`, in ms where dt has a unit."""
        return {"tau": in_ms(-1 / jnp.log(self.decay), self.dt)}


class FilteredReadout(_Readout):
    """A weighted sum of filtered inputs, `r = exp(-dt / tau) r + x`, then `r @ W`.

    With one tau the same function as `LeakyRateReadout`, which filters behind its weight. Here no
    path from a unit to a later output crosses the weight from step to step, so D_RTRL leaves
    nothing out of the read-out, and is e-prop with its filtered eligibility traces. The state
    counts inputs, not outputs. The time step is `brainstate.environ.get_dt()` at construction.

    Args:
        in_size: size of the input; of a tuple, the last number counts.
        out_size: number of outputs, after the axes before the last of a tuple.
        tau: time constant, a number or one per input; without a unit it counts in that of dt.
        w_init: initialiser of the weight.
        r_init: initialiser of the state.
        name: name of the layer.

    Raises:
        ValueError: if dt is not set, or dt / tau is not a plain positive number.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     readout = braintrace.nn.FilteredReadout(3, 2)
        >>> readout.init_state()
        >>> readout(jnp.ones(3)).shape
        (2,)
    """

    _filters = "in_size"

    def update(self, x: UnitArray) -> UnitArray:
        """Advance one step; returns the weighted filtered input."""
        self.r.value = self.decay * self.r.value + x
        return over_leading(lambda r: matmul(r, self.W.value), self.r.value, axes=1)


class LeakyRateReadout(_Readout):
    """Leaky integration of a weighted input, `r = exp(-dt / tau) r + x @ W`.

    D_RTRL drops the paths through its weight into the state; `FilteredReadout` is the same function
    without such paths. The time step is `brainstate.environ.get_dt()` at construction.

    Args:
        in_size: size of the input; of a tuple, the last number counts.
        out_size: number of outputs, after the axes before the last of a tuple.
        tau: time constant, a number or one per output; without a unit it counts in that of dt.
        w_init: initialiser of the weight.
        r_init: initialiser of the state.
        name: name of the layer.

    Raises:
        ValueError: if dt is not set, or dt / tau is not a plain positive number.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     readout = braintrace.nn.LeakyRateReadout(3, 2)
        >>> readout.init_state()
        >>> readout(jnp.ones(3)).shape
        (2,)
    """

    def update(self, x: UnitArray) -> UnitArray:
        """Advance one step; returns the new state."""
        drive = over_leading(lambda x: matmul(x, self.W.value), x, axes=1)
        self.r.value = self.decay * self.r.value + drive
        return self.r.value
