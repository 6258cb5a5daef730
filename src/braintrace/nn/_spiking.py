"""What spiking cells share: weights, threshold, reset, surrogate and the units of voltages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import brainstate
import jax
import saiunit as u
from brainstate.nn import init

from .._errors import value_error
from ._cell import Cell
from ._linear import Linear
from ._shapes import KAIMING, ZERO, Init, Size, UnitArray, batched, initial, one_of
from ._surrogate import surrogate as surrogate_of
from ._time import Decay, check_positive

_WEAK = init.XavierNormal(scale=0.1)

Spike = Callable[[jax.Array], jax.Array]
Reset = Callable[[UnitArray, UnitArray, jax.Array], UnitArray]
RESETS: dict[str, Reset] = {
    "soft": lambda V, V_th, z: V - V_th * z,
    "hard": lambda V, V_th, z: V * (1 - z),
}


class Options(TypedDict, total=False):
    """What every cell hands to `SpikingCell`."""

    recurrent: bool
    V_th: Init
    reset: str
    surrogate: str | Spike
    w_init: Init
    u_init: Init
    b_init: Init | None
    name: str | None


class SpikingCell(Cell):
    """A layer of spiking neurons, the base of the spiking cells and of your own.

    A cell writes `update(x)`, which advances one step and returns the new spikes, and names its
    states in `state_names`; where not all start at rest, it writes `init_state(batch_size)`. A
    state `V` is the membrane before its reset: `spikes(V)` are the spikes of the last step whenever
    they are asked for, so no state holds them twice. Voltages are distances from rest; those
    without a unit count in that of `V_th`.

    Args:
        in_size: size of the input.
        out_size: number of neurons.
        recurrent: whether the spikes of the last step come back through `U`.
        V_th: threshold, a number, one per neuron, or an initialiser; may have a unit.
        reset: 'soft' takes `V_th` off the membrane after a spike, 'hard' sets it to rest.
        surrogate: what the derivative of a spike is taken to be: a name, or a function of
            `(V - threshold) / V_th`; `surrogate` sets a width.
        w_init: initialiser of the input weight, or its value.
        u_init: initialiser of the recurrent weight, or its value.
        b_init: initialiser of the bias, or its value; None for no bias.
        name: name of the cell.

    Raises:
        ValueError: if no reset or surrogate has this name, `V_th` is not positive, or a voltage
            has another kind of unit.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> class Integrator(braintrace.nn.SpikingCell):
        ...     def update(self, x):
        ...         z = self.spikes(self.V.value)
        ...         self.V.value = self.after_reset(self.V.value, z) + self.current(x, z)
        ...         return self.spikes(self.V.value)
        >>> cell = Integrator(3, 4)
        >>> learner = braintrace.compile(cell, "d_rtrl", jnp.zeros(3))
        >>> learner(jnp.ones(3)).shape
        (4,)
    """

    state_names: tuple[str, ...] = ("V",)

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        recurrent: bool = True,
        V_th: Init = 1.0,
        reset: str = "soft",
        surrogate: str | Spike = "triangle",
        w_init: Init = KAIMING,
        u_init: Init = _WEAK,
        b_init: Init | None = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, name=name)
        self.surrogate = surrogate_of(surrogate)
        self._reset = one_of("reset", reset, RESETS)
        self.V_th = self.per_neuron("V_th", V_th)
        self.unit = u.get_unit(self.V_th)
        why = "voltages are distances from rest, and the threshold is their scale."
        check_positive(f"{self._kind}: V_th", V_th, self.V_th, why)
        self.W = Linear(in_size, out_size, w_init, b_init)
        self.U = Linear(out_size, out_size, u_init, None) if recurrent else None

    def reset_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        """Set the states to the values that `init_state` gives them."""
        states = {k: v for k, v in vars(self).items() if isinstance(v, brainstate.ShortTermState)}
        self.init_state(batch_size)
        for name, state in states.items():
            state.value = getattr(self, name).value
            setattr(self, name, state)

    def per_neuron(self, name: str, value: Init) -> UnitArray:
        """One number per neuron, from a number, an array or an initialiser."""
        return initial(value, self.out_size, f"{self._kind}: {name}")

    def rest(self, batch_size: int | None = None) -> UnitArray:
        """Zeros of one number per neuron in the unit of `V_th`, perhaps with a batch axis."""
        return self.voltage("rest", batched(ZERO, self.out_size, batch_size))

    def _initial(self, batch_size: int | None) -> UnitArray:
        return self.rest(batch_size)

    def current(self, x: UnitArray, z: jax.Array) -> UnitArray:
        """What comes in: the input through `W`, and the last spikes through `U` if recurrent."""
        drive = self.voltage("the input through W", self.W(x))
        if self.U is None:
            return drive
        return drive + self.voltage("the spikes through U", self.U(z))

    def spikes(self, V: UnitArray, threshold: UnitArray | None = None) -> jax.Array:
        """1 where V is above the threshold (`V_th` by default), 0 elsewhere."""
        threshold = self.V_th if threshold is None else threshold
        return self.surrogate(u.maybe_decimal((V - threshold) / self.V_th))

    def after_reset(self, V: UnitArray, z: jax.Array) -> UnitArray:
        """The membrane after spikes z."""
        return self._reset(V, self.V_th, z)

    def decay(self, name: str, tau: Init, train: bool = False) -> Callable[[], jax.Array]:
        """A function that returns `exp(-dt / tau)` of every neuron, with dt as it is now.

        Keep it as an attribute. A trained one is a module with the parameter
        `rate = log(dt / tau)`, so that tau stays positive.
        """
        return Decay(self._kind, name, tau, self.out_size, train)

    def _decays(self, train: bool, **taus: Init) -> list[Callable[[], jax.Array]]:
        """The decays of several time constants, by the names of their arguments."""
        return [self.decay(name, tau, train) for name, tau in taus.items()]

    def _voltages(self, **values: Init) -> list[UnitArray]:
        """Several voltages, one number per neuron, by the names of their arguments."""
        return [self.voltage(name, self.per_neuron(name, v)) for name, v in values.items()]

    def time_constants(self) -> dict[str, UnitArray]:
        """The time constants of all neurons, trained or not, in ms where dt has a unit.

        Example:
            >>> import brainstate, saiunit as u, braintrace
            >>> with brainstate.environ.context(dt=1.0 * u.ms):
            ...     cell = braintrace.nn.ALIFCell(3, 2, train_tau=True)
            >>> cell.time_constants()["tau_a"].to_decimal(u.ms).round(2).tolist()
            [200.0, 200.0]
        """
        found = [v for v in vars(self).values() if isinstance(v, Decay)]
        return {decay.argument: decay.tau() for decay in found}

    def voltage(self, name: str, value: UnitArray) -> UnitArray:
        """A value in the unit of `V_th`; a plain number counts in it."""
        if u.is_unitless(value):
            return u.maybe_decimal(u.get_mantissa(value) * self.unit)
        if u.have_same_dim(value, self.V_th):
            return value
        raise value_error(
            f"{self._kind}: {name} has the unit {u.get_unit(value)}, V_th has {self.unit}.",
            why="it is added to the membrane, which is compared with V_th.",
            do="give V_th and the weights units that fit, or none to both.",
        )
