"""Normalisations across units: D-RTRL leaves what they mix out, and says so."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

from .zoo import T, check, matmul, net, sigmoid

NORMS = {
    "layer": lambda v: (v - v.mean(-1, keepdims=True)) / jnp.sqrt(v.var(-1, keepdims=True) + 0.1),
    "rms": lambda v: v / jnp.sqrt((v**2).mean(-1, keepdims=True) + 0.1),
    "softmax": lambda v: jax.nn.softmax(v, axis=-1),
    "batch": lambda v: (v - v.mean(0)) / jnp.sqrt(v.var(0) + 0.1),
    "divisive": lambda v: v / (1 + jnp.abs(v).sum(-1, keepdims=True)),
    "subtractive": lambda v: v - 0.2 * sigmoid(v).sum(-1, keepdims=True),
    "max": lambda v: v - v.max(-1, keepdims=True),
    "log-softmax": lambda v: jax.nn.log_softmax(v, axis=-1),
}


def model_with(draw, tail=None, state=None, whole=None, out=None, x_norm=None):
    same = lambda v: v
    tail, state, whole = tail or same, state or same, whole or same
    out, x_norm = out or same, x_norm or same

    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        y = tail(matmul(x_norm(x), m.w.value))
        m.h.value = jnp.tanh(whole(0.8 * state(m.h.value) + y))
        return out(m.h.value)

    return model


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_the_tail(draw, name):
    # A weight that reaches its state through sums alone is refused: keep a direct path.
    norm = NORMS[name]
    model = model_with(draw, tail=lambda y: norm(y) + 0.3 * y)
    check(model, draw(T, 2, 3), exact=False, rules=2)


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_the_recurrence(draw, name):
    check(model_with(draw, state=NORMS[name]), draw(T, 2, 3), exact=False, rules=2)


@pytest.mark.parametrize("name", ["layer", "rms", "batch", "divisive"])
def test_norm_of_both(draw, name):
    check(model_with(draw, whole=NORMS[name]), draw(T, 2, 3), exact=False, rules=2)


@pytest.mark.parametrize("name", ["layer", "softmax", "batch"])
def test_norm_of_input_and_output(draw, name):
    norm = NORMS[name]
    check(model_with(draw, out=norm, x_norm=norm), draw(T, 2, 3), rules=2)


def test_trained_gain_and_shift(draw):
    @net({"w": draw(3, 4), "g": draw(4), "b": draw(4)}, {"h": draw(2, 4)})
    def model(m, x):
        y = NORMS["layer"](0.7 * m.h.value + matmul(x, m.w.value))
        m.h.value = jnp.tanh(y * m.g.value + m.b.value)
        return m.h.value

    check(model, draw(T, 2, 3), exact=False)


def test_batch_norm_with_running_statistics(draw):
    states = {
        "h": draw(2, 4),
        "mean": brainstate.ShortTermState(draw(4)),
        "var": brainstate.ShortTermState(jnp.ones(4)),
    }

    @net({"w": draw(3, 4)}, states)
    def model(m, x):
        y = matmul(x, m.w.value)
        normed = (y - m.mean.value) / jnp.sqrt(m.var.value + 0.1)
        m.mean.value = 0.9 * m.mean.value + 0.1 * y.mean(0)
        m.var.value = 0.9 * m.var.value + 0.1 * y.var(0)
        m.h.value = jnp.tanh(0.8 * m.h.value + normed)
        return m.h.value

    check(model, draw(T, 2, 3), exact=False)


def test_inhibition_by_a_state(draw):
    @net({"w": draw(3, 4)}, {"e": draw(4), "i": draw()})
    def model(m, x):
        m.e.value = jnp.tanh(0.8 * m.e.value - 0.3 * m.i.value + matmul(x, m.w.value))
        m.i.value = 0.7 * m.i.value + sigmoid(m.e.value).mean()
        return m.e.value

    check(model, draw(T, 3), exact=False)


def test_winner_takes_all(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        v = 0.8 * m.h.value + matmul(x, m.w.value)
        m.h.value = jnp.where(v == v.max(), v, 0.5 * v)  # who wins is no derivative
        return m.h.value

    check(model, draw(T, 3))
