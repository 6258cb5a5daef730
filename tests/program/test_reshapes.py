"""Reshapes that permute, against backpropagation through time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace
from braintrace.engine import Engine, recorded, scan_time

T, N = 5, 3
RNG = np.random.RandomState(0)
draw = lambda *shape: jnp.asarray(RNG.randn(*shape))
W, H, XS = draw(N, N), draw(N, N), draw(T, N, N)
by_columns = lambda a: jnp.ravel(a, order="F").reshape(N, N)


def turned_decay(w, h, x):
    """A decay that repeats along the rows, and behind the reshape along the columns."""
    decay = jnp.broadcast_to(jax.nn.sigmoid(x[0]), (N, N))
    h = lax.reshape(decay, (N, N), (1, 0)) * h + x @ w
    return h, h


def turned_ratio(w, h, x):
    """A value by itself in another order: no quotient of 1."""
    gate = jax.nn.sigmoid(h)
    h = 0.5 * h * (gate / by_columns(gate)) + x @ w
    return h, h


def bptt(step):
    def loss(w):
        h, total = H, 0.0
        for x in XS:
            h, out = step(w, h, x)
            total += (out**2).sum()
        return total

    return jax.grad(loss)(W)


@pytest.mark.parametrize(
    ("step", "rule", "options"),
    [(turned_decay, "d_rtrl", {}), (turned_ratio, "snap", {"n": 2}), (turned_ratio, "rtrl", {})],
)
def test_a_reshape_that_permutes_keeps_the_gradient_exact(step, rule, options):
    net = braintrace.online(step, rule, **options)
    carry = net.init(W, H, XS[0])
    got, _ = net.grad(lambda out: (out**2).sum())(W, carry, XS)
    assert "1 of 1 parameter is exact" in str(net.report)
    np.testing.assert_allclose(got, bptt(step), rtol=1e-10)


def test_a_loop_as_a_kernel_reads_small_arrays_in_their_order():
    def body(h, x):
        by_columns = jnp.ravel(x, order="F")
        return 0.5 * h * by_columns[1] + by_columns[2], h

    h, xs = draw(4, N), draw(T, 2, 2)
    run = recorded(lambda *a: scan_time(body, *a, T), Engine.KERNEL)
    for a, b in zip(run(h, xs), lax.scan(body, h, xs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert [loop.reason for loop in run.loops] == [None]
