"""`rtrl(paths=k)`, against dense Jacobians."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.oracle._random_paths import random_paths_grad

import braintrace
from braintrace.rules import rtrl

T, I, N = 12, 3, 5
RNG = np.random.default_rng(4)
XS, YS = jnp.asarray(RNG.normal(size=(T, I))), jnp.asarray(RNG.normal(size=(T, 2)))
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(I, N))),
    "u": jnp.asarray(RNG.normal(size=(N, N)) / N**0.5),
    "out": jnp.asarray(RNG.normal(size=(N, 2))),
}
UNITS = [*range(N), *range(N)]  # of both states


def step(params, state, x):
    h, a = state
    h = jnp.tanh(0.5 * h + x @ params["w"] + h @ params["u"] - 0.3 * a)
    a = 0.9 * a + 0.1 * h
    return (h, a), h @ params["out"]


def loss(y, target):
    return ((y - target) ** 2).sum()


def gradient(rule, xs=XS, ys=YS, batch=(), **options):
    net = braintrace.online(step, rule)
    carry = net.init(PARAMS, (jnp.zeros((*batch, N)),) * 2, xs[0])
    return net.grad(loss, **options)(PARAMS, carry, xs, ys)[0]


def close(got, want):
    for k, g in want.items():
        np.testing.assert_allclose(got[k], g, rtol=1e-10, atol=1e-12, err_msg=k)


@pytest.mark.parametrize("paths", [1, 2])
def test_the_gradient_is_that_of_the_kept_paths(paths):
    state = (jnp.zeros(N),) * 2
    key = jax.random.key(3)
    want = random_paths_grad(step, PARAMS, state, XS, YS, loss, UNITS, paths, key)
    got = gradient(rtrl(paths=paths, path_key=key), block_size=5)
    close(got, want)
    full = gradient("rtrl")
    assert np.abs(got["u"] - full["u"]).max() > 1e-2 * np.abs(full["u"]).max()


def test_all_paths_are_rtrl():
    close(gradient(rtrl(paths=2 * N)), gradient("rtrl"))


def test_samples_do_not_meet():
    xs, ys = jnp.stack([XS, -XS], 1), jnp.stack([YS, YS], 1)
    every = rtrl(paths=2 * N)
    each = [gradient(every, xs[:, i], ys[:, i]) for i in range(2)]
    close(gradient(every, xs, ys, (2,)), jax.tree.map(jnp.add, *each))


def test_the_certificate_says_that_paths_are_left_out():
    net = braintrace.online(step, rtrl(paths=1))
    net.init(PARAMS, (jnp.zeros(N),) * 2, XS[0])
    assert not net.report.parameters["u",].exact
    assert "random paths to every state" in str(net.report)


def test_a_module_learns_with_it():
    with brainstate.random.seed_context(0):
        cell = braintrace.nn.GRUCell(I, N)
        learner = braintrace.compile(cell, "rtrl", XS[0], paths=1, path_key=1)
        grads = learner.etrace_grad(XS, step_fn=lambda x: (learner(x) ** 2).sum())
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_what_is_no_number_of_paths_is_refused():
    with pytest.raises(ValueError, match="paths=0"):
        rtrl(paths=0)
    complex_step = lambda params, h, x: (params["a"] * h + x, h.real)
    net = braintrace.online(complex_step, rtrl(paths=1))
    with pytest.raises(braintrace.NotSupportedError, match="random paths with"):
        net.init({"a": jnp.ones(2, complex)}, jnp.zeros(2, complex), jnp.ones(2))
