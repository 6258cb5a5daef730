"""The cells of `torch_cells` written again in JAX, from their equations: `step(params, state, x)`.

Parameters have the names of the modules. A twin whose cell keeps its state inside has its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch_cells as cells
from jax.lax import complex as complex_of
from jax.lax import stop_gradient

sigmoid = jax.nn.sigmoid


def linear(params, name, x):
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def both(params, name, x, h):
    """The products of a cell of torch, by input and by state."""
    by = lambda kind, v: v @ params[f"{name}.weight_{kind}"].T + params[f"{name}.bias_{kind}"]
    return by("ih", x), by("hh", h)


# ----------------------------------------------------------------------------- cells of gates


def gru_cell(params, name, x, h):
    (ri, zi, ni), (rh, zh, nh) = (jnp.split(a, 3, -1) for a in both(params, name, x, h))
    r, z = sigmoid(ri + rh), sigmoid(zi + zh)
    return (1 - z) * jnp.tanh(ni + r * nh) + z * h


def lstm_cell(params, name, x, h, c):
    i, f, g, o = jnp.split(sum(both(params, name, x, h)), 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


def rnn(params, h, x):
    h = jnp.tanh(sum(both(params, "cell", x, h)))
    return h, linear(params, "out", h)


def gru(params, h, x):
    h = gru_cell(params, "cell", x, h)
    return h, linear(params, "out", h)


def lstm(params, state, x):
    h, c = lstm_cell(params, "cell", x, *state)
    return (h, c), linear(params, "out", h)


def min_gru(params, h, x):
    z, g = jnp.split(linear(params, "gates", x), 2, -1)
    h = (1 - sigmoid(z)) * h + sigmoid(z) * g
    return h, linear(params, "out", h)


def stack(params, state, x):
    a = gru_cell(params, "first", x, state[0])
    centred = a - a.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    normed = normed * params["norm.weight"] + params["norm.bias"]
    b = jax.nn.relu(sum(both(params, "second", normed, state[1])))
    return (a, b), jnp.clip(linear(params, "out", b), -3, 3)


# ------------------------------------------------------------------------ state-space models


def lru(params, h, x):
    size = jnp.exp(-jnp.exp(params["nu"]))
    pole = complex_of(size * jnp.cos(params["theta"]), size * jnp.sin(params["theta"]))
    drive = complex_of(linear(params, "re", x), linear(params, "im", x))
    h = pole * h + jnp.sqrt(1 - size**2) * drive
    return h, linear(params, "out", jnp.concatenate([h.real, h.imag], -1))


def s5(params, state, x):
    real, imag = state
    dt = jax.nn.softplus(params["log_dt"])
    size = jnp.exp(-dt * jax.nn.softplus(params["decay"]))
    cos, sin = size * jnp.cos(dt * params["frequency"]), size * jnp.sin(dt * params["frequency"])
    u, v = jnp.split(linear(params, "b", x), 2, -1)
    real, imag = cos * real - sin * imag + dt * u, sin * real + cos * imag + dt * v
    out = linear(params, "c", jnp.concatenate([real, imag], -1))
    return (real, imag), out + linear(params, "skip", x)


def mamba2(params, h, token):
    heads, width, inner = cells.Mamba2.heads, cells.Mamba2.width, cells.Mamba2.inner
    ends = np.cumsum([heads * width, inner, inner])
    x, b, c, dt = jnp.split(linear(params, "project", token), ends, -1)
    x = jax.nn.silu(x).reshape(-1, heads, width)
    dt = jax.nn.softplus(dt + params["dt_bias"])
    decay = jnp.exp(-dt * jnp.exp(params["a_log"]))
    h = decay[:, :, None, None] * h + jnp.einsum("bh,bhp,bn->bhpn", dt, x, b)
    y = jnp.einsum("bhpn,bn->bhp", h, c) + params["d"][:, None] * x
    return h, linear(params, "out", y.reshape(len(y), -1))


def rwkv(params, state, x):
    last, num, den, top = state
    mixed = x * params["mix"] + last * (1 - params["mix"])
    k, v = linear(params, "key", mixed), linear(params, "value", mixed)
    most = jnp.maximum(top, params["bonus"] + k)
    old, new = jnp.exp(top - most), jnp.exp(params["bonus"] + k - most)
    y = sigmoid(linear(params, "gate", mixed)) * (old * num + new * v) / (old * den + new)
    shrunk = top - jnp.exp(params["decay"])
    most = jnp.maximum(shrunk, k)
    old, new = jnp.exp(shrunk - most), jnp.exp(k - most)
    return (x, old * num + new * v, old * den + new, most), linear(params, "out", y)


# --------------------------------------------------------------------------------- spikes


def spike_with(slope):
    """A step whose derivative is `slope`."""

    @jax.custom_jvp
    def spike(v):
        return (v > 0).astype(v.dtype)

    spike.defjvp(lambda v, dv: (spike(*v), slope(*v) * dv[0]))
    return spike


fast = spike_with(lambda v: 1 / (1 + 10 * jnp.abs(v)) ** 2)
arc_tangent = spike_with(lambda v: 1 / (1 + (jnp.pi * v) ** 2))  # snnTorch's, alpha 2
super_spike = spike_with(lambda v: 1 / (1 + jnp.abs(v)) ** 2)  # Norse's
steep = spike_with(lambda v: 4 * sigmoid(4 * v) * (1 - sigmoid(4 * v)))  # SpikingJelly's
single = lambda number: float(np.float32(number))  # what a buffer of float32 holds


def convolved(params, name, x, stride, padding):
    args = (x, params[f"{name}.weight"], (stride, stride), [(padding, padding)] * 2)
    return jax.lax.conv_general_dilated(*args) + params[f"{name}.bias"][:, None, None]


def conv_lif(params, state, x):
    u, v = state
    u = 0.9 * u * (1 - stop_gradient(fast(u - 1))) + convolved(params, "first", x, 1, 1)
    v = 0.8 * v + convolved(params, "second", fast(u - 1), 2, 0)
    return (u, v), linear(params, "out", v.reshape(len(v), -1))


def fired(mem):
    """The spikes of a neuron of snnTorch, and the reset of the next step."""
    return arc_tangent(mem - 1).astype(jnp.float32)


def leaky(params, state, x):
    (mem,) = state
    reset = stop_gradient(fired(mem))
    mem = params["neurons.beta"] * mem + linear(params, "weights", x) - reset
    return (mem,), fired(mem)


def synaptic(params, state, x):
    syn, mem = state
    reset = stop_gradient(fired(mem))
    syn = single(0.9) * syn + linear(params, "weights", x)
    mem = single(0.8) * mem + syn - reset
    return (syn, mem), fired(mem)


def alpha(params, state, x):
    excites, inhibits, mem = state
    current, reset = linear(params, "weights", x), stop_gradient(fired(mem))
    a, b = single(0.9), single(0.8)
    excites, inhibits = a * excites + current, b * inhibits - current
    mem = (np.log(a) / (np.log(b) - np.log(a)) + 1) * (excites + inhibits)
    excites, inhibits, mem = ((1 - reset) * v for v in (excites, inhibits, mem))
    return (excites, inhibits, mem), fired(mem)


def r_leaky(params, state, x):
    spikes, mem = state
    current = linear(params, "weights", x) + linear(params, "neurons.recurrent", spikes)
    mem = 0.9 * mem + current - stop_gradient(fired(mem))
    return (fired(mem), mem), fired(mem)


def r_synaptic(params, state, x):
    spikes, syn, mem = state
    current = linear(params, "weights", x) + linear(params, "neurons.recurrent", spikes)
    syn = 0.9 * syn + current
    mem = 0.8 * mem + syn - stop_gradient(fired(mem))
    return (fired(mem), syn, mem), fired(mem)


def slstm(params, state, x):
    syn, mem = state
    mem, syn = lstm_cell(params, "neurons.lstm_cell", linear(params, "weights", x), mem, syn)
    return (syn, mem), fired(mem)


def lif_node(params, v, x, rate=0.5):
    v = v + (linear(params, "weights", x) - v) * rate
    spikes = steep(v - 1)
    return (1 - spikes) * v, spikes


def parametric_lif_node(params, v, x):
    return lif_node(params, v, x, sigmoid(params["neurons.w"]))


# Norse's time constants times its time step, which it multiplies in float32.
MEMBRANE, SYNAPSE = single(np.float32(0.001) * 100), single(np.float32(0.001) * 200)
ADAPTATION, FAST_ADAPTATION = single(0.001 * np.float32(1 / 800)), single(np.float32(0.001) * 2)


def lif_cell(params, state, x):
    current = state.i + linear(params, "weights", x)
    v = state.v + MEMBRANE * (current - state.v)
    spikes = super_spike(v - 1)
    return state._replace(v=(1 - spikes) * v, i=(1 - SYNAPSE) * current), spikes


def lif_recurrent_cell(params, state, x):
    weights = params["neurons.recurrent_weights"]
    others = weights * (1 - np.eye(len(weights)))  # no synapse of a neuron to itself
    current = state.i + x @ params["neurons.input_weights"].T + state.z @ others.T
    v = state.v + MEMBRANE * (current - state.v)
    spikes = super_spike(v - 1)
    v = (1 - stop_gradient(spikes)) * v
    return state._replace(z=spikes, v=v, i=(1 - SYNAPSE) * current), spikes


def lsnn_cell(params, state, x):
    v, b = state.v + MEMBRANE * (state.i - state.v), state.b + ADAPTATION * (1 - state.b)
    spikes = super_spike(v - b)
    current = (1 - SYNAPSE) * state.i + linear(params, "weights", x)
    b = b + spikes * single(1.8)
    return state._replace(v=(1 - spikes) * v, i=current, b=b), spikes


def lif_adex_cell(params, state, x):
    current = state.i + linear(params, "weights", x)
    rise = 0.5 * jnp.exp((state.v - 1) / 0.5)
    v = state.v + MEMBRANE * (rise - state.v + current - state.a)
    a = state.a + FAST_ADAPTATION * (4 * state.v - state.a)
    spikes = super_spike(v - 1)
    a = a + spikes * single(0.02)
    return state._replace(v=(1 - spikes) * v, i=(1 - SYNAPSE) * current, a=a), spikes


TWINS = {
    **{f.__name__: f for f in (rnn, gru, lstm, min_gru, stack, lru, s5, mamba2, rwkv, conv_lif)},
    **{f.__name__: f for f in (leaky, synaptic, alpha, r_leaky, r_synaptic, slstm)},
    **{"leaky_inside": leaky, "lif_node": lif_node, "parametric_lif_node": parametric_lif_node},
    **{"LIFCell": lif_cell, "LIFRecurrentCell": lif_recurrent_cell},
    **{"LSNNCell": lsnn_cell, "LIFAdExCell": lif_adex_cell},
}
# The state of a twin whose cell has its own inside: so many arrays, or one alone.
INSIDE = {"leaky_inside": 1, "alpha": 3, "r_synaptic": 3, "lif_node": 0, "parametric_lif_node": 0}


def started(name, batch, dtype):
    """The state inside of a cell before its first step."""
    zeros = np.zeros((batch, cells.H), dtype)
    return (zeros,) * INSIDE[name] if INSIDE[name] else zeros
