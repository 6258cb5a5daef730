"""JAX transformations inside `update`."""

from functools import partial

import brainstate
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import braintrace as bt

from .zoo import T, check, element_wise, matmul, net, sigmoid, spike


def test_vmap_over_batch(draw):
    @net({"w": draw(3, 4), "b": draw(4)}, {"h": draw(2, 4)})
    def model(m, x):
        one = lambda h, v: jnp.tanh(0.8 * h + matmul(v, m.w.value, m.b.value))
        m.h.value = jax.vmap(one)(m.h.value, x)
        return m.h.value

    check(model, draw(T, 2, 3))


def test_vmap_over_the_last_axis(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4, 2)})
    def model(m, x):
        one = lambda h, v: jnp.tanh(0.8 * h + matmul(v, m.w.value))
        m.h.value = jax.vmap(one, in_axes=(1, 0), out_axes=1)(m.h.value, x)
        return m.h.value

    check(model, draw(T, 2, 3))


def test_nested_vmap(draw):
    @net({"w": draw(3, 2)}, {"h": draw(2, 2, 2)})
    def model(m, x):
        one = lambda h, v: jnp.tanh(0.8 * h + matmul(v, m.w.value))
        m.h.value = jax.vmap(jax.vmap(one), in_axes=1, out_axes=1)(m.h.value, x)
        return m.h.value

    check(model, draw(T, 2, 2, 3))


def test_ensemble_of_weights(draw):
    @net({"w": draw(2, 3, 4), "a": draw(2, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        one = lambda h, w, a: element_wise(a, sigmoid) * h + jnp.sin(matmul(x, w))
        m.h.value = jax.vmap(one)(m.h.value, m.w.value, m.a.value)
        return m.h.value

    check(model, draw(T, 3))


def test_ensemble_on_a_batch(draw):
    @net({"w": draw(2, 3, 2)}, {"h": draw(3, 2, 2)})
    def model(m, x):
        one = lambda h, v, w: jnp.tanh(0.8 * h + matmul(v, w))
        members = jax.vmap(one, in_axes=(0, None, 0))
        m.h.value = jax.vmap(members, in_axes=(0, 0, None))(m.h.value, x, m.w.value)
        return m.h.value

    check(model, draw(T, 3, 3))


def test_vmap_with_axis_size_and_no_mapped_operator_input(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        m.h.value = jax.vmap(lambda h: jnp.tanh(0.8 * h + matmul(x, m.w.value)))(m.h.value)
        return m.h.value

    check(model, draw(T, 3))


def test_vmapped_embedding_and_grouped(draw):
    @net({"table": draw(5, 3), "w": draw(2, 3, 2)}, {"h": draw(2, 3), "k": draw(2, 2, 2)})
    def model(m, x):
        rows = jax.vmap(lambda i: bt.embedding(i, m.table.value))(x)
        m.h.value = 0.8 * m.h.value + jnp.tanh(rows)
        into = jax.vmap(lambda v: bt.grouped_matmul(jnp.stack([v, v**2]), m.w.value))
        m.k.value = 0.7 * m.k.value + into(jnp.arange(6.0).reshape(2, 3) * 0.1 * (1 + x[:, None]))
        return m.h.value.sum() + m.k.value

    check(model, jnp.asarray([[0, 3], [1, 4], [3, 3], [2, 0]]))


def test_vectorize(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        step = lambda v, h: jnp.tanh(0.8 * h + matmul(v, m.w.value))
        m.h.value = jnp.vectorize(step, signature="(i),(o)->(o)")(x, m.h.value)
        return m.h.value

    check(model, draw(T, 2, 3))


def test_operator_inside_checkpoint(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        policy = jax.checkpoint_policies.dots_saveable
        step = jax.checkpoint(lambda h, v, w: jnp.tanh(0.8 * h + matmul(v, w)), policy=policy)
        m.h.value = step(m.h.value, x, m.w.value)
        return m.h.value

    check(model, draw(T, 2, 3))


def test_operator_inside_jit(draw):
    @partial(jax.jit, static_argnames="power")
    def helper(h, x, w, power):
        inner = jax.jit(lambda v: matmul(v, w) ** power)
        return 0.8 * h + inner(x)

    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        m.h.value = helper(m.h.value, x, m.w.value, power=2)
        return m.h.value

    check(model, draw(T, 2, 3))


def test_state_written_inside_brainstate_jit(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        @brainstate.transform.jit
        def inner(v):
            m.h.value = jnp.tanh(0.8 * m.h.value + matmul(v, m.w.value))

        inner(x)
        return m.h.value

    check(model, draw(T, 3))


def test_named_call_and_scope(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        drive = jax.named_call(lambda v: matmul(v, m.w.value), name="drive")
        with jax.named_scope("leak"):
            m.h.value = jnp.tanh(0.8 * m.h.value + drive(x))
        return m.h.value

    check(model, draw(T, 3))


def test_operator_inside_lax_map(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + lax.map(lambda v: matmul(v, m.w.value), x))
        return m.h.value

    check(model, draw(T, 2, 3))


def test_associative_scan_off_the_state_path(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        summed = lax.associative_scan(jnp.add, x)
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(summed, m.w.value))
        return lax.associative_scan(jnp.multiply, m.h.value)

    check(model, draw(T, 3))


@jax.custom_jvp
def layer_jvp(x, w):
    return jnp.tanh(matmul(x, w))


@layer_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = layer_jvp(x, w)
    return y, (1 - y**2) * (dx @ w + x @ dw)


@jax.custom_vjp
def layer_vjp(x, w):
    return jnp.tanh(matmul(x, w))


def _layer_back(saved, ct):
    x, w, y = saved
    d = ct * (1 - y**2)
    return d @ w.T, jnp.outer(x, d)


layer_vjp.defvjp(lambda x, w: (layer_vjp(x, w), (x, w, layer_vjp(x, w))), _layer_back)


@pytest.mark.parametrize("layer", [layer_jvp, layer_vjp], ids=["jvp", "vjp"])
def test_operator_inside_custom_derivative(draw, layer):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = 0.8 * jnp.sin(m.h.value) + layer(x, m.w.value)
        return m.h.value

    # pp_prop filters the input of an operator, which stands for its derivative if it is linear in
    # it; this one is not, and the dense reference does not define it.
    check(model, draw(T, 3), rules=("d_rtrl", "d_rtrl, windows of 2", "d_rtrl, one window"))


@jax.custom_jvp
def fired(x, w):
    return (matmul(x, w) > 0).astype(x.dtype)


@fired.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    v = matmul(x, w)
    return fired(x, w), (dx @ w + x @ dw) / (1 + jnp.abs(v)) ** 2


def test_operator_inside_a_surrogate_spike(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = 0.8 * m.h.value + fired(x, m.w.value)
        return m.h.value

    check(model, draw(T, 3))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def crossing(width, v, threshold):
    return (v > threshold).astype(v.dtype)


def _crossing_back(width, saved, ct):
    d = ct * jnp.maximum(0, width - jnp.abs(saved))
    return d, -d.sum(0)


crossing.defvjp(
    lambda width, v, threshold: (crossing(width, v, threshold), v - threshold), _crossing_back
)


def test_surrogate_of_two_arguments(draw):
    @net({"w": draw(3, 4), "theta": draw(4)}, {"v": draw(2, 4)})
    def model(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = crossing(2.0, v, 0.1 * element_wise(m.theta.value))
        m.v.value = v - 0.5 * z
        return z + v

    check(model, draw(T, 2, 3))


def test_vmapped_surrogate(draw):
    @net({"w": draw(3, 4)}, {"v": draw(2, 4)})
    def model(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = jax.vmap(jax.vmap(spike))(v - 0.3)
        m.v.value = v * (1 - z)
        return z + 0.1 * m.v.value

    check(model, draw(T, 2, 3))


def test_relu_family(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = jax.nn.gelu(0.8 * m.h.value + jax.nn.relu6(y)) + jax.nn.silu(jax.nn.elu(y))
        m.h.value = jax.nn.leaky_relu(m.h.value) + jax.nn.hard_tanh(jax.nn.log_sigmoid(y))
        return m.h.value

    check(model, draw(T, 2, 3))


def test_gradient_of_an_energy_inside(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        energy = lambda h: jnp.sum(jnp.cos(h) + h * matmul(x, m.w.value))
        m.h.value = 0.8 * m.h.value + 0.5 * jax.grad(energy)(m.h.value)
        return m.h.value

    check(model, draw(T, 3))


def test_directional_derivative_of_an_operator_inside(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y, dy = jax.jvp(lambda v: jnp.tanh(matmul(v, m.w.value)), (x,), (jnp.cos(x),))
        m.h.value = 0.8 * jnp.sin(m.h.value) + y + dy
        return m.h.value

    check(model, draw(T, 3), exact=False)  # the tangent of an operator is plain computation


def test_debug_callbacks(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        jax.debug.callback(lambda v: None, m.h.value)
        return m.h.value

    check(model, draw(T, 3))
