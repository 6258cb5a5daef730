"""Recurrent steps of plain JAX and of other libraries, `step(params, state, x) -> (state, out)`.

A *cell* is a function of its sizes (inputs, units, samples) to (step, params, state). `TWINS` says
which cell in plain JAX does what a cell of another library does, with its products on weights that
are stored as inputs x units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.nn import sigmoid, silu, softplus, tanh

from braintrace.lab.comparison._model import pure_model

Cell = tuple[Callable[[Any, Any, Any], tuple[Any, Any]], Any, Any]
Make = Callable[[int, int, int], Cell]


def drawn(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Matrices scaled by their fan-in; vectors are zero."""
    rng = np.random.default_rng(seed)
    scale = lambda s: (s[0] ** -0.5) if len(s) > 1 else 0.0
    draw = lambda s: jnp.asarray((scale(s) * rng.normal(size=s)).astype(np.float32))
    return {name: draw(shape) for name, shape in shapes.items()}


# -------------------------------------------------------------------------------- plain JAX


def gru(i: int, n: int, b: int) -> Cell:
    """All gates of the input in one product, all gates of the state in another one."""

    def step(p, h, x):
        (xr, xz, xn), (hr, hz, hn) = (
            jnp.split(a, 3, -1) for a in (x @ p["i"] + p["b"], h @ p["h"])
        )
        r, z = sigmoid(xr + hr), sigmoid(xz + hz)
        h = (1 - z) * tanh(xn + r * (hn + p["bn"])) + z * h
        return h, h

    return step, drawn(i=(i, 3 * n), h=(n, 3 * n), b=(3 * n,), bn=(n,)), jnp.zeros((b, n))


def gru_apart(i: int, n: int, b: int) -> Cell:
    """A product for each gate of the input and of the state."""

    def step(p, h, x):
        r = sigmoid(x @ p["ir"] + p["br"] + h @ p["hr"])
        z = sigmoid(x @ p["iz"] + p["bz"] + h @ p["hz"])
        new = tanh(x @ p["in"] + p["bn"] + r * (h @ p["hn"] + p["bh"]))
        h = (1 - z) * new + z * h
        return h, h

    of_x, of_h = ({f"{s}{g}": (k, n) for g in "rzn"} for s, k in (("i", i), ("h", n)))
    biases = {f"b{g}": (n,) for g in "rznh"}
    return step, drawn(**of_x, **of_h, **biases), jnp.zeros((b, n))


def gru_joined(i: int, n: int, b: int) -> Cell:
    """Products of input and state together: two gates in one, the candidate in another one."""

    def step(p, h, x):
        r, z = jnp.split(sigmoid(jnp.concatenate([x, h], -1) @ p["rz"] + p["brz"]), 2, -1)
        new = tanh(jnp.concatenate([x, r * h], -1) @ p["n"] + p["bn"])
        h = (1 - z) * h + z * new
        return h, h

    params = drawn(rz=(i + n, 2 * n), n=(i + n, n), brz=(2 * n,), bn=(n,))
    return step, params, jnp.zeros((b, n))


def _lstm(gates: Callable[[Any, Any, Any], Any], params: Any, n: int, b: int) -> Cell:
    def step(p, state, x):
        h, c = state
        i, f, g, o = gates(p, h, x)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        return (h, c), h

    return step, params, (jnp.zeros((b, n)), jnp.zeros((b, n)))


def lstm(i: int, n: int, b: int) -> Cell:
    gates = lambda p, h, x: jnp.split(x @ p["i"] + h @ p["h"] + p["b"], 4, -1)
    return _lstm(gates, drawn(i=(i, 4 * n), h=(n, 4 * n), b=(4 * n,)), n, b)


def lstm_apart(i: int, n: int, b: int) -> Cell:
    gates = lambda p, h, x: [x @ p[f"i{g}"] + (h @ p[f"h{g}"] + p[f"b{g}"]) for g in "ifgo"]
    of_x, of_h = ({f"{s}{g}": (k, n) for g in "ifgo"} for s, k in (("i", i), ("h", n)))
    return _lstm(gates, drawn(**of_x, **of_h, **{f"b{g}": (n,) for g in "ifgo"}), n, b)


def lstm_joined(i: int, n: int, b: int) -> Cell:
    gates = lambda p, h, x: jnp.split(jnp.concatenate([x, h], -1) @ p["w"] + p["b"], 4, -1)
    return _lstm(gates, drawn(w=(i + n, 4 * n), b=(4 * n,)), n, b)


def simple(i: int, n: int, b: int) -> Cell:
    def step(p, h, x):
        h = tanh(x @ p["i"] + p["b"] + h @ p["h"])
        return h, h

    return step, drawn(i=(i, n), h=(n, n), b=(n,)), jnp.zeros((b, n))


def diagonal(i: int, n: int, b: int) -> Cell:
    def step(p, h, x):
        h = sigmoid(p["a"]) * h + x @ p["i"]
        return h, h

    return step, drawn(i=(i, n)) | {"a": jnp.linspace(0.0, 4.0, n)}, jnp.zeros((b, n))


def coupled(i: int, n: int, b: int) -> Cell:
    """Diagonal units that meet in a fixed matrix: every weight reaches all of them."""
    fixed = drawn(2, r=(n, n))["r"] / 2

    def step(p, h, x):
        h = tanh(sigmoid(p["a"]) * h + x @ p["i"] + h @ fixed)
        return h, h

    return step, drawn(i=(i, n)) | {"a": jnp.linspace(0.0, 4.0, n)}, jnp.zeros((b, n))


def lru(i: int, n: int, b: int) -> Cell:
    """A linear recurrence with trained complex eigenvalues."""

    def step(p, h, x):
        radius, angle = jnp.exp(-jnp.exp(p["nu"])), jnp.exp(p["theta"])
        gain = jnp.sqrt(1 - radius**2)
        h = radius * jnp.exp(1j * angle) * h + gain * (x @ (p["re"] + 1j * p["im"]))
        return h, (h @ (p["cr"] + 1j * p["ci"])).real + x @ p["d"]

    params = drawn(re=(i, n), im=(i, n), cr=(n, n), ci=(n, n), d=(i, n))
    vectors = {"nu": jnp.linspace(-4.0, -1.0, n), "theta": jnp.linspace(-4.0, 0.0, n)}
    return step, params | vectors, jnp.zeros((b, n), jnp.complex64)


def mingru(i: int, n: int, b: int) -> Cell:
    def step(p, h, x):
        z = sigmoid(x @ p["z"] + p["bz"])
        h = (1 - z) * h + z * (x @ p["h"] + p["bh"])
        return h, h

    return step, drawn(z=(i, n), h=(i, n), bz=(n,), bh=(n,)), jnp.zeros((b, n))


@jax.custom_jvp
def spike(v: Any) -> Any:
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: tuple, tangents: tuple) -> tuple:
    (v,), (dv,) = primals, tangents
    return spike(v), dv * 0.3 / (1 + 5 * jnp.abs(v)) ** 2


def alif(i: int, n: int, b: int) -> Cell:
    """Spiking units with recurrent weights, a membrane and an adaptive threshold."""

    def step(p, state, x):
        v, a = state
        z = spike(v - 0.5 - 1.8 * a)
        v = 0.9 * v + 0.3 * (x @ p["i"] + z @ p["h"]) - z
        a = 0.98 * a + 0.02 * z
        return (v, a), spike(v - 0.5 - 1.8 * a)

    return step, drawn(i=(i, n), h=(n, n)), (jnp.zeros((b, n)), jnp.zeros((b, n)))


def mamba(i: int, n: int, b: int, heads: int = 4, keys: int = 16, taps: int = 4) -> Cell:
    """S = exp(-dt exp(a)) S + dt u b', y = S c + d u: u, b, c through a short convolution."""
    d = 2 * n
    sizes = (d, d + 2 * keys, heads)  # gate; u, b, c; dt

    def step(p, state, x):
        z, ubc, dt = jnp.split(x @ p["in"], np.cumsum(sizes)[:-1], -1)
        recent = jnp.concatenate([state["past"], ubc[:, None]], 1)
        u, k, q = jnp.split(silu((recent * p["conv"]).sum(1)), (d, d + keys), -1)
        u, dt = u.reshape(-1, heads, d // heads), softplus(dt + p["dt"])
        s = jnp.exp(-dt * jnp.exp(p["a"]))[..., None, None] * state["s"]
        s = s + (dt[..., None] * u)[..., None] * k[:, None, None, :]
        y = (jnp.einsum("bhvk,bk->bhv", s, q) + p["d"][:, None] * u).reshape(-1, d) * silu(z)
        return {"past": recent[:, 1:], "s": s}, normed(y, p["norm"]) @ p["out"]

    params = drawn(**{"in": (i, sum(sizes))}, conv=(taps, sizes[1]), out=(d, n), a=(heads,))
    params |= {"dt": jnp.zeros(heads), "d": jnp.ones(heads), "norm": jnp.ones(d)}
    state = {"past": (b, taps - 1, sizes[1]), "s": (b, heads, d // heads, keys)}
    return step, params, {k: jnp.zeros(s) for k, s in state.items()}


def normed(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain


# ---------------------------------------------------------------------------------- in layers


def chained(*makes: Make) -> Make:
    """One layer after another."""

    def make(i: int, n: int, b: int) -> Cell:
        layers = [m(n if k else i, n, b) for k, m in enumerate(makes)]

        def step(p, states, x):
            new = []
            for (layer, *_), q, h in zip(layers, p, states, strict=True):
                h, x = layer(q, h, x)
                new.append(h)
            return new, x

        return step, [p for _, p, _ in layers], [h for *_, h in layers]

    return make


def stack(core: Make, layers: int = 4) -> Make:
    """Residual blocks of a recurrent layer and an MLP, each after a norm; inputs of n units."""

    def block(i: int, n: int, b: int) -> Cell:
        layer, params, state = core(n, n, b)
        own = drawn(up=(n, 4 * n), down=(4 * n, n)) | {"g": jnp.ones(n), "k": jnp.ones(n)}

        def step(p, h, x):
            h, y = layer(p["core"], h, normed(x, p["g"]))
            x = x + y
            return h, x + jax.nn.gelu(normed(x, p["k"]) @ p["up"]) @ p["down"]

        return step, own | {"core": params}, state

    return chained(*[block] * layers)


def with_readout(make: Make, outputs: int) -> Make:
    """A cell and a linear read-out of what it puts out."""

    def made(i: int, n: int, b: int) -> Cell:
        cell, params, state = make(i, n, b)

        def step(p, h, x):
            h, y = cell(p["cell"], h, x)
            return h, y @ p["out"]

        return step, {"cell": params, **drawn(1, out=(n, outputs))}, state

    return made


# ------------------------------------------------------------------------------ other libraries


def _equinox(kind: Any) -> Make:
    def make(i: int, n: int, b: int) -> Cell:
        one = lambda cell, h, x: (lambda h: (h, jax.tree.leaves(h)[0]))(cell(x, h))
        zeros = jnp.zeros((b, n))
        state = (zeros, zeros) if kind is eqx.nn.LSTMCell else zeros
        return jax.vmap(one, (None, 0, 0)), kind(i, n, key=jax.random.key(1)), state

    return make


def _nnx(kind: Any) -> Make:
    def make(i: int, n: int, b: int) -> Cell:
        cell = kind(i, n, rngs=nnx.Rngs(0))
        graph, params = nnx.split(cell)
        step = lambda params, h, x: nnx.merge(graph, params)(h, x)
        return step, params, cell.initialize_carry((b, i), nnx.Rngs(1))

    return make


def _linen(kind: Any) -> Make:
    def make(i: int, n: int, b: int) -> Cell:
        cell = kind(n)
        state = cell.initialize_carry(jax.random.key(0), (b, i))
        params = cell.init(jax.random.key(1), state, jnp.zeros((b, i)))["params"]
        return (lambda p, h, x: cell.apply({"params": p}, h, x)), params, state

    return make


def _brainstate(kind: Any) -> Make:
    def make(i: int, n: int, b: int) -> Cell:
        with brainstate.random.seed_context(0):
            model = pure_model(kind(i, n), b, jnp.zeros((b, i)))
        return model.step, model.params, model.state

    return make


FOREIGN: dict[str, Make] = {
    "eqx GRU": _equinox(eqx.nn.GRUCell),
    "eqx LSTM": _equinox(eqx.nn.LSTMCell),
    "nnx GRU": _nnx(nnx.GRUCell),
    "nnx LSTM": _nnx(nnx.LSTMCell),
    "nnx OptimizedLSTM": _nnx(nnx.OptimizedLSTMCell),
    "nnx SimpleCell": _nnx(nnx.SimpleCell),
    "linen GRU": _linen(linen.GRUCell),
    "linen LSTM": _linen(linen.LSTMCell),
    "brainstate GRU": _brainstate(brainstate.nn.GRUCell),
    "brainstate LSTM": _brainstate(brainstate.nn.LSTMCell),
}
TWINS: dict[str, Make] = {
    "eqx GRU": gru,
    "eqx LSTM": lstm,
    "nnx GRU": gru,
    "nnx LSTM": lstm_apart,
    "nnx OptimizedLSTM": lstm,
    "nnx SimpleCell": simple,
    "linen GRU": gru_apart,
    "linen LSTM": lstm_apart,
    "brainstate GRU": gru_joined,
    "brainstate LSTM": lstm_joined,
}
