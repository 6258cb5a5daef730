"""Cells in continuous time: liquid time constants, and their closed form."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u
from brainstate.nn import init

from ..ops import element_wise
from ._cell import Array, Cell, Gated, join
from ._shapes import XAVIER, ZERO, Init, Size, UnitArray, initial
from ._time import in_ms, steps_per, time_step

_PULL = init.Normal(0.0, 1.0)


class LTCCell(Cell):
    """Liquid time constants: `f = σ(W[x, h])`, `h = (h + f A) / (1 + dt / tau + f)`.

    One step of the fused solver, f being dt times a conductance, so that input and state set how
    fast a unit forgets. tau and A are trained, one per unit. D_RTRL leaves out the state's feedback
    through W.

    Args:
        in_size: size of the input.
        out_size: number of units.
        tau: time constant at the start: a number, one per unit, or an initialiser; without a unit
            it counts in that of dt.
        w_init: initialiser of the weight.
        b_init: initialiser of the bias; None for no bias.
        a_init: initialiser of A, the state that f pulls towards.
        state_init: initialiser of the state.
        name: name of the cell.

    Raises:
        ValueError: if dt is not set, or dt / tau is not a plain positive number.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     cell = braintrace.nn.LTCCell(3, 4)
        >>> cell.init_state(batch_size=2)
        >>> cell(jnp.ones((2, 3))).shape
        (2, 4)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Init = 20.0 * u.ms,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        a_init: Init = _PULL,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name=name)
        self.W = self._layer("xh", w_init, b_init)
        rates = steps_per("LTCCell", "tau", initial(tau, self.out_size, "LTCCell: tau"))
        self.rate = brainstate.ParamState(jnp.log(jnp.broadcast_to(rates, self.out_size)))
        self.dt = time_step("LTCCell")
        self.A = brainstate.ParamState(initial(a_init, self.out_size, "LTCCell: a_init"))

    def time_constants(self) -> dict[str, UnitArray]:
        """The time constant `tau` of all units as trained so far, in ms where dt has a unit."""
        return {"tau": in_ms(jnp.exp(-self.rate.value), self.dt)}

    def _next(self, x: Array, h: Array) -> Array:
        f = jax.nn.sigmoid(self.W(join(x, h)))
        leak = element_wise(self.rate.value, jnp.exp)
        return (h + f * element_wise(self.A.value)) / (1 + leak + f)


class CfCCell(Gated):
    """Closed-form continuous time: a gate moves between two states that the input suggests.

    `s = σ(W_s[x, h])`, `h = (1 - s) φ(W_g[x, h]) + s φ(W_k[x, h])`; a step has the length that
    W_s has learned.

    D_RTRL has a trace for all weights, and leaves out `h` feeding back through them; the state is
    read by nothing else. The arguments are those of `GRUCell`.
    """

    _reads = (("W_s", "xh"), ("W_g", "xh"), ("W_k", "xh"))

    def _next(self, x: Array, h: Array) -> Array:
        both = join(x, h)
        s = jax.nn.sigmoid(self.W_s(both))
        return (1 - s) * self.activation(self.W_g(both)) + s * self.activation(self.W_k(both))
