"""Where no trace is needed (windows, `no_trace`) nothing has to be followed from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import online

T, B, I, N = 4, 3, 2, 5
RNG = np.random.default_rng(0)
XS = jnp.asarray(RNG.normal(size=(T, B, I)))
W, U = jnp.asarray(RNG.normal(size=(I, N))), jnp.asarray(0.3 * RNG.normal(size=(N, N)))
PARAMS = {"w": W, "u": U}
NEAR_ONE = jnp.eye(N) + 0.1 * U @ U.T
OFF = jnp.full(N, -0.2)


@jax.custom_vjp
def clipped(y):
    return y


clipped.defvjp(lambda y: (y, None), lambda _, c: (jnp.clip(c, -0.1, 0.1),))


def conjugate_gradient(y):
    return jax.scipy.sparse.linalg.cg(lambda v: v @ NEAR_ONE, y, maxiter=20, tol=1e-14)[0]


def cable(y):
    low, up = OFF.at[0].set(0), OFF.at[-1].set(0)
    return jax.lax.linalg.tridiagonal_solve(low, jnp.full(N, 1.5), up, y.T).T


def spectral(w):
    v = jnp.ones(N) / N**0.5
    for _ in range(3):
        a = w @ v
        v = w.T @ (a / jnp.linalg.norm(a))
        v = v / jnp.linalg.norm(v)
    return w / jnp.linalg.norm(w @ v)


CELLS = {
    "cumsum": lambda p, h, x: 0.5 * h + jnp.cumsum(x @ p["w"] + h @ p["u"], 1),
    "solve": lambda p, h, x: jnp.linalg.solve(NEAR_ONE + p["u"], (0.5 * h + x @ p["w"]).T).T,
    "cg": lambda p, h, x: conjugate_gradient(0.5 * h @ p["u"] + x @ p["w"]),
    "cable": lambda p, h, x: cable(0.5 * h @ p["u"] + x @ p["w"]),
    "spectral": lambda p, h, x: jnp.cumsum(h @ spectral(p["u"]) + jnp.tanh(x @ p["w"]), 1),
    "clipped_state": lambda p, h, x: clipped(0.5 * h @ p["u"] + x @ p["w"]),
}


def loss(out):
    return jnp.sum(out**2 * jnp.cos(out))


def bptt(step, reset=lambda h: h):
    def total(p):
        def one(h, x):
            h, out = step(p, reset(h), x)
            return h, loss(out)

        return jax.lax.scan(one, jnp.zeros((B, N)), XS)[1].sum()

    return jax.grad(total)(PARAMS)


def learned(step, rule, **options):
    net = online(step, rule, **options)
    carry = net.init(PARAMS, jnp.zeros((B, N)), XS[0])
    return jax.grad(lambda p: loss(net.scan(p, carry, XS)[1]))(PARAMS), net


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10), a, b)


def both(cell):
    def step(p, h, x):
        h = cell(p, h, x)
        return h, h

    return step


@pytest.mark.parametrize("cell", CELLS)
def test_one_window_is_backpropagation_whatever_the_step_does(cell):
    step = both(CELLS[cell])
    got, net = learned(step, "d_rtrl", window=T)
    close(got, bptt(step))
    assert not any(p.exact for p in net.report.parameters.values())


@pytest.mark.parametrize("cell", ["cumsum", "spectral", "clipped_state"])
def test_no_trace_is_the_gradient_within_steps_whatever_the_step_does(cell):
    step = both(CELLS[cell])
    close(learned(step, "no_trace")[0], bptt(step, jax.lax.stop_gradient))


def test_without_windows_a_step_in_which_nothing_is_followed_is_refused():
    with pytest.raises(braintrace.CompilationError, match="or use RTRL or windows"):
        learned(both(CELLS["cumsum"]), "d_rtrl")
    with pytest.raises(braintrace.NotSupportedError, match="has no forward derivative") as caught:
        learned(both(CELLS["clipped_state"]), "d_rtrl")
    assert "test_reverse_only.py:" in str(caught.value) and "no_trace" in str(caught.value)
    with pytest.raises(braintrace.NotSupportedError, match="has no forward derivative"):
        learned(both(CELLS["clipped_state"]), "rtrl")


def test_clipping_of_one_path_is_left_out_and_named():
    step = both(lambda p, h, x: 0.5 * h + x @ p["w"] + clipped(h * h))
    close(learned(step, "d_rtrl", window=T)[0], bptt(step))
    report = learned(step, "d_rtrl")[1].report.parameters
    assert not report["w",].exact
    assert "backward rule that is not linear" in str(report["w",])


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_clipping_the_output_needs_no_forward_derivative(rule):
    def step(p, h, x):
        h = 0.5 * h + jnp.tanh(x @ p["w"])
        return h, clipped(h @ p["u"])

    got, net = learned(step, rule)
    close(got, bptt(step))
    assert all(p.exact for p in net.report.parameters.values())


@jax.custom_vjp
def iterated(y):
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, y))[1]


iterated.defvjp(lambda y: jax.vjp(iterated.fun, y), lambda pull, c: pull(c))  # no vjp of a while


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl", "eprop"])
def test_a_reverse_rule_that_fails_is_refused(rule):
    with pytest.raises(braintrace.NotSupportedError) as caught:
        learned(both(lambda p, h, x: 0.5 * h + jnp.tanh(x @ p["w"]) + iterated(h)), rule)
    assert "test_reverse_only.py:" in str(caught.value)
    told = "has no forward derivative" if rule == "rtrl" else "why:   ValueError: Reverse-mode"
    assert told in str(caught.value)


def test_a_reverse_rule_that_fails_is_not_asked_for_what_is_constant():
    step = both(lambda p, h, x: 0.5 * h + jnp.tanh(x @ p["w"]) * iterated(x[:, :1]))
    close(learned(step, "d_rtrl")[0], bptt(step))
