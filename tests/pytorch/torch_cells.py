"""Cells as people write them in PyTorch: one step, `net(state, x) -> (state, out)`."""
# ruff: noqa: E501

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IN, H, OUT = SIZES = 3, 4, 2


class Spike(torch.autograd.Function):
    """A step whose derivative is that of a fast sigmoid."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


spike = Spike.apply  # as users hold it, from before there is a learner


class Recurrent(nn.Module):
    """A cell of torch and a read-out."""

    def __init__(self, cell, sizes=SIZES):
        super().__init__()
        inputs, units, outputs = sizes
        self.cell, self.out = cell(inputs, units), nn.Linear(units, outputs)

    def forward(self, state, x):
        state = self.cell(x, state)
        return state, self.out(state[0] if isinstance(state, tuple) else state)


class MinGRU(nn.Module):
    def __init__(self, sizes=SIZES):
        super().__init__()
        inputs, units, outputs = sizes
        self.gates, self.out = nn.Linear(inputs, 2 * units), nn.Linear(units, outputs)

    def forward(self, h, x):
        z, g = self.gates(x).chunk(2, -1)
        z = torch.sigmoid(z)
        h = (1 - z) * h + z * g
        return h, self.out(h)


class LRU(nn.Module):
    """Complex poles as polar parameters."""

    def __init__(self):
        super().__init__()
        self.nu, self.theta = nn.Parameter(torch.rand(H) - 1), nn.Parameter(torch.rand(H))
        self.re, self.im = nn.Linear(IN, H, bias=False), nn.Linear(IN, H, bias=False)
        self.out = nn.Linear(2 * H, OUT)

    def forward(self, h, x):
        size = torch.exp(-torch.exp(self.nu))
        pole = torch.polar(size, self.theta)
        h = pole * h + torch.sqrt(1 - size**2) * torch.complex(self.re(x), self.im(x))
        return h, self.out(torch.cat([h.real, h.imag], -1))


class S5(nn.Module):
    """Poles that decay, as real numbers in pairs, discretised by a learned time step."""

    def __init__(self):
        super().__init__()
        self.decay, self.frequency = nn.Parameter(torch.rand(H)), nn.Parameter(torch.rand(H))
        self.log_dt = nn.Parameter(torch.rand(H) - 2)
        self.b, self.c = nn.Linear(IN, 2 * H, bias=False), nn.Linear(2 * H, OUT)
        self.skip = nn.Linear(IN, OUT)

    def forward(self, state, x):
        real, imag = state
        dt = F.softplus(self.log_dt)
        size, angle = torch.exp(-dt * F.softplus(self.decay)), dt * self.frequency
        cos, sin = size * torch.cos(angle), size * torch.sin(angle)
        u, v = self.b(x).split(H, dim=-1)
        real, imag = cos * real - sin * imag + dt * u, sin * real + cos * imag + dt * v
        return (real, imag), self.c(torch.cat([real, imag], -1)) + self.skip(x)


class Mamba2(nn.Module):
    """One step of a selective state space: heads of a scalar decay, with an outer product."""

    heads, width, inner = 2, 2, 3

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(IN, self.heads * self.width + 2 * self.inner + self.heads)
        self.a_log, self.dt_bias = (
            nn.Parameter(torch.rand(self.heads)),
            nn.Parameter(torch.rand(self.heads)),
        )
        self.d = nn.Parameter(torch.ones(self.heads))
        self.out = nn.Linear(self.heads * self.width, OUT)

    def forward(self, h, token):
        sizes = [self.heads * self.width, self.inner, self.inner, self.heads]
        x, b, c, dt = self.project(token).split(sizes, -1)
        x = F.silu(x).view(-1, self.heads, self.width)
        dt = F.softplus(dt + self.dt_bias)
        decay = torch.exp(-dt * torch.exp(self.a_log))
        h = decay[:, :, None, None] * h + torch.einsum("bh,bhp,bn->bhpn", dt, x, b)
        y = torch.einsum("bhpn,bn->bhp", h, c) + self.d[:, None] * x
        return h, self.out(y.flatten(1))


class RWKV(nn.Module):
    """The time mixing of RWKV, with its running maximum."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(IN))
        self.key, self.value = nn.Linear(IN, H, bias=False), nn.Linear(IN, H, bias=False)
        self.gate, self.out = nn.Linear(IN, H, bias=False), nn.Linear(H, OUT)
        self.decay, self.bonus = nn.Parameter(torch.rand(H)), nn.Parameter(torch.rand(H))

    def forward(self, state, x):
        last, num, den, top = state
        mixed = x * self.mix + last * (1 - self.mix)
        k, v, r = self.key(mixed), self.value(mixed), torch.sigmoid(self.gate(mixed))
        most = torch.maximum(top, self.bonus + k)
        old, new = torch.exp(top - most), torch.exp(self.bonus + k - most)
        y = r * (old * num + new * v) / (old * den + new)
        shrunk = top - torch.exp(self.decay)
        most = torch.maximum(shrunk, k)
        old, new = torch.exp(shrunk - most), torch.exp(k - most)
        return (x, old * num + new * v, old * den + new, most), self.out(y)


class ConvLIF(nn.Module):
    """Two spiking layers of images, and a membrane that only sums."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, stride=2)
        self.out = nn.Linear(2 * 2 * 2, OUT)

    def forward(self, state, x):
        u, v = state
        u = 0.9 * u * (1 - spike(u - 1).detach()) + self.first(x)
        v = 0.8 * v + self.second(spike(u - 1))
        return (u, v), self.out(v.flatten(1))


class Stack(nn.Module):
    """Two layers with a layer norm between them, and a clipped read-out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.GRUCell(IN, H), nn.RNNCell(H, H, nonlinearity="relu")
        self.norm, self.out = nn.LayerNorm(H), nn.Linear(H, OUT)

    def forward(self, state, x):
        a, b = state
        a = self.first(x, a)
        b = self.second(self.norm(a), b)
        return (a, b), torch.clamp(self.out(b), -3, 3)


class Feeding(nn.Module):
    """A layer whose neurons keep their state inside."""

    def __init__(self, neurons):
        super().__init__()
        self.weights, self.neurons = nn.Linear(IN, H), neurons

    def forward(self, x):
        return self.neurons(self.weights(x))


class Passing(nn.Module):
    """A layer whose neurons return their output and their states."""

    def __init__(self, neurons, recurrent=False):
        super().__init__()
        self.weights, self.neurons, self.recurrent = nn.Linear(IN, H), neurons, recurrent

    def forward(self, state, x):
        out, *state = self.neurons(self.weights(x), *state)
        return ((out, *state) if self.recurrent else tuple(state)), out


class Given(nn.Module):
    """Neurons that take their state as one argument and return it."""

    def __init__(self, neurons, weights=True):
        super().__init__()
        self.weights, self.neurons = nn.Linear(IN, H) if weights else nn.Identity(), neurons

    def forward(self, state, x):
        out, state = self.neurons(self.weights(x), state)
        return state, out


@dataclass(frozen=True)
class Case:
    net: Callable[[], nn.Module]
    state: Callable[[int], Any]  # of a batch, in float64
    exact: bool  # whether D-RTRL is
    inputs: tuple[int, ...] = (IN,)
    dtype: torch.dtype = torch.float64
    size: float = 2  # of the inputs


def zeros(*shapes):
    tensors = lambda b: tuple(torch.zeros(b, *shape, dtype=torch.float64) for shape in shapes)
    return tensors if len(shapes) != 1 else lambda b: tensors(b)[0]


def begun(net):
    """The state of neurons that make their own, after no input."""

    def state(batch):
        with torch.no_grad():
            return net().double()(None, torch.zeros(batch, IN, dtype=torch.float64))[0]

    return state


h = (H,)
CELLS = {
    "rnn": Case(lambda: Recurrent(nn.RNNCell), zeros(h), False),
    "gru": Case(lambda: Recurrent(nn.GRUCell), zeros(h), False),
    "lstm": Case(lambda: Recurrent(nn.LSTMCell), zeros(h, h), False),
    "min_gru": Case(MinGRU, zeros(h), True),
    "lru": Case(LRU, lambda b: torch.zeros(b, H, dtype=torch.complex128), True),
    "s5": Case(S5, zeros(h, h), True),
    "mamba2": Case(Mamba2, zeros((2, 2, 3)), True),
    "rwkv": Case(
        RWKV,
        lambda b: (*zeros((IN,), h, h)(b), torch.full((b, H), -9.0, dtype=torch.float64)),
        False,  # what mixes the inputs is before a matrix
    ),
    "conv_lif": Case(ConvLIF, zeros((2, 5, 5), (2, 2, 2)), False, (1, 5, 5)),
    "stack": Case(Stack, zeros(h, h), False),
}
none = lambda batch: None
single = torch.float32  # their surrogates return float32


def snntorch_cells():
    import snntorch as snn

    leaky = lambda **more: snn.Leaky(0.9, learn_beta=True, **more)
    return {
        "leaky": Case(lambda: Passing(leaky()), lambda b: (zeros(h)(b),), True),
        "leaky_inside": Case(lambda: Feeding(leaky(init_hidden=True)), none, True),
        "synaptic": Case(lambda: Passing(snn.Synaptic(0.9, 0.8)), zeros(h, h), True),
        "alpha": Case(lambda: Feeding(snn.Alpha(0.9, 0.8, init_hidden=True)), none, True),
        "r_leaky": Case(
            lambda: Passing(snn.RLeaky(0.9, linear_features=H), True), zeros(h, h), False, dtype=single
        ),
        "r_synaptic": Case(
            lambda: Feeding(snn.RSynaptic(0.9, 0.8, linear_features=H, init_hidden=True)),
            *(none, False), dtype=single,
        ),
        "slstm": Case(lambda: Passing(snn.SLSTM(H, H)), zeros(h, h), False),
    }  # fmt: skip


def spikingjelly_cells():
    from spikingjelly.activation_based import neuron

    return {
        "lif_node": Case(lambda: Feeding(neuron.LIFNode()), none, True),
        "parametric_lif_node": Case(lambda: Feeding(neuron.ParametricLIFNode()), none, True),
    }


def norse_cells():
    import norse.torch as norse

    found = {}
    for name in ("LIFCell", "LIFRecurrentCell", "LSNNCell", "LIFAdExCell"):
        recurrent = "Recurrent" in name
        sizes = (IN, H) if recurrent else ()
        net = lambda name=name, sizes=sizes: Given(getattr(norse, name)(*sizes), not sizes)
        found[name] = Case(net, begun(net), not recurrent, size=20)
    return found


def module_of(case):
    """The module of a case, away from the kinks of its spikes."""
    torch.manual_seed(3)
    return case.net().to(case.dtype)


def sequences(case, steps, batch):
    torch.manual_seed(4)
    xs = case.size * torch.randn(steps, batch, *case.inputs, dtype=torch.float64)
    return xs.to(case.dtype)


def converted(state, dtype):
    """A state in the type of a case."""
    if state is None or dtype == torch.float64:
        return state
    return torch.utils._pytree.tree_map(lambda a: a.to(dtype), state)
