"""Gates that share a product share what their units remember: D is that of one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import sigmoid, tanh

import braintrace
from interpret import computed

T, B, I, N = 6, 2, 3, 4


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def gru(p, h, x, split):
    (xr, xz, xn), (hr, hz, hn) = split(p["i"], x), split(p["h"], h)
    r, z = sigmoid(xr + hr), sigmoid(xz + hz)
    h = (1 - z) * tanh(xn + r * hn) + z * h
    return h, h


def lstm(p, state, x, split):
    """The gate that reaches one state only is the first of the product."""
    h, c = state
    o, i, f, g = (a + b for a, b in zip(split(p["i"], x), split(p["h"], h), strict=True))
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(c)
    return (h, c), h


CELLS = {"GRU": (gru, 3, lambda h: h), "LSTM": (lstm, 4, lambda h: (h, 0.5 * h))}


def case(name):
    """The step with joined and with separate products, their weights, and a state."""
    cell, gates, state = CELLS[name]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape))
    joined = {"i": draw(I, gates * N), "h": draw(N, gates * N)}
    apart = {k: jnp.split(w, gates, -1) for k, w in joined.items()}
    at_once = lambda w, x: jnp.split(x @ w, gates, -1)
    each = lambda ws, x: [x @ w for w in ws]
    steps = ((lambda p, h, x, how=how: cell(p, h, x, how)) for how in (at_once, each))
    return *steps, joined, apart, state(draw(B, N))


@pytest.mark.parametrize("block", [1, 4, T])
@pytest.mark.parametrize("name", CELLS)
def test_joined_gates_have_the_gradient_of_separate_ones(name, block):
    xs = jnp.asarray(np.random.default_rng(1).normal(size=(T, B, I)))
    at_once, each, joined, apart, state = case(name)

    def gradient(step, params):
        net = braintrace.online(step)
        grad = net.grad(lambda out: jnp.sum(out**2), block_size=block)
        half = len(xs) // 2  # the second part begins with traces that are not zero

        def run():
            first, (carry, _) = grad(params, net.init(params, state, xs[0]), xs[:half])
            second, _ = grad(params, carry, xs[half:])
            return jax.tree.map(jnp.add, first, second)

        return computed(run), net._last.graph

    got, graph = gradient(at_once, joined)
    want, _ = gradient(each, apart)
    for k in joined:
        np.testing.assert_allclose(got[k], jnp.concatenate(want[k], -1), rtol=1e-10)
    of_x = next(r for r in graph.relations if r.weight_path == ("i",))
    start, stop = of_x.slots.runs[-1]
    assert stop - start == N and start == (N if name == "LSTM" else 0)


@pytest.mark.parametrize("name", CELLS)
def test_joined_gates_are_read_by_slices(name):
    at_once, _, joined, _, state = case(name)
    xs = jnp.ones((T, B, I))
    net = braintrace.online(at_once)
    grad = net.grad(lambda out: jnp.sum(out**2))
    program = jax.make_jaxpr(grad)(joined, net.init(joined, state, xs[0]), xs)
    assert "gather[" not in str(program)
