"""What a weight may be made of, and where it may be used."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace as bt

from .zoo import T, check, element_wise, matmul, net, sigmoid

MASK = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 1]])
norm = lambda w: w / jnp.linalg.norm(w, axis=0)

# name: (shapes of the parameters, the matrix made of them)
MADE = {
    "masked": ([(3, 4)], lambda w: w * MASK),
    "scaled": ([(3, 4)], lambda w: 0.3 * w),
    "abs": ([(3, 4)], jnp.abs),
    "softplus": ([(3, 4)], jax.nn.softplus),
    "square": ([(3, 4)], jnp.square),
    "normalised": ([(3, 4), (4,)], lambda w, g: g * norm(w)),
    "softmax": ([(3, 4)], lambda w: jax.nn.softmax(w, axis=0)),
    "standardised": ([(3, 4)], lambda w: (w - w.mean()) / w.std()),
    "transposed": ([(4, 3)], jnp.transpose),
    "sliced": ([(5, 6)], lambda w: w[1:4, 2:]),
    "gathered": ([(5,)], lambda w: w[np.add.outer(np.arange(3), np.arange(4)) % 5]),
    "reshaped": ([(12,)], lambda w: w.reshape(3, 4)),
    "scattered": ([(5,)], lambda w: jnp.zeros((3, 4)).at[[0, 1, 2, 0, 1], [0, 1, 2, 3, 3]].set(w)),
    "sum of two": ([(3, 4), (3, 4)], lambda a, b: a + jnp.sin(b)),
    "product of two": ([(3, 4), (3, 4)], lambda a, g: a * g),
    "matrix product": ([(3, 2), (2, 4)], lambda a, b: a @ b),
    "concatenated": ([(3, 2), (3, 2)], lambda a, b: jnp.concatenate([a, b], axis=1)),
    "outer product": ([(3,), (4,)], jnp.outer),
    "solved for": ([(3, 3), (3, 4)], lambda a, b: jnp.linalg.solve(a @ a.T + jnp.eye(3), b)),
    "orthogonal": ([(4, 3)], lambda a: jnp.linalg.qr(a)[0].T),
    "by a scan": ([(3, 4)], lambda w: lax.scan(lambda c, r: (c + r, c * r), w[0], w)[1]),
}


@pytest.mark.parametrize("name", MADE)
def test_operand_made_of(draw, name):
    shapes, make = MADE[name]

    @net({f"p{i}": draw(*s) for i, s in enumerate(shapes)}, {"h": draw(2, 4)})
    def model(m, x):
        w = make(*(getattr(m, f"p{i}").value for i in range(len(shapes))))
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
        return m.h.value

    check(model, draw(T, 2, 3), rules=2)


def test_weight_used_twice_in_a_step(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4), "k": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) * matmul(jnp.sin(x), m.w.value))
        m.k.value = 0.7 * m.k.value + matmul(x**2, m.w.value)
        return m.h.value * m.k.value

    check(model, draw(T, 3))


def test_weight_shared_by_two_layers(draw):
    @net({"w": draw(3, 3)}, {"a": draw(2, 3), "b": draw(2, 3)})
    def model(m, x):
        m.a.value = jnp.tanh(0.8 * m.a.value + matmul(x, m.w.value))
        m.b.value = jnp.tanh(0.7 * m.b.value + matmul(m.a.value, m.w.value))
        return m.b.value

    check(model, draw(T, 2, 3), exact=False)


@pytest.mark.parametrize("by", ["plain", "operator"])
def test_weight_tied_to_the_readout(draw, by):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        product = jnp.matmul if by == "plain" else matmul
        return product(m.h.value, m.w.value.T)

    check(model, draw(T, 3))


def test_weight_used_by_operator_and_plainly_off_the_state(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value + x @ m.w.value + jnp.sum(m.w.value**2)

    check(model, draw(T, 3))


def test_weight_used_by_operator_and_plainly_on_the_state(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) + jnp.sin(x) @ m.w.value)
        return m.h.value

    check(model, draw(T, 3), exact=False)


def test_weight_in_the_input_of_its_own_operator(draw):
    @net({"w": draw(3, 3), "u": draw(3, 3)}, {"h": draw(3)})
    def model(m, x):
        into = matmul(jnp.tanh(x @ m.w.value), m.w.value) + matmul(x, m.u.value)
        m.h.value = 0.8 * m.h.value + into
        return m.h.value

    check(model, draw(T, 3), exact=False)


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    kernel: jax.Array
    inner: dict


def test_parameters_in_a_dict(draw):
    @net({"p": {"w": draw(3, 4), "deep": {"b": draw(4)}}}, {"h": draw(2, 4)})
    def model(m, x):
        p = m.p.value
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, p["w"], p["deep"]["b"]))
        return m.h.value

    grads = check(model, draw(T, 2, 3))["d_rtrl"]["p",]
    assert jax.tree.structure(grads) == jax.tree.structure(model.p.value)


def test_parameters_in_a_tuple(draw):
    @net({"p": (draw(3, 4), [draw(4), draw(4)])}, {"h": draw(2, 4)})
    def model(m, x):
        w, (b, tau) = m.p.value
        a = element_wise(tau, sigmoid)
        m.h.value = a * m.h.value + jnp.tanh(matmul(x, w, b))
        return m.h.value

    check(model, draw(T, 2, 3))


def test_parameters_in_a_dataclass(draw):
    @net({"p": Weights(draw(3, 4), {"tau": draw(4)})}, {"h": draw(2, 4)})
    def model(m, x):
        a = element_wise(m.p.value.inner["tau"], sigmoid)
        m.h.value = a * m.h.value + matmul(x, m.p.value.kernel)
        return m.h.value

    grads = check(model, draw(T, 2, 3))["d_rtrl"]["p",]
    assert isinstance(grads, Weights)


def test_operands_from_one_parameter(draw):
    @net({"p": draw(4, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.p.value[:3], m.p.value[3]))
        return m.h.value

    check(model, draw(T, 2, 3))


def test_frozen_leaf(draw):
    @net({"p": {"w": draw(3, 4), "b": draw(4)}}, {"h": draw(2, 4)})
    def model(m, x):
        p = m.p.value
        y = matmul(x, lax.stop_gradient(p["w"]), p["b"])
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    for grads in check(model, draw(T, 2, 3)).values():
        assert not np.any(grads["p",]["w"])
        assert np.all(grads["p",]["b"])


def test_half_frozen_weight(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        w = jnp.where(MASK == 1, m.w.value, lax.stop_gradient(m.w.value))
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
        return m.h.value

    for grads in check(model, draw(T, 2, 3)).values():
        assert np.array_equal(np.asarray(grads["w",]) != 0, MASK == 1)


STOPS = ["input", "output of the operator", "part of the output", "state", "part of the state"]
STOPS += ["new state", "value read", "scale of the weight", "gate"]


@pytest.mark.parametrize("where", STOPS)
def test_stop_gradient(draw, where):
    stop = lambda place, v: lax.stop_gradient(v) if place == where else v

    @net({"w": draw(3, 4), "u": draw(3, 4), "c": draw(4)}, {"h": draw(4), "k": draw(4)})
    def model(m, x):
        y = stop("output of the operator", matmul(stop("input", x), m.w.value))
        y = y.at[:2].set(stop("part of the output", y[:2]))
        h = stop("state", m.h.value)
        h = jnp.concatenate([stop("part of the state", h[:2]), h[2:]])
        u = m.u.value * stop("scale of the weight", jnp.abs(m.u.value).sum())
        gate = stop("gate", sigmoid(element_wise(m.c.value) + matmul(x, u)))
        m.k.value = 0.9 * m.k.value + jnp.sin(y)
        m.h.value = stop("new state", gate * h + y) + 0.1 * m.k.value
        return stop("value read", m.h.value) * y + m.k.value

    check(model, draw(T, 3), rules=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(draw, dtype):
    @net({"w": draw(3, 4).astype(dtype)}, {"h": draw(2, 4).astype(dtype)})
    def model(m, x):
        m.h.value = jnp.tanh(0.75 * m.h.value + matmul(x, m.w.value))
        return m.h.value

    x, y = draw(T, 2, 3).astype(dtype), draw(T, 2, 4).astype(dtype)
    loss = lambda net, x, y: 0.5 * jnp.sum((net(x) - y).astype(float) ** 2)
    # A dozen roundings of 2**-9 (bfloat16) or 2**-12 follow each other in a gradient.
    found = check(model, x, y, step_fn=loss, tolerance=0.05 if dtype == "bfloat16" else 0.01)
    assert all(g["w",].dtype == dtype for g in found.values())


def test_mixed_precision(draw):
    @net({"w": draw(3, 4).astype("float32"), "a": draw(4)}, {"h": draw(2, 4)})
    def model(m, x):
        y = matmul(x.astype("float32"), m.w.value).astype(float)
        m.h.value = jnp.tanh(element_wise(m.a.value, sigmoid) * m.h.value + y)
        return m.h.value

    found = check(model, draw(T, 2, 3), tolerance=1e-5)  # the operator computes in float32
    assert all(g["w",].dtype == "float32" and g["a",].dtype == float for g in found.values())


def test_low_precision_operator_in_full_precision_state(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        y = matmul(x.astype("bfloat16"), m.w.value.astype("bfloat16")).astype(float)
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    found = check(model, draw(T, 2, 3), tolerance=0.02)  # the operator computes in bfloat16
    assert all(g["w",].dtype == float for g in found.values())


def test_complex_weight(draw):
    @net({"w": draw(3, 4) + 1j * draw(3, 4), "nu": draw(4)}, {"h": draw(2, 4) + 1j * draw(2, 4)})
    def model(m, x):
        a = jnp.exp(-0.2 + 1j * element_wise(m.nu.value))
        m.h.value = a * m.h.value + matmul(x.astype(complex), m.w.value)
        return m.h.value.real + jnp.abs(m.h.value) ** 2

    check(model, draw(T, 2, 3))


def test_complex_weight_of_two_real_ones(draw):
    @net({"re": draw(3, 4), "im": draw(3, 4)}, {"h": draw(4) + 1j * draw(4)})
    def model(m, x):
        w = lax.complex(m.re.value, m.im.value)
        m.h.value = (0.7 + 0.3j) * m.h.value + matmul(x.astype(complex), w)
        return m.h.value.real * m.h.value.imag

    check(model, draw(T, 3))


def test_every_operator_in_one_model(draw):
    params = {"table": draw(5, 4), "b": draw(3, 2), "a": draw(2, 4), "e": draw(3, 2)}

    @net(params, {"h": draw(2, 4), "k": draw(2, 2)})
    def model(m, x):
        low = bt.lora_matmul(x, m.b.value, m.a.value, alpha=0.5)
        rows = bt.embedding(jnp.asarray([1, 4]), m.table.value)
        m.h.value = jnp.tanh(0.8 * m.h.value + low + rows * x[:, :1])
        m.k.value = 0.7 * m.k.value + bt.einsum("bi,io->bo", x, m.e.value)
        return m.h.value.sum() * m.k.value

    check(model, draw(T, 2, 3))
