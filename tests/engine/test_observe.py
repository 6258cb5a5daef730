"""What rules read of a block."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import braintrace
from braintrace.engine import Block, TimeAxes, Values, observe_block
from braintrace.engine._repeats import repeats
from braintrace.engine._seeds import without_seeds
from braintrace.program import evaluate, trace
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


REPEATS = {
    "broadcast": (lambda v: jnp.broadcast_to(v, (B, N)), {0}),
    "one varies": (lambda v: jnp.broadcast_to(v, (B, N)) * H, set()),
    "literal": (lambda v: 2.0 * jnp.broadcast_to(v, (B, N)), {0}),
    "size one": (lambda v: v[None] + jnp.ones((B, 1)), {0}),
    "behind": (lambda v: jnp.broadcast_to(v[:, None], (N, B)), {1}),
    "reshape": (lambda v: jnp.broadcast_to(v, (B, N)).reshape(B, 1, N), {0}),
    "joined by reshape": (lambda v: jnp.broadcast_to(v, (B, N)).reshape(B * N), set()),
    "stack": (lambda v: jnp.stack(2 * [jnp.broadcast_to(v, (B, N))], 0), {1}),
    "concatenate": (lambda v: jnp.concatenate(2 * [jnp.broadcast_to(v, (B, N))], 0), set()),
    "moved": (lambda v: jnp.cumsum(jnp.broadcast_to(v, (B, N)), 0), set()),
}


def test_axes_along_which_a_value_repeats():
    values = jnp.arange(1.0, N + 1)
    for name, (function, expected) in REPEATS.items():
        program, _ = trace(function, values)
        assert repeats(program).get(program.outputs[0], set()) == expected, name
        array = function(values)
        for axis in expected:
            np.testing.assert_array_equal(
                array, jnp.take(array, jnp.zeros(array.shape[axis], int), axis)
            )


def test_products_with_seeds_are_what_they_were_made_of():
    nothing = jax.custom_vjp(lambda re: ())
    nothing.defvjp(lambda re: ((), ()), lambda _, ct: None)

    def parts(re, im):
        nothing(re)  # an equation without results
        h = lax.complex(re, im)
        one, zero = jnp.ones((1, N)), jnp.zeros((1, N))
        turned = lax.complex(zero, one) * h + jnp.zeros((B, N), complex)
        column = -turned.real.reshape(B, 1, N)
        return [(lax.complex(one, zero) * h).imag, turned.imag, column, turned, re * zero + im]

    re, im = jnp.arange(6.0).reshape(B, N), jnp.arange(6.0).reshape(B, N) - 2.5
    program, values = trace(parts, re, im)
    simple = without_seeds(program, values)
    assert simple.outputs[:2] == program.inputs[::-1]
    last = next(e for e in simple.equations if simple.outputs[2] in e.outputs)
    assert last.name == "reshape" and last.inputs[0] is program.inputs[1]
    for a, b in zip(parts(re, im), evaluate(simple, values, [re, im]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_transition_has_one_entry_where_it_repeats():
    for step, entries in ((leaky, (1, 1, 1)), (gated, (T, B, 1))):
        net = braintrace.online(step)
        net.init(W, H, XS[0])
        plan = net._compiled()
        hidden = (jnp.zeros((T, B, N)),)
        axes = TimeAxes(T, tuple(False for _ in plan.consts), (True,), None)
        block = Block(Values(plan.consts, (XS,), (W,), hidden, ()), axes, {})
        (steps,) = observe_block(plan.graph, block)
        assert steps.D.shape == (*entries, 1, 1) and steps.f.shape == (T, B, N, 1)
        assert [f.shape for f in steps.slots] == [(1, 1, 1)]
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
