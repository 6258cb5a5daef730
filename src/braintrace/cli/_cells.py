"""The recurrent cells by name.

`memory` is the number of steps that a task needs; time constants start spread up to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import nn
from ..ops import element_wise, matmul

Array = jax.Array


class _Cell(brainstate.nn.Module):
    """Hidden states called `names`, each of one number per unit, zero at the start."""

    names: tuple[str, ...] = ("h",)

    def __init__(self, units: int):
        super().__init__()
        self.units = units

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Make the states."""
        for name in self.names:
            setattr(self, name, brainstate.HiddenState(self._zeros(batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the states to zero."""
        for name in self.names:
            getattr(self, name).value = self._zeros(batch_size)

    def _zeros(self, batch_size: int | None) -> Array:
        return jnp.zeros(self.units if batch_size is None else (batch_size, self.units))


class LRU(_Cell):
    """A linear recurrence with trained complex eigenvalues, as two real states.

    `λ = exp(-exp(ν) + i θ)`, `h = λ h + sqrt(1 - |λ|²) B x`, and `gelu(C h)` is returned. Unlike
    `nn.LRUCell` it has no scale of its own, no way past the states, and as many outputs as states.
    """

    names = ("re", "im")

    def __init__(self, inputs: int, units: int, memory: int):
        super().__init__(units)
        self.rate = brainstate.ParamState(-jnp.log(_times(units, memory)))
        self.angle = brainstate.ParamState(brainstate.random.uniform(0, 0.3, (units,)))
        self.to_re, self.to_im = (nn.Linear(inputs, units, b_init=None) for _ in range(2))
        self.mix = nn.Linear(2 * units, units)

    def update(self, x: Array) -> Array:
        """Advance one step; returns a function of the new states."""
        radius = element_wise(self.rate.value, weight_fn=lambda rate: jnp.exp(-jnp.exp(rate)))
        angle = element_wise(self.angle.value)
        c, s = radius * jnp.cos(angle), radius * jnp.sin(angle)
        scale = jnp.sqrt(1 - radius**2 + 1e-6)
        re, im = self.re.value, self.im.value
        self.re.value = c * re - s * im + scale * self.to_re(x)
        self.im.value = s * re + c * im + scale * self.to_im(x)
        return jax.nn.gelu(self.mix(jnp.concatenate([self.re.value, self.im.value], axis=-1)))


class Leaky(_Cell):
    """Leaky rate units, `h = a h + (1 - a) tanh(W[x, h])`, with a fixed leak per unit."""

    def __init__(self, inputs: int, units: int, memory: int):
        super().__init__(units)
        self.keep = jnp.exp(-1 / _times(units, memory))
        self.W = nn.Linear(inputs + units, units, brainstate.nn.init.XavierNormal())

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        h = self.h.value
        new = jnp.tanh(self.W(jnp.concatenate([x, h], axis=-1)))
        self.h.value = self.keep * h + (1 - self.keep) * new
        return self.h.value


spike = nn.surrogate("fast_sigmoid", width=0.5, height=0.5)


class ALIF(_Cell):
    """Spiking units with a membrane `v` and a threshold `1 + 0.5 a` that rises with every spike.

    `z = step(v - 1 - 0.5 a)`, `v = 0.9 v + W x + U z - z`, `a = ρ a + z`. The new spikes are
    returned.
    """

    names = ("v", "a")

    def __init__(self, inputs: int, units: int, memory: int):
        super().__init__(units)
        normal = brainstate.random.normal
        self.W = brainstate.ParamState(normal(0, 1 / inputs**0.5, (inputs, units)))
        self.U = brainstate.ParamState(normal(0, 0.3 / units**0.5, (units, units)))
        self.rho = jnp.exp(-1 / _times(units, 2 * memory))

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new spikes."""
        v, a = self.v.value, self.a.value
        z = self._spikes(v, a)
        self.v.value = 0.9 * v + matmul(x, self.W.value) + matmul(z, self.U.value) - z
        self.a.value = self.rho * a + z
        return self._spikes(self.v.value, self.a.value)

    @staticmethod
    def _spikes(v: Array, a: Array) -> Array:
        return spike(v - 1 - 0.5 * a)


def _gru(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
    cell = nn.GRUCell(inputs, units)
    set_bias(cell.Wz, -jnp.log(_times(units, memory)))
    return cell


def _lstm(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
    cell = nn.LSTMCell(inputs, units)
    times = jnp.log(_times(units, memory))
    set_bias(cell.Wf, times - 1)  # the cell adds 1
    set_bias(cell.Wi, -times)
    return cell


def _min_gru(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
    times = jnp.log(_times(units, memory))
    cell = nn.MinGRUCell(inputs, units, brainstate.nn.init.KaimingNormal())
    set_bias(cell.Wz, -times)
    return cell


def _minlstm(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
    cell = nn.MinLSTMCell(inputs, units)
    times = jnp.log(_times(units, memory))
    set_bias(cell.Wf, times / 2)
    set_bias(cell.Wi, -times / 2)
    return cell


def _spiking(kind: Callable[..., Any], slow: str, *fast: str) -> Callable[[int, int, int], Any]:
    """A spiking cell whose slow time constant is spread up to what the task needs."""

    def make(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
        with brainstate.environ.context(dt=1.0):
            times = {**dict.fromkeys(fast, 10.0), slow: _times(units, 2 * memory)}
            return kind(inputs, units, **times)

    return make


def _rnn(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
    return nn.ValinaRNNCell(inputs, units, activation="tanh")


def _times(units: int, memory: int) -> Array:
    """Time constants in steps, as many short as long ones on a logarithmic scale."""
    return jnp.exp(brainstate.random.uniform(0, jnp.log(max(memory, 2)), (units,))) + 1


def set_bias(layer: nn.Linear, bias: Array) -> None:
    """Replace the bias of a layer."""
    layer.weight.value = {**layer.weight.value, "bias": bias}


@dataclass(frozen=True, slots=True)
class Kind:
    """A cell by name."""

    make: Callable[[int, int, int], brainstate.nn.Module]
    about: str


CELLS: dict[str, Kind] = {
    "gru": Kind(_gru, "gated recurrent unit"),
    "lstm": Kind(_lstm, "long short-term memory"),
    "rnn": Kind(_rnn, "plain tanh recurrence: nothing passes from step to step but by weights"),
    "leaky": Kind(Leaky, "leaky tanh rate units"),
    "mingru": Kind(_min_gru, "gates of the input only: element-wise, D_RTRL is exact"),
    "lru": Kind(LRU, "linear recurrence, complex eigenvalues: element-wise, D_RTRL is exact"),
    "alif": Kind(ALIF, "spiking, recurrent, adaptive threshold: two states per unit"),
    "minlstm": Kind(_minlstm, "two gates of the input only: element-wise, D_RTRL is exact"),
    "adlif": Kind(
        _spiking(nn.AdLIFCell, "tau_w", "tau"), "spiking, recurrent, adapts below threshold"
    ),
    "gif": Kind(
        _spiking(nn.GIFCell, "tau_2", "tau", "tau_1"), "spiking, recurrent, currents after a spike"
    ),
}
