"""Gates of one product: apart, each has its own slots; of an operator, D is that of one of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import sigmoid, tanh

import braintrace
from braintrace.ops import ETPPrimitive
from braintrace.program._flatten import inner_jaxprs
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
    marked = lambda w, x: jnp.split(braintrace.matmul(x, w), gates, -1)
    each = lambda ws, x: [x @ w for w in ws]
    steps = [partial(cell, split=how) for how in (at_once, marked, each)]
    return steps, joined, apart, state(draw(B, N))


@pytest.mark.parametrize("block", [1, 4, T])
@pytest.mark.parametrize("name", CELLS)
def test_joined_gates_have_the_gradient_of_separate_ones(name, block):
    xs = jnp.asarray(np.random.default_rng(1).normal(size=(T, B, I)))
    (at_once, marked, each), joined, apart, state = case(name)

    def gradient(step, params):
        net = braintrace.online(step)
        grad = net.grad(lambda out: jnp.sum(out**2), block_size=block)
        half = len(xs) // 2  # the second part begins with traces that are not zero

        def run():
            first, (carry, _) = grad(params, net.init(params, state, xs[0]), xs[:half])
            second, _ = grad(params, carry, xs[half:])
            return jax.tree.map(jnp.add, first, second)

        return computed(run), net._last.graph

    want, of_each = gradient(each, apart)
    for step in (at_once, marked):
        got, graph = gradient(step, joined)
        for k in joined:
            np.testing.assert_allclose(got[k], jnp.concatenate(want[k], -1), rtol=1e-10)
        slots = lambda of: sorted((*r.slots.shape, r.slots.width) for r in of.relations)
        if step is at_once:
            assert slots(graph) == slots(of_each)
        else:
            of_x = next(r for r in graph.relations if r.weight_path == ("i",))
            start, stop = of_x.slots.runs[-1]
            assert stop - start == N and start == (N if name == "LSTM" else 0)


@pytest.mark.parametrize("way", [0, 1], ids=["plain", "marked"])
@pytest.mark.parametrize("name", CELLS)
def test_joined_gates_are_read_by_slices(name, way):
    steps, joined, _, state = case(name)
    xs = jnp.ones((T, B, I))
    net = braintrace.online(steps[way])
    grad = net.grad(lambda out: jnp.sum(out**2))
    program = jax.make_jaxpr(grad)(joined, net.init(joined, state, xs[0]), xs)
    assert "gather[" not in str(program)


def test_products_are_taken_apart_where_only_parts_are_read():
    """Mamba's: a step size that reaches the whole state, and inputs that reach a few elements."""

    def step(w, state, x):
        z, u, dt = jnp.split(x @ w["in"] + w["bias"], (3, 9), -1)
        past = jnp.concatenate([state["past"][:, 1:], u[:, None]], 1)
        s = sigmoid(dt)[:, :, None] * state["s"] + past.mean((1, 2))[:, None, None]
        return {"past": past, "s": s}, s.sum((1, 2)) + z.sum(-1)

    rng = np.random.default_rng(0)
    w = {"in": jnp.asarray(rng.normal(size=(3, 11))), "bias": jnp.asarray(rng.normal(size=11))}
    state = {"past": jnp.zeros((B, 4, 6)), "s": jnp.zeros((B, 2, 5))}
    x = jnp.asarray(rng.normal(size=(B, 3)))
    net = braintrace.online(step, "rtrl")
    carry = net.init(w, state, x)
    xs = jnp.asarray(rng.normal(size=(T, B, 3)))
    got, _ = net.grad(lambda out: jnp.sum(out**2))(w, carry, xs)

    def bptt(w):
        return jnp.sum(jax.lax.scan(lambda h, x: step(w, h, x), state, xs)[1] ** 2)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, jax.grad(bptt)(w))
    traces = braintrace.online(step).init(w, state, x).traces
    assert sum(a.size for a in jax.tree.leaves(traces)) < B * 4 * (6 * 4 + 2 * 5) + 1


@pytest.mark.parametrize(
    "read",
    [
        lambda y: (y, y[:, :2]),  # the whole
        lambda y: (y[:, :3], y[:, 2:]),  # parts that overlap
        lambda y: (y[:, ::2], y[:, 1::2]),  # every second
        lambda y: (y[:1], y[1:]),  # of the samples
        lambda y: jnp.split(y, 2, -1)[:1] * 2,  # one part alone
        lambda y: jnp.split(tanh(y) * y[:, ::-1], 2, -1),
    ],
)
def test_what_is_read_otherwise_has_the_same_gradient(read):
    def step(w, h, x):
        parts = read(x @ w)
        h = 0.5 * h + sum(p.sum() for p in parts)
        return h, h

    w, xs = jnp.arange(12.0).reshape(3, 4) / 12, jnp.ones((T, B, 3))
    net = braintrace.online(step)
    got, _ = net.grad(lambda out: out**2)(w, net.init(w, jnp.zeros(()), xs[0]), xs)
    loss = lambda w: jnp.sum(jax.lax.scan(lambda h, x: step(w, h, x), jnp.zeros(()), xs)[1] ** 2)
    np.testing.assert_allclose(got, jax.grad(loss)(w), rtol=1e-9)


def products(jaxpr, in_loop=False):
    """The products in loops of a program."""
    for eqn in jaxpr.eqns:
        if in_loop and (isinstance(eqn.primitive, ETPPrimitive) or "dot" in eqn.primitive.name):
            yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from products(inner, in_loop or eqn.primitive.name == "scan")


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("form", [0, 2], ids=["joined", "apart"])
def test_states_take_one_product_per_step_for_all_gates(name, form):
    steps, joined, apart, state = case(name)
    step, params = steps[form], (joined, apart)[form // 2]
    xs = jnp.ones((T, B, I))
    net = braintrace.online(step)
    carry = net.init(params, state, xs[0])
    grad = net.grad(lambda out: jnp.sum(out**2), keep_traces=False)
    program = jax.make_jaxpr(lambda p: grad(p, carry, xs)[0])(params)
    assert len(list(products(program.jaxpr))) == 1
