"""Tiny living models, one per way a weight can reach a state; the tests run on all of them.

`EXACT` are recurrences in which D-RTRL keeps everything, so its gradient is BPTT's; `RECURRENT`
have something it drops. A case is a model with non-zero states, inputs and targets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
import scipy.sparse
from jax import lax

import braintrace as bt
from braintrace.verify._compare import comparison
from gradients import bptt_grad
from oracle import dense
from small import Draw, net, small, spike
from small import Net as Net

T = 5
TIGHT = 1e-9

matmul, element_wise, sigmoid = bt.matmul, bt.element_wise, jax.nn.sigmoid


@dataclass(frozen=True, eq=False)
class Case:
    """A model in the middle of its life, and what it sees next."""

    name: str
    model: Any
    sequences: tuple[Any, Any]

    @property
    def x0(self) -> Any:
        return jax.tree.map(lambda a: a[0], self.sequences[0])


def step_fn(net: Any, x: Any, target: Any) -> jax.Array:
    """The loss of one step; `net` is a model or a learner."""
    return 0.5 * jnp.sum((net(x) - target) ** 2)


MODELS: dict[str, Callable[[], Case]] = {}  # of all registries
EXACT: dict[str, Callable[[], Case]] = {}
RECURRENT: dict[str, Callable[[], Case]] = {}
OPERATORS: dict[str, Callable[[], Case]] = {}


def case(registry: dict, name: str | None = None):
    """Register a maker: `maker(draw) -> (model, x shape or sequence)`."""

    def register(maker: Callable) -> Callable:
        label = name or maker.__name__

        def build() -> Case:
            draw = Draw(label)
            model, x = maker(draw)
            xs = draw(T, *x, scale=1.0) if isinstance(x, tuple) else x
            first = jax.tree.map(lambda a: a[0], xs)
            return Case(label, model, (xs, draw(T, *_shape(model, first), scale=1.0)))

        assert label not in MODELS, f"there are two models {label}"
        registry[label] = MODELS[label] = build
        return maker

    return register


def _shape(model: Any, x: Any) -> tuple[int, ...]:
    stateful = brainstate.transform.StatefulFunction(lambda x: model(x))
    return stateful.make_jaxpr(x).get_out_shapes(x)[0].shape


# ---------------------------------------------------------------------- one layer, element-wise


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def leaky(m, x):
    m.h.value = 0.9 * m.h.value + matmul(x, m.w.value)
    return m.h.value


@case(EXACT)
@small({"w": (3, 4), "b": 4}, {"h": (2, 4)}, x=(2, 3))
def tanh_leaky_batched(m, x):
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value, m.b.value))
    return m.h.value


@case(EXACT)
@small({"w": (3, 4), "tau": 4}, {"h": (2, 4)}, x=(2, 3))
def learnable_decay(m, x):
    a = element_wise(m.tau.value, sigmoid)
    m.h.value = a * m.h.value + (1 - a) * matmul(x, m.w.value)
    return m.h.value


@case(EXACT)
@small({"wz": (3, 4), "wh": (3, 4), "b": 4}, {"h": 4}, x=(3,))
def min_gru(m, x):
    z = sigmoid(matmul(x, m.wz.value, m.b.value))
    m.h.value = (1 - z) * m.h.value + z * matmul(x, m.wh.value)
    return m.h.value


@jax.custom_vjp
def spike_by_pullback(v):
    return (v > 0).astype(v.dtype)


spike_by_pullback.defvjp(
    lambda v: (spike_by_pullback(v), v), lambda v, ct: (ct / (1 + jnp.abs(3 * v)) ** 2,)
)


def alif(draw, fire):
    @net({"w": draw(3, 4, scale=1.5)}, {"v": draw(4), "a": abs(draw(4))})
    def model(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = fire(v - 0.3 - 0.5 * m.a.value)
        m.a.value = 0.8 * m.a.value + z
        m.v.value = v - z * (0.3 + 0.2 * m.a.value)
        return z + 0.1 * m.v.value

    return model, (3,)


@case(EXACT)
def adaptive_spikes(draw):
    return alif(draw, spike)


@case(EXACT)
def adaptive_spikes_custom_vjp(draw):
    return alif(draw, spike_by_pullback)


@case(EXACT)
@small({"w": (3, 4), "u": (3, 4)}, {"s": (2, 4), "v": (2, 4), "r": (2, 4)}, x=(2, 3))
def three_states(m, x):
    m.s.value = 0.7 * m.s.value + matmul(x, m.w.value)
    m.v.value = jnp.tanh(0.8 * m.v.value + m.s.value - m.r.value + matmul(x, m.u.value))
    m.r.value = 0.6 * m.r.value + sigmoid(m.v.value) * m.s.value
    return m.v.value * m.r.value


@case(EXACT)
def complex_state(draw):
    params = {"nu": draw(4), "theta": draw(4), "b": draw.complex(3, 4), "g": draw(4)}

    @net(params, {"h": draw.complex(4)})
    def model(m, x):
        a = jnp.exp(-jnp.exp(element_wise(m.nu.value)) + 1j * element_wise(m.theta.value))
        m.h.value = a * m.h.value + element_wise(m.g.value) * matmul(x.astype(complex), m.b.value)
        return m.h.value.real + jnp.abs(m.h.value) ** 2

    return model, (3,)


@case(EXACT)
def complex_state_real_weight(draw):
    @net({"w": draw(3, 4), "v": draw(3, 4)}, {"h": draw.complex(2, 4)})
    def model(m, x):
        into = lax.complex(matmul(x, m.w.value), jnp.sin(matmul(x, m.v.value)))
        m.h.value = (0.8 + 0.3j) * m.h.value * jnp.exp(0.1j * m.h.value.real) + into
        return m.h.value.real * m.h.value.imag

    return model, (2, 3)


@case(EXACT)
def hidden_group_state(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": brainstate.HiddenGroupState(draw(4, 2))})
    def model(m, x):
        v, a = m.h.value[..., 0], m.h.value[..., 1]
        new = jnp.tanh(0.8 * v - a + matmul(x, m.w.value))
        m.h.value = jnp.stack([new, 0.9 * a + 0.2 * new * matmul(x, m.u.value)], axis=-1)
        return m.h.value.sum(-1)

    return model, (3,)


@case(EXACT)
@small({"w": (3, 12), "b": 12}, {"c": (2, 4), "h": (2, 4)}, x=(2, 3))
def fused_gates(m, x):
    f, i, o = jnp.split(matmul(x, m.w.value, m.b.value), 3, axis=-1)
    m.c.value = sigmoid(f) * m.c.value + jnp.tanh(i)
    m.h.value = sigmoid(o) * jnp.tanh(m.c.value) + 0.1 * m.h.value
    return m.h.value


@case(EXACT)
@small({"w": (3, 6)}, {"h": 4}, x=(3,))
def sliced_output(m, x):
    y = matmul(x, m.w.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + y[1:5] * y[2:6])
    return m.h.value


@case(EXACT)
@small({"w": (3, 6)}, {"h": (3, 2)}, x=(3,))
def transposed_state(m, x):
    y = matmul(x, m.w.value).reshape(2, 3)
    m.h.value = jnp.sin(0.8 * m.h.value + y.T)
    return m.h.value


@case(EXACT)
@small({"w": (3, 2), "u": (3, 2)}, {"h": 4}, x=(3,))
def concatenated_operators(m, x):
    y = jnp.concatenate([matmul(x, m.w.value), jnp.tanh(matmul(x, m.u.value))])
    m.h.value = jnp.tanh(0.8 * m.h.value + y)
    return m.h.value


@case(EXACT)
@small({"w": (3, 4)}, {"line": (3, 4), "v": 4}, x=(3,))
def delay_line(m, x):
    y = jnp.tanh(matmul(x, m.w.value))
    m.v.value = 0.9 * m.v.value + jnp.sin(m.line.value[-1])
    m.line.value = jnp.concatenate([y[None], m.line.value[:-1]])
    return m.v.value


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def rolled_state(m, x):
    m.h.value = 0.9 * jnp.roll(jnp.sin(m.h.value), 1) + matmul(x, m.w.value)
    return m.h.value


@case(EXACT)
@small({"w": (3, 2), "g": 4}, {"h": (2, 4)}, x=(3,))
def broadcast_output(m, x):
    y = matmul(x, m.w.value)[:, None] * element_wise(m.g.value)
    m.h.value = jnp.tanh(0.9 * m.h.value + y)
    return m.h.value


@case(EXACT)
@small({"w": (3, 4)}, {"v": 4}, x=(3,))
def loss_reads_before_reset(m, x):
    y = matmul(x, m.w.value)
    v = 0.9 * m.v.value + y
    old = m.v.value
    m.v.value = v * (1 - sigmoid(4 * v))
    return jnp.sin(v) + 0.3 * old * y


@case(EXACT)
def lif_with_units(draw):
    params = {"w": draw(3, 4, scale=15.0) * u.mV}

    @net(params, {"v": draw(4, scale=8.0) * u.mV})
    def model(m, x):
        decay = jnp.exp(-(1.0 * u.ms) / (10.0 * u.ms))
        v = decay * m.v.value + matmul(x, m.w.value)
        z = spike((v - 10.0 * u.mV) / (10.0 * u.mV))
        m.v.value = v - z * 10.0 * u.mV
        return z + v / (50.0 * u.mV)

    return model, (3,)


# ------------------------------------------------------------------------------- read-outs


@case(EXACT)
@small({"w": (3, 4), "out": (4, 2), "b": 2}, {"h": 4}, x=(3,))
def plain_readout(m, x):
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
    return m.h.value @ m.out.value + m.b.value


@case(EXACT)
@small({"w": (3, 4), "out": (4, 2), "unused": 2}, {"h": 4}, x=(3,))
def operator_readout(m, x):
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
    return matmul(m.h.value, m.out.value)


# ------------------------------------------------------------------------- operands of a weight


@case(EXACT)
def operand_expressions(draw):
    mask = jnp.asarray(np.random.default_rng(0).random((3, 4)) < 0.6)
    params = {k: draw(3, 4) for k in "abcd"} | {"e": draw(4, 3), "n": draw(3, 4)}

    @net(params, {"h": draw(2, 4), "k": draw(2, 4)})
    def model(m, x):
        y = matmul(x, m.a.value * mask) + matmul(x, jax.nn.softplus(m.b.value))
        z = matmul(x, m.c.value + m.d.value**2) * jnp.sin(matmul(x, m.e.value.T))
        n = matmul(x, m.n.value / jnp.linalg.norm(m.n.value, axis=0))
        m.h.value = jnp.tanh(0.8 * m.h.value + y + n)
        m.k.value = 0.7 * m.k.value + z
        return m.h.value * m.k.value

    return model, (2, 3)


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4, "k": 4}, x=(3,))
def weight_used_twice(m, x):
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
    m.k.value = 0.7 * m.k.value + matmul(x**2, jnp.sin(m.w.value)) * m.h.value
    return m.k.value


# ------------------------------------------------------------------------------- recurrence


def cell(kind: type, batch: int | None = None, **options):
    def make(draw):
        brainstate.random.seed(zlib.crc32(kind.__name__.encode()) % 2**31)
        model = kind(2, 3, **options)
        brainstate.nn.init_all_states(model, batch_size=batch)
        for state in model.states().values():
            state.value = jax.tree.map(lambda a: a + draw(*a.shape, scale=0.3), state.value)
        return model, (2,) if batch is None else (batch, 2)

    return make


case(RECURRENT, "vanilla")(cell(bt.nn.ValinaRNNCell, activation="tanh"))
case(RECURRENT, "gru")(cell(bt.nn.GRUCell))
case(RECURRENT, "gru_batched")(cell(bt.nn.GRUCell, 2))
case(RECURRENT, "lstm")(cell(bt.nn.LSTMCell))


@case(RECURRENT)
def stacked_layers(draw):
    params = {
        "w1": draw(2, 3),
        "r1": draw(3, 3),
        "w2": draw(3, 3),
        "r2": draw(3, 3),
        "o": draw(3, 2),
    }

    @net(params, {"a": draw(3), "b": draw(3)})
    def model(m, x):
        a = m.a.value
        m.a.value = 0.5 * a + jnp.tanh(matmul(x, m.w1.value) + matmul(a, m.r1.value))
        new = jnp.tanh(matmul(m.a.value, m.w2.value) + matmul(m.b.value, m.r2.value))
        m.b.value = 0.6 * m.b.value + new
        return matmul(m.b.value, m.o.value) + m.a.value[:2]

    return model, (2,)


@case(RECURRENT)
def excitation_inhibition(draw):
    params = {"w": draw(2, 4), "ei": draw(4, 2), "ie": draw(2, 4), "ee": draw(4, 4)}

    @net(params, {"e": draw(4), "i": draw(2)})
    def model(m, x):
        e, i = m.e.value, m.i.value
        back = matmul(jnp.tanh(e), m.ee.value) - matmul(jnp.tanh(i), jnp.abs(m.ie.value))
        m.e.value = 0.8 * e + matmul(x, m.w.value) + back
        m.i.value = 0.7 * i + matmul(sigmoid(m.e.value), m.ei.value)
        return m.e.value[:2] * m.i.value

    return model, (2,)


@case(RECURRENT)
@small({"w": (2, 4), "r": (4, 4)}, {"h": 4}, x=(2,))
def plain_input_weight(m, x):
    m.h.value = jnp.tanh(0.5 * m.h.value + x @ m.w.value + matmul(m.h.value, m.r.value))
    return m.h.value


@case(RECURRENT)
@small({"w": (2, 4), "r": (4, 4)}, {"h": 4}, x=(2,))
def plain_recurrent_weight(m, x):
    m.h.value = jnp.tanh(0.5 * m.h.value + matmul(x, m.w.value) + m.h.value @ m.r.value)
    return m.h.value


@case(RECURRENT)
@small({"w": (2, 4)}, {"h": 4}, x=(2,))
def neighbours(m, x):
    h = m.h.value
    m.h.value = jnp.tanh(0.5 * h + 0.3 * jnp.roll(h, 1) + matmul(x, m.w.value))
    return m.h.value


@case(RECURRENT)
@small({"w": (2, 4)}, {"h": 4}, x=(2,))
def layer_norm(m, x):
    y = 0.7 * m.h.value + matmul(x, m.w.value)
    m.h.value = jnp.tanh((y - y.mean()) / jnp.sqrt(y.var() + 0.1))
    return m.h.value


@case(RECURRENT)
def spiking_recurrent(draw):
    params = {"w": draw(2, 4, scale=1.5), "r": draw(4, 4)}

    @net(params, {"z": (draw(4) > 0).astype(float), "v": draw(4), "s": draw(4)})
    def model(m, x):
        m.s.value = 0.7 * m.s.value + matmul(x, m.w.value) + matmul(m.z.value, m.r.value)
        v = 0.9 * m.v.value * (1 - m.z.value) + m.s.value
        m.z.value = spike(v - 0.5)
        m.v.value = v
        return m.v.value + m.z.value

    return model, (2,)


@case(RECURRENT)
@small({"w": (2, 3), "u": (3, 4), "c": (2, 4)}, {"h": 4}, x=(2,))
def weight_behind_weight(m, x):
    y = jnp.tanh(matmul(x, m.w.value))
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(y, m.u.value) + matmul(x, m.c.value))
    return m.h.value + y.sum()


# ------------------------------------------------------------------------------- odd but legal


@case(EXACT)
@small({"w": (3, 4)}, {"a": 4, "b": 4}, x=(3,))
def swapped_states(m, x):
    a = m.a.value
    m.a.value = m.b.value
    m.b.value = jnp.sin(a) + matmul(x, m.w.value)
    return m.a.value * m.b.value


@case(EXACT)
@small({"w": (3, 4)}, {"a": 4, "b": 4, "seen": 3, "still": 4}, x=(3,))
def one_value_in_two_states(m, x):
    new = jnp.tanh(0.6 * m.a.value - 0.4 * m.b.value + matmul(x, m.w.value)) + m.still.value
    m.a.value = m.b.value = new
    m.still.value = jnp.zeros(4)
    m.seen.value = x
    return new + m.seen.value.sum()


@case(EXACT)
@small({"w": (3, 1), "b": ()}, {"h": (), "k": 4}, x=(3,))
def scalar_state(m, x):
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value)[0] + element_wise(m.b.value))
    m.k.value = 0.7 * m.k.value + jnp.arange(4) * m.h.value
    return m.k.value


@case(EXACT)
@small({"w": (3, 6)}, {"a": 4, "b": 2, "c": (2, 2)}, x=(3,))
def uneven_destinations(m, x):
    y = matmul(x, m.w.value)
    m.a.value = 0.8 * m.a.value + y[:4]
    m.b.value = jnp.tanh(0.7 * m.b.value + m.a.value[1:3] * y[4:])
    m.c.value = 0.6 * m.c.value + jnp.stack([y[1:3], m.b.value])
    return jnp.concatenate([m.a.value[:1], m.b.value, m.c.value[0]])


@case(EXACT)
def scattered_output(draw):
    places = np.array([3, 0, 4])

    @net({"w": draw(3, 3)}, {"h": draw(5)})
    def model(m, x):
        y = jnp.zeros(5).at[places].set(matmul(x, m.w.value))
        m.h.value = jnp.tanh(0.8 * m.h.value + y[jnp.array([4, 1, 3, 0, 2])])
        return m.h.value

    return model, (3,)


@case(EXACT)
@small({"w": (3, 2), "g": 2}, {"h": (3, 2)}, x=(3, 3))
def batch_rolled(m, x):
    into = matmul(x, m.w.value) + element_wise(m.g.value)
    m.h.value = jnp.tanh(0.9 * jnp.roll(m.h.value, 1, axis=0) + into)
    return m.h.value


@case(EXACT)
def complex_to_real(draw):
    @net({"w": draw.complex(3, 4), "r": draw(4)}, {"h": draw(4), "k": draw.complex(4)})
    def model(m, x):
        y = matmul(x.astype(complex), m.w.value)
        m.h.value = 0.8 * m.h.value + y.real * y.imag
        turn = jnp.exp(1j * element_wise(m.r.value))
        m.k.value = jnp.conj(turn * m.k.value) * 0.9 + m.h.value * y
        return m.h.value + m.k.value.imag

    return model, (3,)


@case(EXACT)
def trained_bias_on_fixed_weight(draw):
    fixed = draw(3, 4)

    @net({"b": draw(4), "w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        y = matmul(x, fixed, m.b.value) + matmul(x, m.w.value, x[0, :1] * jnp.ones(4))
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    return model, (2, 3)


@case(EXACT)
@small({"w": (3, 4), "v": (4, 3)}, {"h": 4}, x=(3,))
def weight_also_used_plainly(m, x):
    w = jnp.tanh(m.w.value) @ (m.v.value @ m.w.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
    return m.h.value + (x @ m.w.value) * m.v.value.sum()


@case(EXACT)
@small({"w": (3, 4), "g": 4}, {"h": 4}, x=(3,))
def calls_and_checkpoints(m, x):
    leak = jax.checkpoint(lambda h, y: jnp.tanh(0.8 * h + y))
    y = jax.jit(lambda x, w: matmul(x, w))(x, m.w.value)
    m.h.value = jnp.where(x.sum() > 0, leak(m.h.value, y), 0.5 * m.h.value - y)
    m.h.value = jax.nn.relu(m.h.value) + 0.1 * m.h.value * element_wise(m.g.value)
    return m.h.value


@case(EXACT)
def plain_states_and_noise(draw):
    states = {
        "h": brainstate.ShortTermState(draw(4)),
        "count": brainstate.ShortTermState(jnp.zeros((), int)),
        "log": brainstate.ShortTermState(draw(4)),
    }

    @net({"w": draw(3, 4)}, states)
    def model(m, x):
        m.count.value = m.count.value + 1
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) / m.count.value)
        m.log.value = m.h.value * 2
        return m.h.value

    return model, (3,)


@case(EXACT)
@small({"w": (3, 2), "u": (3, 4)}, {"h": (2, 4), "d": 4}, x=(3,))
def outer_product_state(m, x):
    m.h.value = 0.9 * m.h.value + jnp.outer(matmul(x, m.w.value), matmul(x, m.u.value))
    m.d.value = 0.5 * m.d.value + jnp.einsum("i,i->i", m.h.value[1], matmul(x, m.u.value))
    return m.d.value


@case(RECURRENT)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4, "k": 4}, x=(3,))
def detached_recurrence(m, x):
    back = matmul(lax.stop_gradient(m.h.value), m.r.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) + back)
    m.k.value = 0.7 * m.k.value + matmul(m.h.value, m.r.value)
    return m.k.value + m.h.value * matmul(m.k.value, m.r.value)


@case(RECURRENT)
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4}, x=(3,))
def weight_that_follows_a_state(m, x):
    fast = m.w.value * (1 + 0.1 * m.h.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, fast) + matmul(x, m.u.value))
    return m.h.value


_masked = bt.register_primitive("masked_product", lambda x, w, m: x @ (w * m))


@case(EXACT)
def operand_without_a_name(draw):
    mask = np.eye(3, 4, dtype=bool) | (np.arange(4) > 1)

    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + _masked.bind(x, m.w.value, mask))
        return m.h.value

    return model, (3,)


@case(EXACT)
def operand_that_varies(draw):
    scale = draw(3, 4)

    @net({"w": draw(3, 4), "b": draw(3, 2)}, {"h": draw(4)})
    def model(m, x):
        fast = _masked.bind(x, m.w.value, scale * x.sum())
        low = bt.lora_matmul(x, m.b.value, scale[:2] * x.sum())
        m.h.value = jnp.tanh(0.8 * m.h.value + fast + low + matmul(x, m.w.value))
        return m.h.value

    return model, (3,)


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def bias_that_varies(m, x):
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value, jnp.full(4, x.sum())))
    return m.h.value


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def choice_of_dynamics(m, x):
    y = matmul(x, m.w.value)
    sides = (lambda h: 0.5 * h + y, lambda h: jnp.tanh(h) * y)
    m.h.value = lax.cond(x[0] > 0, *sides, m.h.value)
    return m.h.value


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4, "v": 4}, x=(3,))
def substeps(m, x):
    y = matmul(x, m.w.value)

    def substep(carry, gain):
        h, v = carry
        h = h + 0.2 * (v - jnp.tanh(h)) + 0.1 * gain * y
        v = lax.cond(h.sum() > 0, lambda v: 0.9 * v - 0.1 * h, lambda v: 0.8 * v, v)
        return (h, v), h

    start = (m.h.value, m.v.value)
    (m.h.value, v), path = lax.scan(substep, start, jnp.arange(1.0, 4.0), reverse=True)
    m.v.value = v + 0.1 * path[0]
    return m.h.value


@case(EXACT)
@small({"w": (3, 4)}, {"h": (2, 4)}, x=(2, 3))
def loop_of_dynamics(m, x):
    y = matmul(x, m.w.value)
    m.h.value = lax.fori_loop(0, 3, lambda i, h: h + 0.2 * (y - jnp.tanh(h)), m.h.value)
    return m.h.value


@case(RECURRENT)
@small({"w": (3, 4), "r": (4, 4), "u": (3, 4)}, {"h": 4, "k": 4}, x=(3,))
def operators_inside_bodies(m, x):
    driven = lambda h, _: (0.9 * h + 0.1 * matmul(x, m.w.value), None)
    mixed = lambda k, _: (0.9 * k + 0.1 * matmul(k, m.r.value), None)
    m.h.value = lax.scan(driven, m.h.value, None, 3)[0] + matmul(x, m.u.value)
    k = lax.scan(mixed, m.k.value, None, 2)[0]
    m.k.value = 0.5 * m.k.value + jnp.tanh(k) + m.h.value
    return m.k.value


@case(RECURRENT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def choice_that_mixes(m, x):
    y = matmul(x, m.w.value)
    chosen = lax.cond(x[0] > 0, lambda h: h - h.mean(), lambda h: h * y, m.h.value)
    m.h.value = jnp.tanh(0.4 * m.h.value + chosen + y)
    return m.h.value


@case(EXACT)
@small({"w": (3, 3)}, {"g": 3, "h": 3, "k": 3}, x=(3,))
def gather_beyond_the_end(m, x):
    g, h = m.g.value, m.h.value
    moved = g.at[jnp.asarray([2, 0, 1])].get(mode="fill", fill_value=0)
    empty = h.at[jnp.asarray([5, 6, 7])].get(mode="fill", fill_value=0)
    m.k.value = 0.5 * m.k.value + h
    m.h.value = 0.9 * moved + 0.5 * empty
    m.g.value = 0.8 * g + matmul(x, m.w.value)
    return m.k.value


@case(RECURRENT)
@small({"w": (3, 4), "u": (4, 4)}, {"h": (2, 4)}, x=(2, 3))
def direct_and_through_another(m, x):
    y = matmul(x, m.w.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + y + matmul(sigmoid(y) * m.h.value, m.u.value))
    return m.h.value * y


@case(RECURRENT)
@small({"w": (3, 4)}, {"a": 4, "b": 4, "c": (2, 4)}, x=(3,))
def moved_beside_own(m, x):
    a, b = m.a.value, m.b.value
    m.a.value = jnp.tanh(jnp.roll(b, 1) + jnp.roll(m.c.value[0], 1) + matmul(x, m.w.value))
    m.b.value = 0.5 * b + jnp.roll(a, 1) + a[::-1]
    m.c.value = jnp.stack([a, m.c.value[0] + m.c.value[1]]) * 0.7
    return m.a.value + m.c.value[1]


@case(RECURRENT)
def loop_of_three_layers(draw):
    params = {
        "w": draw(3, 2),
        "ab": draw(2, 3),
        "bc": draw(3, 4),
        "ca": draw(4, 2),
        "o": draw(4, 4),
    }

    @net(params, {"a": draw(2), "b": draw(3), "c": draw(4), "d": draw(4)})
    def model(m, x):
        a = m.a.value
        m.a.value = 0.8 * a + matmul(x, m.w.value) + matmul(jnp.tanh(m.c.value), m.ca.value)
        m.b.value = 0.7 * m.b.value + matmul(a, m.ab.value)
        m.c.value = 0.6 * m.c.value + matmul(jnp.tanh(m.b.value), m.bc.value)
        m.d.value = 0.5 * m.d.value + matmul(m.c.value, m.o.value)
        return m.d.value + m.c.value

    return model, (3,)


@case(RECURRENT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def scan_inside(m, x):
    y = matmul(x, m.w.value)
    swept, _ = lax.scan(lambda c, _: (0.9 * c + 0.1 * jnp.roll(c, 1), None), m.h.value, None, 2)
    m.h.value = jnp.tanh(0.5 * m.h.value + 0.3 * swept + y)
    return m.h.value


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def loop_inside(m, x):
    swept = lax.fori_loop(0, 3, lambda i, c: 0.9 * c + 0.1 * jnp.sin(c), m.h.value)
    m.h.value = jnp.tanh(0.5 * m.h.value + 0.3 * swept + matmul(x, m.w.value))
    return m.h.value


@case(RECURRENT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def cond_inside(m, x):
    chosen = lax.cond(x.sum() > 0, jnp.tanh, lambda h: h * h[::-1], m.h.value)
    m.h.value = jnp.tanh(0.5 * m.h.value + 0.3 * chosen + matmul(x, m.w.value))
    return m.h.value


@case(RECURRENT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def softmax_and_sort(m, x):
    y = jax.nn.softmax(m.h.value + matmul(x, m.w.value))
    m.h.value = 0.5 * m.h.value + y + 0.3 * jnp.sort(m.h.value) * jnp.cumsum(y)
    return m.h.value


@case(EXACT)
def complex_group_state(draw):
    @net({"w": draw.complex(3, 4)}, {"h": brainstate.HiddenGroupState(draw.complex(4, 2))})
    def model(m, x):
        v, a = m.h.value[..., 0], m.h.value[..., 1]
        v = 0.5 * jnp.tanh(v.real) * a + matmul(x.astype(complex), m.w.value)
        m.h.value = jnp.concatenate([v[:, None], (0.5j * a + 0.3 * v)[:, None]], -1)
        return v.real + a.imag

    return model, (3,)


@case(EXACT)
def group_channel_move(draw):
    @net({"w": draw(3, 4)}, {"h": brainstate.HiddenGroupState(draw(4, 3))})
    def model(m, x):
        old = m.h.value[..., 2]
        m.h.value = jnp.concatenate([matmul(x, m.w.value)[:, None], m.h.value[:, :2]], -1)
        return jnp.sin(old)

    return model, (3,)


@case(EXACT)
def states_in_a_dict(draw):
    @net({"w": draw(3, 4)}, {"h": brainstate.ShortTermState({"v": draw(4), "a": draw(4)})})
    def model(m, x):
        v = jnp.tanh(0.8 * m.h.value["v"] - m.h.value["a"] + matmul(x, m.w.value))
        m.h.value = {"v": v, "a": 0.7 * m.h.value["a"] + v}
        return v

    return model, (3,)


@case(EXACT)
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def noise(m, x):
    shake = 0.5 * brainstate.random.randn(4)
    m.h.value = jnp.tanh((0.8 + shake) * m.h.value + matmul(x, m.w.value))
    return m.h.value


@case(EXACT)
@small({"w": (2, 3, 4), "g": (2, 4)}, {"h": (2, 4), "k": (4, 2)}, x=(2, 3))
def vmapped_operators(m, x):
    gain = jax.vmap(lambda g: element_wise(g, jnp.tanh))(m.g.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + gain * jax.vmap(matmul)(x, m.w.value))
    one = lambda v: matmul(v, m.w.value[0])
    m.k.value = 0.7 * m.k.value + jax.vmap(one, in_axes=1, out_axes=1)(x.T)
    return m.h.value + m.k.value.T


# -------------------------------------------------------------------------------- operators


def operator(name: str, x: Any, y: tuple[int, ...], **shapes: tuple[int, ...]):
    """An operator in a tanh-leaky recurrence: `call(x, **params) -> y`."""

    def register(call: Callable) -> Callable:
        def make(draw):
            @net({k: draw(*s) for k, s in shapes.items()}, {"h": draw(*y)})
            def model(m, x):
                into = call(x, **{k: getattr(m, k).value for k in shapes})
                m.h.value = jnp.tanh(0.8 * m.h.value + into)
                return m.h.value

            return model, x

        case(OPERATORS, name)(make)
        return call

    return register


PATTERN = scipy.sparse.csr_array(np.array([[1.0, 0, 2, 0], [0, 3, 0, 4], [5, 0, 0, 6]]))
INDICES = jnp.asarray(np.random.default_rng(3).integers(0, 5, (T, 2)))
soften = lambda w: jnp.tanh(w)
weighted_power = bt.register_primitive(
    "truth_weighted_power", lambda x, w: jnp.einsum("i,io,o->o", x, w**2, jnp.tanh(w.sum(0)))
)

operator("matmul", (3,), (4,), w=(3, 4))(lambda x, w: matmul(x, w))
operator("matmul_bias", (3,), (4,), w=(3, 4), b=(4,))(lambda x, w, b: matmul(x, w, b))
operator("matmul_batched", (2, 3), (2, 4), w=(3, 4), b=(4,))(lambda x, w, b: matmul(x, w, b))
operator("matmul_hooked", (2, 3), (2, 4), w=(3, 4), b=(4,))(
    lambda x, w, b: matmul(x, w, b, weight_fn=soften, bias_fn=soften)
)
operator("matmul_vmapped", (2, 3), (2, 4), w=(3, 4), b=(4,))(
    lambda x, w, b: jax.vmap(lambda v: matmul(v, w, b))(x)
)
operator("element_wise", (4,), (4,), w=(4,))(lambda x, w: x * element_wise(w, soften))
operator("element_wise_batched", (2, 4), (2, 4), w=(4,))(lambda x, w: x * element_wise(w, soften))
operator("conv", (2, 2, 5), (2, 3, 5), k=(3, 2, 3), b=(3,))(lambda x, k, b: bt.conv(x, k, b))
operator("conv_strided", (1, 2, 5), (1, 2, 3), k=(2, 2, 2))(
    lambda x, k: bt.conv(x, k, strides=(2,), padding="SAME")
)
operator("conv_2d", (1, 3, 3, 2), (1, 2, 2, 2), k=(2, 2, 2, 2))(
    lambda x, k: bt.conv(
        x, k, strides=(1, 1), padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
)
operator("sparse", (3,), (4,), w=(6,))(lambda x, w: bt.sparse_matmul(x, w, sparse_mat=PATTERN))
operator("sparse_batched", (2, 3), (2, 4), w=(6,), b=(4,))(
    lambda x, w, b: bt.sparse_matmul(x, w, sparse_mat=PATTERN, bias=b)
)
operator("lora", (3,), (4,), b=(3, 2), a=(2, 4))(lambda x, b, a: bt.lora_matmul(x, b, a, alpha=0.7))
operator("lora_batched", (2, 3), (2, 4), b=(3, 2), a=(2, 4), c=(4,))(
    lambda x, b, a, c: bt.lora_matmul(x, b, a, bias=c)
)
operator("einsum", (2, 3, 2), (2, 3, 4), w=(3, 2, 4))(lambda x, w: bt.einsum("bti,tio->bto", x, w))
operator("einsum_shared", (2, 3, 2), (2, 3, 4), w=(2, 4))(
    lambda x, w: bt.einsum("bti,io->bto", x, w)
)
operator("embedding", INDICES[:, 0], (3,), w=(5, 3))(lambda x, w: bt.embedding(x, w))
operator("embedding_batched", INDICES, (2, 3), w=(5, 3))(lambda x, w: bt.embedding(x, w))
operator("grouped", (2, 3), (2, 2), w=(2, 3, 2), b=(2, 2))(
    lambda x, w, b: bt.grouped_matmul(x, w, b)
)
operator("grouped_batched", (2, 2, 3), (2, 2, 2), w=(2, 3, 2))(lambda x, w: bt.grouped_matmul(x, w))
operator("custom", (3,), (3,), w=(3, 3))(lambda x, w: weighted_power.bind(x, w))


# ------------------------------------------------------- what the tests of all rules compare with

built = cache(lambda name: MODELS[name]())


def living(name: str) -> Case:
    """The model of that name; its noise is the same whoever runs it."""
    brainstate.random.seed(1)
    return built(name)


@cache
def seen(name: str, folds: bool = True) -> Any:
    """The dense derivatives of a model's steps."""
    if not folds and not any(o.factors for o in seen(name).structure.operators):
        return seen(name)  # there was nothing to fold
    c = living(name)
    return dense(c.model, step_fn, *c.sequences, folds=folds)


@cache
def bptt(name: str) -> dict:
    c = living(name)
    return bptt_grad(c.model, step_fn, *c.sequences)


def compiled(algorithm: Callable, model: Any, x0: Any, **options: Any) -> Any:
    learner = algorithm(model, **options)
    learner.compile_graph(x0)
    return learner


def assert_equal(found: Any, truth: Any, tolerance: float = TIGHT) -> None:
    result = comparison(found, truth)
    assert result.max_error <= tolerance, f"\n{result}"


def different(found: Any, truth: Any) -> bool:
    return comparison(found, truth).max_error > 1e-3
