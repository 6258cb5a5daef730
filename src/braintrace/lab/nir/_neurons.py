"""The neurons of a node of NIR: its differential equations by forward Euler.

With V the distance from v_leak, k = tau / dt and z the spikes of the last step:

    I = (1 - 1 / k_syn) I + (w_in / k_syn) x        where the node has tau_syn, else I = x
    V = (1 - 1 / k) reset(V, z) + (r / k) I         of IF: V = reset(V, z) + r dt I
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ..._errors import value_error
from ...nn import surrogate as surrogate_of
from ...nn._cell import Cell
from ...nn._shapes import one_of

Array = jax.Array
SPIKING = ("IF", "LIF", "CubaLIF")
KINDS = (*SPIKING, "LI", "CubaLI")
HARD = "hard"
# After spikes z: what the membrane leaks from, and what is taken off it after the leak.
RESETS: dict[str, Callable[[Array, Array, Array, Array], tuple[Array, Array | float]]] = {
    HARD: lambda V, z, threshold, v_reset: (V * (1 - z) + v_reset * z, 0.0),
    "soft": lambda V, z, threshold, v_reset: (V - threshold * z, 0.0),
    "soft_after_leak": lambda V, z, threshold, v_reset: (V, threshold * z),
}


def seconds(dt: Any) -> float:
    """The time step as a number: of seconds if it has a unit; by default the environment's."""
    if dt is None:
        dt = brainstate.environ.get("dt", None)
    if u.have_same_dim(0.0 if dt is None else dt, u.second):
        dt = dt.to_decimal(u.second)
    try:
        number = float(dt)
    except TypeError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise value_error(
            f"the time step dt is {dt}.",
            why="NIR has time constants, and a simulation in steps needs their length",
            do="pass dt, a positive number in the file's unit of time (by convention seconds) or "
            "a time with a unit; or call brainstate.environ.set(dt=1.0 * saiunit.ms)",
        )
    return number


class Neurons(Cell):
    """The neurons of a node of NIR, without weights: IF, LIF, CubaLIF, LI or CubaLI.

    Spiking ones return spikes, others the membrane. The state `V` is the membrane before its
    reset, as a distance from v_leak, `I` the current of a synapse.

    Args:
        name: name of the node, for messages.
        node: the node.
        shape: number of neurons, or the shape of their array.
        dt: length of a step in the unit of the node's time constants.
        reset: of spiking ones, 'hard': the membrane is set to v_reset; 'soft': the threshold is
            subtracted before the leak, as in `braintrace.nn.LIFCell`; 'soft_after_leak': after it.
        surrogate: derivative of a spike, see `braintrace.nn.surrogate`.

    Raises:
        ValueError: a time constant is shorter than dt, numbers are not finite, or shapes differ.
    """

    def __init__(
        self,
        name: str,
        node: Any,
        shape: tuple[int, ...],
        dt: float,
        reset: str = HARD,
        surrogate: str | Callable[[Array], Array] = "triangle",
    ):
        super().__init__(shape, shape)
        self.node, self.where = node, f"node {name!r}, {type(node).__name__}"
        self.spiking = type(node).__name__ in SPIKING
        self.reset = reset
        self._after_spikes = one_of(f"reset for {self.where}:", reset, RESETS)
        self.surrogate = surrogate_of(surrogate)
        synapse = hasattr(node, "tau_syn")
        self.state_names = ("V", "I") if synapse else ("V",)
        leaky = type(node).__name__ != "IF"
        leak = self._numbers("v_leak") if leaky else np.zeros(shape)
        self.leak = self._array(leak)
        if leaky:
            self.decay, k = self._leak("tau_mem" if synapse else "tau", dt)
            self.gain = self._array(self._numbers("r") / k)
        else:
            self.decay, self.gain = (
                self._array(np.ones(shape)),
                self._array(self._numbers("r") * dt),
            )
        if synapse:
            self.decay_syn, k = self._leak("tau_syn", dt)
            self.gain_syn = self._array(self._numbers("w_in") / k)
        if self.spiking:
            threshold = self._numbers("v_threshold")
            self.threshold = self._array(threshold - leak)
            self.v_reset = self._array(self._numbers("v_reset") - leak)
            self.scale = self._array(np.where(threshold > leak, threshold - leak, 1.0))

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new spikes, or the new membrane."""
        if "I" in self.state_names:
            self.I.value = self.decay_syn * self.I.value + self.gain_syn * x
            x = self.I.value
        V = self.V.value
        if self.spiking:
            V, late = self._after_spikes(V, self._spikes(V), self.threshold, self.v_reset)
            self.V.value = self.decay * V + self.gain * x - late
        else:
            self.V.value = self.decay * V + self.gain * x
        return self.last()

    def last(self) -> Array:
        """The output of the last step."""
        V = self.V.value
        return self._spikes(V) if self.spiking else V + self.leak

    def _spikes(self, V: Array) -> Array:
        return self.surrogate((V - self.threshold) / self.scale)

    def _leak(self, name: str, dt: float) -> tuple[Array, np.ndarray]:
        """What is left after a step, and the steps of a time constant."""
        tau = self._numbers(name)
        if not (tau >= dt).all():
            raise value_error(
                f"{name} is {tau.min():g}, dt is {dt:g}.",
                where=self.where,
                why="a step of forward Euler must not be longer than the time constant",
                do="pass the dt that the file was written for, in its unit of time",
            )
        return self._array(1 - dt / tau), tau / dt

    def _numbers(self, name: str) -> np.ndarray:
        value = np.asarray(getattr(self.node, name), np.float64)
        if (value.size != 1 and value.shape != self.out_size) or not np.isfinite(value).all():
            raise value_error(
                f"{name} is {value}.",
                where=self.where,
                why=f"it has a finite number for each of {self.out_size} neurons, or one for all",
                do="correct the file",
            )
        return np.broadcast_to(value.reshape(value.shape if value.size > 1 else ()), self.out_size)

    def _array(self, value: np.ndarray) -> Array:
        return jnp.asarray(value, brainstate.environ.dftype())
