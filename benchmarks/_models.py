"""The benchmark networks, written once with what both packages offer, and their seeded data.

Every network is a recurrent core, which a learner wraps, and a linear read-out outside of it: the
published package gives a plain weight inside a learner no gradient. Sizes that are not
given follow from the number of units: a quarter as many inputs, and `OUTPUTS` outputs.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace as bt

OUTPUTS = 16
CHANNELS = 8
DENSITY = 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """Units, samples, steps; inputs, if not a quarter as many as units."""

    n: int
    b: int
    t: int
    i: int = 0

    @property
    def inputs(self) -> int:
        return self.i or max(8, self.n // 4)


class Core(brainstate.nn.Module):
    """A recurrent layer whose hidden states start at zero."""

    def __init__(self, **shapes: tuple[int, ...]):
        super().__init__()
        self.shapes = shapes

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        for name, shape in self.shapes.items():
            setattr(self, name, brainstate.HiddenState(jnp.zeros((batch_size, *shape))))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        for name, shape in self.shapes.items():
            getattr(self, name).value = jnp.zeros((batch_size, *shape))


def weight(*shape: int, value: float = 0.0) -> brainstate.ParamState:
    return brainstate.ParamState(jnp.full(shape, value))


class GRULayers(brainstate.nn.Module):
    def __init__(self, layers: int, inputs: int, n: int):
        super().__init__()
        self.layers = [bt.nn.GRUCell(n if i else inputs, n) for i in range(layers)]

    def update(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@jax.custom_jvp
def spike(v: Any) -> Any:
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: tuple, tangents: tuple) -> tuple:
    (v,), (dv,) = primals, tangents
    return spike(v), dv * 0.3 / (1 + 5 * jnp.abs(v)) ** 2


class ALIF(Core):
    """Spiking units with a membrane and an adaptive threshold."""

    def __init__(self, inputs: int, n: int):
        super().__init__(v=(n,), a=(n,))
        self.w, self.u = weight(inputs, n), weight(n, n)

    def update(self, x: Any) -> Any:
        v, a = self.v.value, self.a.value
        z = self.spikes(v, a)
        current = bt.matmul(x, self.w.value) + bt.matmul(z, self.u.value)
        self.v.value = 0.9 * v + 0.3 * current - z
        self.a.value = 0.98 * a + 0.02 * z
        return self.spikes(self.v.value, self.a.value)

    @staticmethod
    def spikes(v: Any, a: Any) -> Any:
        return spike(v - 0.5 - 1.8 * a)


class MinGRU(Core):
    """Gates that read the input only: the recurrence is element-wise."""

    def __init__(self, inputs: int, n: int):
        super().__init__(h=(n,))
        self.wz, self.wc, self.bz = weight(inputs, n), weight(inputs, n), weight(n, value=-1.0)

    def update(self, x: Any) -> Any:
        z = jax.nn.sigmoid(bt.matmul(x, self.wz.value, self.bz.value))
        self.h.value = (1 - z) * self.h.value + z * bt.matmul(x, self.wc.value)
        return self.h.value


class LRU(Core):
    """A linear recurrence with trained complex eigenvalues, as two real states."""

    def __init__(self, inputs: int, n: int):
        super().__init__(re=(n,), im=(n,))
        self.radius, self.angle = weight(n, value=2.0), weight(n, value=0.3)
        self.wr, self.wi = weight(inputs, n), weight(inputs, n)

    def update(self, x: Any) -> Any:
        radius = bt.element_wise(self.radius.value, weight_fn=jax.nn.sigmoid)
        angle = bt.element_wise(self.angle.value)
        c, s = radius * jnp.cos(angle), radius * jnp.sin(angle)
        re, im = self.re.value, self.im.value
        self.re.value = c * re - s * im + bt.matmul(x, self.wr.value)
        self.im.value = s * re + c * im + bt.matmul(x, self.wi.value)
        return self.re.value


class ConvRNN(Core):
    """A leaky convolutional layer along one spatial axis; the read-out sees its mean."""

    def __init__(self, length: int):
        super().__init__(h=(length, CHANNELS))
        self.k, self.r = weight(3, 2, CHANNELS), weight(3, CHANNELS, CHANNELS)

    def update(self, x: Any) -> Any:
        h, layout = self.h.value, ("NHC", "HIO", "NHC")
        new = bt.conv(x, self.k.value, dimension_numbers=layout)
        new += bt.conv(h, self.r.value, dimension_numbers=layout)
        self.h.value = 0.8 * h + 0.2 * jnp.tanh(new)
        return self.h.value.mean(axis=1)


class SparseRNN(Core):
    """A leaky layer with a fixed number of recurrent synapses per unit."""

    def __init__(self, inputs: int, n: int):
        super().__init__(h=(n,))
        rng, fan = np.random.default_rng(0), max(1, round(DENSITY * n))
        columns = np.concatenate([rng.choice(n, fan, replace=False) for _ in range(n)])
        starts = np.arange(0, n * fan + 1, fan)
        data = rng.normal(size=n * fan).astype(np.float32) / np.sqrt(fan)
        self.w, self.u = weight(inputs, n), brainstate.ParamState(jnp.asarray(data))
        parts = (jnp.asarray(data), jnp.asarray(columns), jnp.asarray(starts))
        self.structure = brainevent.CSR(parts, shape=(n, n))
        if importlib.util.find_spec("numba") is None:
            brainevent.config.set_backend("cpu", "jax_raw")

    def update(self, x: Any) -> Any:
        h = self.h.value
        rec = bt.sparse_matmul(h, self.u.value, sparse_mat=self.structure)
        self.h.value = 0.8 * h + 0.2 * jnp.tanh(bt.matmul(x, self.w.value) + rec)
        return self.h.value


CORES: dict[str, Callable[[int, int], brainstate.nn.Module]] = {
    "gru": bt.nn.GRUCell,
    **{f"gru{k}": partial(GRULayers, k) for k in (2, 6, 24)},
    "lstm": bt.nn.LSTMCell,
    "alif": ALIF,
    "mingru": MinGRU,
    "lru": LRU,
    "conv": lambda inputs, n: ConvRNN(n // CHANNELS),
    "sparse": SparseRNN,
}


class Net(brainstate.nn.Module):
    """A core and its read-out; `update` is the step that BPTT differentiates."""

    def __init__(self, name: str, size: Size):
        super().__init__()
        self.core = CORES[name](size.inputs, size.n)
        self.out = weight(CHANNELS if name == "conv" else size.n, OUTPUTS)

    def update(self, x: Any) -> Any:
        return self.read(self.core(x))

    def read(self, features: Any) -> Any:
        return features @ self.out.value


def network(name: str, size: Size) -> Net:
    """A network with the same weights on every side: noise seeded by the parameter's path."""
    net = Net(name, size)
    for path, state in net.states(brainstate.ParamState).items():
        rng = np.random.default_rng(zlib.crc32(".".join(map(str, path)).encode()))
        state.value = jax.tree.map(lambda a, rng=rng: drawn(a, rng), state.value)
    return net


def drawn(a: Any, rng: np.random.Generator) -> jax.Array:
    """A vector keeps its value, give or take a tenth; the rest is scaled by its fan-in."""
    noise = rng.normal(size=a.shape).astype(np.float32)
    return (
        a + 0.1 * noise
        if a.ndim == 1
        else jnp.asarray(noise / np.sqrt(np.prod(a.shape[:-1], dtype=np.float32)))
    )


def data(name: str, size: Size) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets with leading axes (steps, samples)."""
    rng = np.random.default_rng(1)
    features = (size.n // CHANNELS, 2) if name == "conv" else (size.inputs,)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
    return draw(size.t, size.b, *features), draw(size.t, size.b, OUTPUTS)


def loss(outputs: Any, targets: Any) -> Any:
    """Mean squared error of every step."""
    return ((outputs - targets) ** 2).mean(axis=(-2, -1))
