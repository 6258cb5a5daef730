"""The network that all commands train: a recurrent cell by name, and a linear read-out.

`memory` is the number of steps that a task needs; time constants start spread up to it.
"""

from __future__ import annotations

from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
from jax import Array

from ... import nn
from ...nn._cell import Cell, join
from ...ops import element_wise, matmul
from ..tasks import SequenceTask

MakeCell = Callable[[int, int, int], brainstate.nn.Module]  # (inputs, units, memory)


class LRU(Cell):
    """A linear recurrence with trained complex eigenvalues, as two real states.

    `λ = exp(-exp(ν) + i θ)`, `h = λ h + sqrt(1 - |λ|²) B x`, and `gelu(C h)` is returned. Unlike
    `nn.LRUCell` it has no scale of its own, no way past the states, and as many outputs as states.
    """

    state_names = ("re", "im")

    def __init__(self, inputs: int, units: int, memory: int):
        super().__init__(inputs, units)
        self.rate = brainstate.ParamState(-jnp.log(_times(units, memory)))
        self.angle = brainstate.ParamState(brainstate.random.uniform(0, 0.3, (units,)))
        self.to_re, self.to_im = (nn.Linear(inputs, units, b_init=None) for _ in range(2))
        self.mix = nn.Linear(2 * units, units)

    def update(self, x: Array) -> Array:
        radius = element_wise(self.rate.value, weight_fn=lambda rate: jnp.exp(-jnp.exp(rate)))
        angle = element_wise(self.angle.value)
        c, s = radius * jnp.cos(angle), radius * jnp.sin(angle)
        scale = jnp.sqrt(1 - radius**2 + 1e-6)
        re, im = self.re.value, self.im.value
        self.re.value = c * re - s * im + scale * self.to_re(x)
        self.im.value = s * re + c * im + scale * self.to_im(x)
        return jax.nn.gelu(self.mix(join(self.re.value, self.im.value)))


class Leaky(Cell):
    """Leaky rate units, `h = a h + (1 - a) tanh(W[x, h])`, with a fixed leak per unit."""

    def __init__(self, inputs: int, units: int, memory: int):
        super().__init__(inputs, units)
        self.keep = jnp.exp(-1 / _times(units, memory))
        self.W = nn.Linear(inputs + units, units, brainstate.nn.init.XavierNormal())

    def _next(self, x: Array, h: Array) -> Array:
        return self.keep * h + (1 - self.keep) * jnp.tanh(self.W(join(x, h)))


spike = nn.surrogate("fast_sigmoid", width=0.5, height=0.5)


class ALIF(Cell):
    """Spiking units with a membrane `v` and a threshold `1 + 0.5 a` that rises with every spike.

    `z = step(v - 1 - 0.5 a)`, `v = 0.9 v + W x + U z - z`, `a = ρ a + z`; returns the new spikes.
    """

    state_names = ("v", "a")

    def __init__(self, inputs: int, units: int, memory: int):
        super().__init__(inputs, units)
        normal = brainstate.random.normal
        self.W = brainstate.ParamState(normal(0, 1 / inputs**0.5, (inputs, units)))
        self.U = brainstate.ParamState(normal(0, 0.3 / units**0.5, (units, units)))
        self.rho = jnp.exp(-1 / _times(units, 2 * memory))

    def update(self, x: Array) -> Array:
        v, a = self.v.value, self.a.value
        z = spike(v - 1 - 0.5 * a)
        self.v.value = 0.9 * v + matmul(x, self.W.value) + matmul(z, self.U.value) - z
        self.a.value = self.rho * a + z
        return spike(self.v.value - 1 - 0.5 * self.a.value)


def _gated(kind: type[Cell], **biases: Callable[[Array], Array]) -> MakeCell:
    """A cell whose layers have biases that are functions of the logarithms of time constants."""

    def make(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
        cell = kind(inputs, units)
        times = jnp.log(_times(units, memory))
        for layer, bias in biases.items():
            set_bias(getattr(cell, layer), bias(times))
        return cell

    return make


def _min_gru(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
    times = _times(units, memory)  # drawn before the weights, unlike in the other cells
    cell = nn.MinGRUCell(inputs, units, brainstate.nn.init.KaimingNormal())
    set_bias(cell.Wz, -jnp.log(times))
    return cell


def _spiking(kind: Callable[..., brainstate.nn.Module], slow: str, *fast: str) -> MakeCell:
    """A spiking cell whose slow time constant is spread up to what the task needs."""

    def make(inputs: int, units: int, memory: int) -> brainstate.nn.Module:
        with brainstate.environ.context(dt=1.0):
            times = {**dict.fromkeys(fast, 10.0), slow: _times(units, 2 * memory)}
            return kind(inputs, units, **times)

    return make


def _times(units: int, memory: int) -> Array:
    """Time constants in steps, as many short as long ones on a logarithmic scale."""
    return jnp.exp(brainstate.random.uniform(0, jnp.log(max(memory, 2)), (units,))) + 1


def set_bias(layer: nn.Linear, bias: Array) -> None:
    """Replace the bias of a layer."""
    layer.weight.value = {**layer.weight.value, "bias": bias}


CELLS: dict[str, MakeCell] = {
    "gru": _gated(nn.GRUCell, Wz=lambda t: -t),
    "lstm": _gated(nn.LSTMCell, Wf=lambda t: t - 1, Wi=lambda t: -t),  # the cell adds 1
    "rnn": lambda inputs, units, memory: nn.ValinaRNNCell(inputs, units, activation="tanh"),
    "leaky": Leaky,
    "mingru": _min_gru,
    "lru": LRU,
    "alif": ALIF,
    "minlstm": _gated(nn.MinLSTMCell, Wf=lambda t: t / 2, Wi=lambda t: -t / 2),
    "adlif": _spiking(nn.AdLIFCell, "tau_w", "tau"),
    "gif": _spiking(nn.GIFCell, "tau_2", "tau", "tau_1"),
}


class Network(brainstate.nn.Module):
    """A cell for the length of a task, and a linear read-out; the seed is that of the weights."""

    readout_weight = "readout.weight", "weight"  # for rules that send a reward back by it

    def __init__(self, cell: str | MakeCell, task: SequenceTask, units: int, seed: int):
        super().__init__()
        make = CELLS[cell] if isinstance(cell, str) else cell
        with brainstate.random.seed_context(seed):
            self.cell = make(task.inputs, units, task.length)
            self.readout = nn.Linear(units, task.outputs)

    def update(self, x: Array) -> Array:
        return self.readout(self.cell(x))
