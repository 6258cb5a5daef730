"""What rules read of a block."""

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace.engine import Block, TimeAxes, Values, observe_block
from braintrace.rules import otpe

T, B, I, N = 6, 2, 2, 3
XS = jnp.asarray(np.random.RandomState(0).randn(T, B, I))
W = jnp.asarray(np.random.RandomState(1).randn(I, N))
H = jnp.zeros((B, N))


def leaky(w, h, x):
    h = 0.9 * h + x @ w
    return h, h


def gated(w, h, x):
    h = jax.nn.sigmoid(x[..., :1]) * h + x @ w
    return h, h


def test_a_transition_that_is_the_same_at_all_steps_has_one_entry():
    for step, entries in ((leaky, 1), (gated, T)):
        net = braintrace.online(step)
        net.init(W, H, XS[0])
        plan = net._compiled()
        hidden = (jnp.zeros((T, B, N)),)
        axes = TimeAxes(T, tuple(False for _ in plan.consts), (True,), None)
        block = Block(Values(plan.consts, (XS,), (W,), hidden, ()), axes, {})
        (steps,) = observe_block(plan.graph, block)
        assert steps.D.shape == (entries, B, N, 1, 1) and steps.f.shape == (T, B, N, 1)
        expected = 0.9 if step is leaky else jax.nn.sigmoid(XS[..., :1])
        np.testing.assert_allclose(
            steps.D[..., 0, 0] + jnp.zeros_like(steps.f[..., 0]), expected * jnp.ones((T, B, N))
        )


def test_steps_of_a_window_that_are_taken_one_by_one_see_it_too():
    def gradient(most):
        net = braintrace.online(leaky, otpe(leak=0.9, trace_clip_abs=most), window=3)
        return net.grad(lambda out: (out**2).sum())(W, net.init(W, H, XS[0]), XS)[0]

    np.testing.assert_allclose(gradient(1e3), gradient(None), rtol=1e-10)
    assert not np.allclose(gradient(0.5), gradient(None))
