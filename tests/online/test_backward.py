"""Blocks taken from the last to the first are single steps, whatever a segment holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from online_cases import drawn

import braintrace
from braintrace._online import _blocks

T, B, N_IN, N, N_OUT = 11, 2, 3, 4, 2
XS, YS, MASK = drawn(1, T, B, N_IN), drawn(2, T, B, N_OUT), jnp.ones(T)
PARAMS = {"w": drawn(3, N_IN, N), "r": drawn(4, N, N), "b": drawn(5, N), "out": drawn(6, N, N_OUT)}
PARAMS["h0"] = drawn(7, N)


def noisy(p, state, x):
    """A closed loop with noise; the key, a counter and a constant are states as well."""
    h, a, key, scale, last = state
    key, now = jax.random.split(key)
    noise = 0.1 * (jax.random.key_data(now) % 7)[:1].astype(h.dtype)
    u = x @ p["w"] + h @ p["r"] + p["b"] + 0.1 * (last @ p["out"].T)
    h = jnp.tanh(scale * h + u + noise) - 0.3 * a
    out = h @ p["out"]
    return (h, 0.9 * a + 0.1 * h**2, key, scale, jax.lax.stop_gradient(out)), out


def begun(rule, window):
    net = braintrace.online(noisy, rule, window=window)
    zeros = jnp.zeros((B, N))
    start = lambda p: (jnp.tanh(p["h0"] + zeros), zeros, KEY, jnp.full(N, 0.7), YS[0])
    return net, net.init(PARAMS, start, XS[0])


KEY, ONE = jax.random.key(3), 1 << 25
RULES = {
    "d_rtrl": "d_rtrl",
    "ostl_recurrent": "ostl_recurrent",
    "snap": braintrace.rules.snap(n=2),
    "eprop": braintrace.rules.eprop(kappa_filter_decay=0.6),
}


def loss(out, y):
    return jnp.sum((out - y) ** 2), out[0]


def after(net, carry, size, mask, keep=True, xs=XS):
    run = net.grad(loss, has_aux=True, block_size=size, keep_traces=keep)
    grads, (carry, losses, aux) = run(PARAMS, carry, xs, YS, mask=mask)
    key, states = carry.state[2], (*carry.state[:2], *carry.state[3:])
    counted = losses if mask is None else jnp.where(mask == 0, 0, losses)
    return grads, states, jax.random.key_data(key), carry.traces, carry.steps, counted, aux


def assert_same(one, other):
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    jax.tree.map(close, one, other)


@pytest.mark.parametrize(
    "rule, window, masked, size, keep, room",
    [
        ("d_rtrl", None, True, 4, True, 1500),
        ("d_rtrl", 2, True, 4, False, ONE),
        ("ostl_recurrent", 3, False, 6, True, ONE),
        ("snap", None, True, 3, True, 1500),
        ("eprop", None, True, 4, True, ONE),
        ("eprop", 2, False, 4, False, 1500),
    ],
)
def test_blocks_taken_backward_are_single_steps(
    rule, window, masked, size, keep, room, monkeypatch
):
    """In one segment or in several, from traces that are not zero."""
    monkeypatch.setattr(_blocks, "SEGMENT", room)
    mask = MASK.at[3:8].set(0.0).at[1].set(0.5) if masked else None
    net, carry = begun(RULES[rule], window)
    traces = jax.tree.map(lambda a: 0.1 + a, carry.traces)
    carry = dataclasses.replace(carry, traces=traces, steps=carry.steps + 5)
    assert_same(after(net, carry, size, mask, keep), after(net, carry, 1, mask, keep))


def test_nan_in_blocks_that_do_not_count_is_nothing():
    """They are the last blocks, and some in the middle behind which the states are numbers."""
    mask = MASK.at[4:8].set(0.0).at[10:].set(0.0)

    def step(p, h, x):
        h = jnp.tanh(0.5 * h + jnp.nan_to_num(x) @ p["w"])
        return h, h @ p["out"] + x.sum()

    own = {k: PARAMS[k] for k in ("w", "out")}
    results = []
    for size, xs in ((1, XS), (2, jnp.where(mask[:, None, None] == 0, jnp.nan, XS))):
        net = braintrace.online(step)
        carry = net.init(own, jnp.zeros((B, N)), XS[0])
        run = net.grad(lambda out, y: loss(out, y)[0], block_size=size)
        xs = jnp.where(mask[:, None, None] == 0, jnp.nan, xs)
        results.append(run(own, carry, xs, YS, mask=mask)[0])
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(results))
    assert_same(*results)


def test_blocks_that_are_taken_backward_make_no_trace():
    net, carry = begun("d_rtrl", None)
    shapes = {a.shape for a in jax.tree.leaves(carry.traces) if a.ndim > 2}

    def made(keep):
        run = net.grad(loss, has_aux=True, block_size=4, keep_traces=keep)
        text = str(jax.make_jaxpr(lambda: run(PARAMS, carry, XS, YS)[0])())
        named = ["f64[" + ",".join(map(str, s)) + "]" for s in shapes]
        lines = [line for line in text.splitlines() if "dot_general" in line]
        return sum(name in line.split("=")[0] for line in lines for name in named)

    assert made(keep=False) == 0 < made(keep=True)


@jax.custom_vjp
def penalised(v):
    return v


penalised.defvjp(lambda v: (v, v), lambda v, ct: (ct + 0.1 * v**3,))


@pytest.mark.parametrize("masked", [False, True])
def test_a_penalty_and_what_comes_from_later_blocks_count_once(masked):
    def step(p, state, x):
        a, h = state
        a = penalised(jnp.tanh(0.6 * a + x @ p["w"]))
        h = 0.9 * h + x @ p["u"]
        return (a, h), jnp.concatenate([a, h], -1)

    own = {"w": PARAMS["w"], "u": drawn(8, N_IN, N)}
    start, targets = (jnp.zeros((B, N)), jnp.zeros((B, N))), drawn(9, T, B, 2 * N)
    error = lambda out, y: jnp.sum((out - y) ** 2)
    mask = MASK.at[3:5].set(0.5) if masked else None

    def total(p):
        outs = jax.lax.scan(lambda state, x: step(p, state, x), start, XS)[1]
        losses = jax.vmap(error)(outs, targets)
        return jnp.sum(losses if mask is None else mask * losses)

    net = braintrace.online(step, "d_rtrl")
    run = net.grad(error, block_size=3)
    found = run(own, net.init(own, start, XS[0]), XS, targets, mask=mask)[0]
    assert_same(found, jax.grad(total)(own))
