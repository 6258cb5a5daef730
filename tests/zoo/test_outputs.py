"""What outputs and losses may read."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace.verify._compare import comparison
from gradients import bptt_grad, online_grad

from .zoo import SINGLE, TIGHT, T, check, matmul, net, sigmoid, spike, squares


def test_value_before_a_reset(draw):
    @net({"w": draw(3, 4, scale=1.5)}, {"v": draw(4)})
    def model(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = spike(v - 0.4)
        m.v.value = v * (1 - z)
        return v + z

    check(model, draw(T, 3))


def test_old_state(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        old = m.h.value
        m.h.value = jnp.tanh(0.8 * old + matmul(x, m.w.value))
        return jnp.sin(old) * x.sum()

    check(model, draw(T, 3))


def test_value_before_a_clip(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        h = 0.9 * m.h.value + matmul(x, m.w.value)
        m.h.value = jnp.clip(h, -0.4, 0.4)
        return h * m.h.value

    check(model, draw(T, 2, 3))


def test_operator_output(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y, z = matmul(x, m.w.value), matmul(x, m.u.value)
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return y * z + y * m.h.value

    check(model, draw(T, 3))


def test_new_value_that_no_state_keeps(draw):
    @net({"w": draw(3, 4), "o": draw(4, 2)}, {"h": draw(4)})
    def model(m, x):
        h = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        m.h.value = 0.5 * h
        return jax.nn.softmax(matmul(h, m.o.value)) + h.sum()

    check(model, draw(T, 3))


def test_tree_of_outputs(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return {"h": m.h.value, "more": (m.h.value.sum(), jnp.argmax(m.h.value))}

    def loss(net, x, y):
        out = net(x)
        total, best = out["more"]
        return jnp.sum((out["h"] - y) ** 2) + total**2 * (best > 1)

    check(model, draw(T, 3), draw(T, 4), step_fn=loss)


def test_cross_entropy(draw):
    @net({"w": draw(3, 4), "o": draw(4, 3)}, {"h": draw(2, 4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value @ m.o.value

    def loss(net, x, y):
        log_p = jax.nn.log_softmax(net(x))
        return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))

    labels = jnp.asarray(np.random.default_rng(0).integers(0, 3, (T, 2)))
    check(model, draw(T, 2, 3), labels, step_fn=loss)


def test_loss_of_the_last_step_only(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value

    loss = lambda net, x, y: y[1] * jnp.sum((net(x) - y[0]) ** 2)
    y = jnp.stack([jnp.zeros(T).at[-1].set(0.3), jnp.zeros(T).at[-1].set(1.0)], axis=1)
    check(model, draw(T, 3), y, step_fn=loss)


def test_loss_that_penalises_weights(draw):
    @net({"w": draw(3, 4), "free": draw(2)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value

    def loss(net, x, y):
        decay = 0.1 * jnp.sum(model.w.value**2) + jnp.sum(model.free.value**2)
        return squares(net, x, y) + decay

    check(model, draw(T, 3), draw(T, 4), step_fn=loss)


def test_loss_that_reads_states_of_the_model(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4), "k": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        m.k.value = 0.7 * m.k.value + m.h.value
        return m.h.value

    def loss(net, x, y):
        out = net(x)
        return jnp.sum((out + model.k.value - y) ** 2)

    check(model, draw(T, 3), draw(T, 4), step_fn=loss, rules=SINGLE)


def test_several_calls_in_one_loss(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value

    def loss(net, x, y):
        first, second = net(x[0]), net(x[1])
        return jnp.sum((first * second - y) ** 2) + jnp.sum(first)

    xs, ys = draw(T, 2, 3), draw(T, 4)
    learner = bt.D_RTRL(model)
    learner.compile_graph(xs[0, 0])
    found = online_grad(learner, loss, xs, ys)
    result = comparison(found, bptt_grad(model, loss, xs, ys))
    assert result.max_error <= TIGHT, result


@pytest.mark.parametrize("windows", [False, True], ids=["single step", "one window"])
@pytest.mark.parametrize("place", ["encoder", "readout"])
def test_trained_module_outside_the_model(draw, place, windows):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value

    start = model.h.value
    extra = brainstate.ParamState(draw(2, 3) if place == "encoder" else draw(4, 4))
    encode = lambda e, x: sigmoid(x @ e) if place == "encoder" else x
    decode = lambda e, h: h if place == "encoder" else h @ e
    error = lambda e, h, y: jnp.sum((decode(e, h) - y) ** 2, axis=-1)
    xs, ys = draw(T, 2 if place == "encoder" else 3), draw(T, 4)

    # By hand, in reverse mode: through everything, or with the old state fixed for `extra`.
    def loss(w, e, fixed):
        h, total = start, 0.0
        for x, y in zip(xs, ys, strict=True):
            inner = jnp.tanh(0.8 * h + encode(e, x) @ w)
            outer = jnp.tanh(0.8 * jax.lax.stop_gradient(h) + encode(e, x) @ w)
            total, h = total + error(e, outer if fixed else inner, y), inner
        return total

    w, e = model.w.value, extra.value
    truth = {
        ("w",): jax.grad(loss)(w, e, False),
        ("extra",): jax.grad(loss, 1)(w, e, not windows),
    }
    learner = bt.D_RTRL(model, vjp_method="multi-step" if windows else "single-step")
    learner.compile_graph(jnp.zeros(3))
    wrap = bt.MultiStepData if windows else lambda x: x

    def step(x, y):
        return error(extra.value, learner(wrap(encode(extra.value, x))), y)

    weights = {("w",): model.w, ("extra",): extra}
    chunk = T if windows else None
    found = learner.etrace_grad(
        xs, ys, step_fn=step, weights=weights, reduction="sum", chunk_size=chunk
    )
    result = comparison(found, truth)
    assert result.max_error <= TIGHT, result
