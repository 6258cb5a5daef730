"""States that are zero under functions singular there: finite, and infinite, as BPTT is."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from oracle import uoro_step

T, B, I, N = 5, 2, 3, 4
XS = jax.random.normal(jax.random.key(0), (T, B, I))
DONE = jax.random.bernoulli(jax.random.key(3), 0.4, (T, B)).at[0].set(True)
W = jax.random.normal(jax.random.key(1), (I, N))
H = jnp.zeros((B, N))


def normed(w, h, x):
    h = 0.9 * h / (1 + jnp.linalg.norm(h, axis=-1, keepdims=True)) + x @ w
    return h, h


def rooted(w, v, x):
    v = 0.9 * v + jax.nn.relu(x @ w)
    return v, jnp.sqrt(v)


def reset(w, h, x, done):
    return normed(w, jnp.where(done[:, None], 0, h), x)


def reset_root(w, h, x, done):
    h = 0.5 * jnp.sqrt(jnp.where(done[:, None], 0, h)) + (x @ w) ** 2 + 0.1
    return h, h


def at_zero(w, h, x):
    h = 0.9 * h + x @ w
    return h, jnp.sqrt(h - jax.lax.stop_gradient(h))


def shrunk(h):
    return h / (1 + jnp.linalg.norm(h, axis=-1, keepdims=True))


def in_branch(w, h, x):
    h = 0.9 * jax.lax.cond(x.sum() > 0, jnp.tanh, shrunk, h) + x @ w
    return h, h


def in_loop(w, h, x):
    h = 0.9 * jax.lax.fori_loop(0, 2, lambda i, h: shrunk(h), h) + x @ w
    return h, h


def carried(w, h, x):
    # What is infinite is carried by the loop, and meets the tangents a turn later.
    turn = lambda c, _: ((c[0] * c[1], 1 / (1 + jnp.sqrt(c[0] ** 2))), None)
    h = 0.9 * jax.lax.scan(turn, (h, jnp.ones_like(h)), None, 3)[0][0] + x @ w
    return h, h


PROGRAMS = {
    f.__name__: f for f in (normed, rooted, reset, reset_root, at_zero, in_branch, in_loop, carried)
}
INPUTS = {f: (XS, DONE) if "reset" in f else (XS,) for f in PROGRAMS}


def loss(out):
    return (out * jnp.arange(1.0, N + 1)).sum()


def bptt(name):
    def total(w):
        h, summed = H, 0.0
        for t in range(T):
            h, out = PROGRAMS[name](w, h, *(a[t] for a in INPUTS[name]))
            summed = summed + loss(out)
        return summed

    return jax.grad(total)(W)


def in_steps(net, carry, xs):
    gradient, total = net.grad(loss), 0
    for t in range(T):
        one, (carry, _) = gradient(W, carry, jax.tree.map(lambda a, t=t: a[t : t + 1], xs))
        total = total + one
    return total


def of_scan(net, carry, xs):
    return jax.grad(lambda w: jax.vmap(loss)(net.scan(w, carry, xs)[1]).sum())(W)


ORDERS = {
    "one block": lambda net, *run: net.grad(loss)(W, *run)[0],
    "blocks of 2": lambda net, *run: net.grad(loss, block_size=2)(W, *run)[0],
    "single steps": in_steps,
    "grad of scan": of_scan,
}


def gradient(name, rule, order, **options):
    xs = INPUTS[name] if len(INPUTS[name]) > 1 else INPUTS[name][0]
    net = braintrace.online(PROGRAMS[name], rule, **options)
    first = (a[0] for a in INPUTS[name])
    return ORDERS[order](net, net.init(W, H, *first), xs)


EXACT = [
    ("normed", "rtrl", {}),
    ("normed", "snap", {"n": 2}),
    ("rooted", "d_rtrl", {}),
    ("reset", "rtrl", {}),
    ("reset", "snap", {"n": 2}),
    ("reset_root", "d_rtrl", {}),
    ("in_branch", "rtrl", {}),
    ("in_loop", "rtrl", {}),
    ("in_loop", "snap", {"n": 2}),
    ("carried", "d_rtrl", {}),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name, rule, options", EXACT)
def test_a_zero_trace_times_an_infinite_jacobian_is_zero(name, rule, options, order):
    expected = bptt(name)
    assert np.isfinite(expected).all()
    got = gradient(name, rule, order, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["normed", "rooted", "reset"])
@pytest.mark.parametrize("size", [1, 2])
def test_windows_are_finite_where_bptt_is(name, size):
    xs = INPUTS[name] if len(INPUTS[name]) > 1 else INPUTS[name][0]
    net = braintrace.online(PROGRAMS[name], "snap", window=size)
    carry = net.init(W, H, *(a[0] for a in INPUTS[name]))
    got = net.grad(loss, block_size=2)(W, carry, xs)[0]
    np.testing.assert_allclose(got, bptt(name), rtol=1e-12, atol=1e-12)


OTHERS = {
    "pp_prop": {"decay_or_rank": 0.9},
    "eprop": {"kappa_filter_decay": 0.5},
    "otpe": {"leak": 0.9},
    "stllr": {},
    "kf_rtrl": {},
    "uoro": {},
    "rtrl": {"paths": 1},
}


@pytest.mark.parametrize("rule, options", OTHERS.items())
@pytest.mark.parametrize("name", ["normed", "rooted", "reset"])
def test_rules_that_approximate_are_finite_too(name, rule, options):
    assert np.isfinite(gradient(name, rule, "blocks of 2", **options)).all()


def uoro_definitions(w, xs):
    """UORO of `rooted` with two units, for all signs: a state that no weight moves has none."""
    found = []
    for signs in product(product([-1.0, 1.0], repeat=2), repeat=len(xs) - 1):
        v, s, flat, total = np.zeros(2), np.zeros(2), np.zeros(w.size), 0.0
        for x, nu in zip(xs, [*signs, (1.0, 1.0)], strict=True):
            moved = x @ w > 0
            v = 0.9 * v + np.where(moved, x @ w, 0)
            slope = np.where(
                v > 0, np.arange(1.0, 3) / (2 * np.sqrt(np.where(v > 0, v, 1))), np.inf
            )
            lam = np.where(s == 0, 0, 0.9 * slope) @ s
            B = np.where(moved, x[:, None], 0)[..., None] * np.eye(2)  # (inputs, units, states)
            within = np.where(moved, np.where(moved, slope, 0) * x[:, None], 0)
            total = total + within + lam * flat.reshape(w.shape)
            B = B.reshape(w.size, 2).T
            s, flat = uoro_step(s, flat, np.array(nu) * moved, 0.9 * np.eye(2), B, 1e-12)
        found.append(total)
    return found


def test_uoro_gives_no_sign_to_a_state_that_no_weight_moves():
    w, xs = np.array([[1.0, -0.3], [0.5, 0.4]]), np.array([[1.0, 0.2], [0.3, 0.1], [-0.2, 1.0]])
    truths = uoro_definitions(w, xs)
    for key in range(4):
        net = braintrace.online(rooted, "uoro", projection_key=key)
        weighted = lambda out: (out * jnp.arange(1.0, 3)).sum()
        got = net.grad(weighted)(jnp.asarray(w), net.init(w, jnp.zeros(2), xs[0]), xs)[0]
        assert np.isfinite(got).all()
        assert min(abs(got - truth).max() for truth in truths) < 1e-9


@pytest.mark.parametrize("order", ["one block", "blocks of 2"])
@pytest.mark.parametrize("rule", ["d_rtrl", "snap", "rtrl"])
def test_a_trace_that_is_not_zero_meets_infinity(rule, order):
    assert not np.isfinite(bptt("at_zero")).any()
    assert not np.isfinite(gradient("at_zero", rule, order)).any()


def unread(w, state, x):
    """A state that no loss reads, of a root that is zero here and there."""
    h, v = state
    h = 0.9 * h + jax.nn.relu(x @ w - 1)
    return (h, 0.5 * v + jnp.sqrt(h)), h


@pytest.mark.parametrize("order", ["one block", "blocks of 2", "grad of scan"])
@pytest.mark.parametrize("rule, options", [("rtrl", {}), ("snap", {"window": 2}), ("d_rtrl", {})])
def test_what_no_loss_reads_is_not_differentiated(rule, options, order):
    def total(w):
        state, summed = (H, H), 0.0
        for x in XS:
            state, out = unread(w, state, x)
            summed = summed + loss(out)
        return summed

    net = braintrace.online(unread, rule, **options)
    got = ORDERS[order](net, net.init(W, (H, H), XS[0]), XS)
    expected = jax.grad(total)(W)
    assert np.isfinite(expected).all() and (expected != 0).any()
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


MIXED = jnp.eye(N) + 0.1 * jax.random.normal(jax.random.key(4), (N, N))


def behind_a_cut(w, h, x):
    h = 0.5 * h + x @ w + jnp.sqrt(jnp.abs(jnp.linalg.solve(MIXED, h.T).T))
    return h, h


@pytest.mark.parametrize("rule", ["d_rtrl", "stllr"])
def test_what_follows_a_cut_is_not_evaluated(rule):
    net = braintrace.online(behind_a_cut, rule)
    carry = net.init(W, H, XS[0])
    block, steps = (net.grad(loss, block_size=n)(W, carry, XS)[0] for n in (T, 1))
    assert np.isfinite(block).all()
    np.testing.assert_allclose(block, steps, rtol=1e-10)
