"""Rules with a loss per layer: TESS against its equations, TP as a loss of `decolle`."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.oracle._reward import lif
from tests.oracle._tess import tess_grad
from tests.rules.spiking import neurons

import braintrace
from braintrace.rules import decolle, tess

T, I, N, C = 50, 4, 6, 3
RNG = np.random.default_rng(2)
XS = jnp.asarray(RNG.normal(size=(T, I)))
YS = jnp.asarray(np.eye(C)[RNG.integers(0, C, T)])
WEIGHTS = {
    "w_in": jnp.asarray(0.7 * RNG.normal(size=(I, N))),
    "w_rec": jnp.asarray(0.3 * RNG.normal(size=(N, N))),
}
B = jnp.asarray(RNG.normal(size=(N, C)))


def step(params, state, x):
    v, z = neurons(params, state, x)
    return (v, z), z.sum()


stored_spikes = lambda state: state[..., 1]


def gradient(rule, xs=XS, ys=YS, batch=(), loss=lambda out: 0 * out.sum(), **options):
    net = braintrace.online(step, rule)
    carry = net.init(WEIGHTS, (jnp.zeros((*batch, N)),) * 2, xs[0])
    return net.grad(loss, **options)(WEIGHTS, carry, xs, y_target=ys)[0]


def reference(B, xs=XS, ys=YS, l_pre=0.5, l_post=0.2, a_pre=1.0, a_post=-0.2):
    ran = lif(WEIGHTS, xs)
    spikes, psis = (np.array([step[i] for step in ran]) for i in (1, 2))
    inputs = {k: np.array([step[0][k] for step in ran]) for k in WEIGHTS}
    how = (l_pre, l_post, a_pre, a_post)
    return {
        k: tess_grad(spikes, psis, x, np.asarray(ys), np.asarray(B), *how)
        for k, x in inputs.items()
    }


def close(got, want):
    for k, g in want.items():
        assert np.abs(g).max() > 1e-2
        np.testing.assert_allclose(got[k], g, rtol=1e-10, atol=1e-12, err_msg=k)


@pytest.mark.parametrize("block", [1, 7, T])
def test_tess_is_that_of_its_equations(block):
    rule = tess(C, [B], stored_spikes, leak_pre=0.7, leak_post=0.4, alpha_post=0.5)
    close(gradient(rule, block_size=block), reference(B, l_pre=0.7, l_post=0.4, a_post=0.5))


def test_its_read_outs_are_square_waves():
    rule = tess(3, observe=stored_spikes)
    waves = np.array([[1.0, 1, 1], [1, -1, -1], [1, -1, 1], [-1, 1, -1], [-1, -1, 1], [-1, -1, -1]])
    got = gradient(rule)
    assert waves.shape == (N, C)
    close(got, reference(waves / N**0.5))


def test_samples_are_summed():
    xs, ys = jnp.stack([XS, -XS], 1), jnp.stack([YS, YS[::-1]], 1)
    each = [reference(B, xs[:, i], ys[:, i]) for i in range(2)]
    got = gradient(tess(C, [B], stored_spikes), xs, ys, (2,))
    close(got, {k: each[0][k] + each[1][k] for k in WEIGHTS})


def test_traces_propagation_is_a_loss_of_decolle():
    """Activities of samples with one label shall be alike, of others apart."""

    def contrast(activity, labels):
        near = activity @ activity.T
        return ((near - labels @ labels.T) ** 2).sum()

    rule = decolle(N, readouts=[jnp.eye(N)], local_loss=contrast, observe=stored_spikes)
    xs, ys = jnp.stack([XS, -XS], 1), jnp.stack([YS, YS[::-1]], 1)
    got = gradient(rule, xs, ys, (2,))
    assert all(np.abs(g).max() > 1e-2 for g in got.values())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="no windows"):
        braintrace.online(step, tess(C), window=4)
    with pytest.raises(ValueError, match="without y_target"):
        net = braintrace.online(step, tess(C))
        carry = net.init(WEIGHTS, (jnp.zeros(N),) * 2, XS[0])
        net(WEIGHTS, carry, XS[0])
    with pytest.raises(ValueError, match="leak_pre"):
        tess(C, leak_pre=1.0)
