"""Rules with a signal of their own learn also where no result of the step depends on a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.rules import decolle, osttp, r_stdp, tess, three_factor

XS, YS = jnp.linspace(-1, 1, 18).reshape(6, 3), jnp.ones((6, 2))
PARAMS = {"w": jnp.linspace(-0.5, 0.9, 12).reshape(3, 4)}
RULES = {
    "decolle": (decolle(2), {"y_target": YS}),
    "tess": (tess(2), {"y_target": YS}),
    "osttp": (osttp([jnp.linspace(0, 1, 8).reshape(2, 4)]), {"y_target": YS}),
    "three_factor": (three_factor(), {"modulator": jnp.ones(6)}),
    "r_stdp": (r_stdp((0, 0.1)), {"modulator": jnp.ones(6)}),
}


def read(p, h, x):
    h = 0.9 * h + x @ p["w"]
    return h, h.sum()


def unread(p, h, x):
    return read(p, h, x)[0], x.sum()


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_does_not_hang_on_what_reads_the_states(name):
    rule, extra = RULES[name]
    found = []
    for step, block in ((read, 6), (unread, 6), (unread, 1)):
        net = braintrace.online(step, rule)
        carry = net.init(PARAMS, jnp.zeros(4), XS[0])
        grad = net.grad(lambda out: 0 * out, block_size=block)
        found.append(grad(PARAMS, carry, XS, **extra)[0]["w"])
    assert np.abs(found[0]).max() > 1e-2
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-10)


def test_single_calls_too():
    net, total = braintrace.online(unread, decolle(2)), 0.0
    carry = net.init(PARAMS, jnp.zeros(4), XS[0])

    def loss(params, carry, x, y):
        carry, out = net(params, carry, x, y_target=y)
        return 0 * out, carry

    for x, y in zip(XS, YS, strict=True):
        grads, carry = jax.grad(loss, has_aux=True)(PARAMS, carry, x, y)
        total += grads["w"]
    whole = braintrace.online(read, decolle(2))
    start = whole.init(PARAMS, jnp.zeros(4), XS[0])
    want = whole.grad(lambda out: 0 * out)(PARAMS, start, XS, y_target=YS)[0]["w"]
    np.testing.assert_allclose(total, want, rtol=1e-10)
