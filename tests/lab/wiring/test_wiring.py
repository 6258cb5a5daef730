"""Signs, masks and rewiring: what never changes, and the equations of an update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import wiring

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(6, 5))).at[2].set(0.0)


def trained(optimizer, w=W, updates=40):
    """All weights on the way, with random gradients, and the last state."""
    state, seen = optimizer.init(w), []
    step = jax.jit(optimizer.update)
    for _ in range(updates):
        change, state = step(jnp.asarray(RNG.normal(size=w.shape)), state, w)
        w = optax.apply_updates(w, change)
        seen.append(w)
    return jnp.stack(seen), state


def test_signs_are_kept_and_weights_of_zero_stay():
    seen, _ = trained(optax.chain(optax.adam(0.3), wiring.keep_signs()))
    assert (seen * jnp.sign(W) >= 0).all() and (seen[:, 2] == 0).all()
    stopped = (seen[:-1] == 0) & (W != 0)
    assert stopped.any() and (stopped & (seen[1:] != 0)).any()  # and they come back


def test_an_update_that_keeps_the_sign_is_the_optimizers():
    bare, kept = optax.sgd(1e-3), optax.chain(optax.sgd(1e-3), wiring.keep_signs(jnp.sign(W)))
    g = jnp.ones(W.shape)
    want, got = (o.update(g, o.init(W), W)[0] for o in (bare, kept))
    np.testing.assert_array_equal(got, jnp.where(W == 0, 0, want))


def test_signs_may_be_given_per_unit():
    rows = jnp.where(jnp.arange(6) < 4, 1.0, -1.0)[:, None] * jnp.ones(W.shape)
    seen, _ = trained(optax.chain(optax.sgd(0.3), wiring.keep_signs(rows)), jnp.abs(W) * rows)
    assert (seen[:, :4] >= 0).all() and (seen[:, 4:] <= 0).all() and (seen[-1] != 0).any()


def test_a_mask_leaves_the_others_as_they_are():
    mask = jnp.asarray(RNG.random(W.shape) < 0.5)
    seen, _ = trained(optax.chain(optax.adam(0.1), wiring.keep_mask(mask)))
    assert ((seen != W) == mask).all()


@pytest.mark.parametrize("connections", [7, 0.25])
def test_rewiring_keeps_the_number_of_connections_and_their_signs(connections):
    optimizer = wiring.deep_r(
        optax.sgd(0.1), connections, l1=0.02, temperature=1e-3, learning_rate=0.5
    )
    state = optimizer.init(W)
    n = 7 if connections == 7 else round(0.25 * 30)
    w, every = jnp.abs(W) * state.signs * state.active, [state.active]
    for _ in range(60):
        change, state = optimizer.update(jnp.asarray(RNG.normal(size=W.shape)), state, w)
        w = optax.apply_updates(w, change)
        every.append(state.active)
        assert state.active.sum() == n and (w[~state.active] == 0).all()
        assert (w * state.signs >= 0).all()
    assert jnp.any(jnp.stack(every), 0).sum() > n  # they move


def test_an_update_is_that_of_the_paper():
    optimizer = wiring.deep_r(optax.sgd(0.1), 30, l1=0.3, learning_rate=0.2, signs=jnp.ones(()))
    w, g = jnp.abs(W), jnp.asarray(RNG.normal(size=W.shape))
    state = optimizer.init(w)
    change, after = optimizer.update(g, state, w)
    strength = w - 0.1 * g - 0.2 * 0.3
    np.testing.assert_allclose(w + change, jnp.maximum(strength, 0), rtol=1e-12, atol=1e-15)
    assert after.active.all()  # all of them: who falls silent is drawn again


def test_noise_has_the_temperature_of_the_paper():
    optimizer = wiring.deep_r(optax.sgd(0.0), 10_000, temperature=0.02, learning_rate=0.5, seed=3)
    state = optimizer.init(jnp.zeros(10_000))
    w = 100 * state.signs
    change, _ = optimizer.update(jnp.zeros(10_000), state, w)
    np.testing.assert_allclose(change.std(), np.sqrt(2 * 0.5 * 0.02), rtol=0.05)


def test_dales_law_through_online_training():
    def step(params, h, x):
        h = jnp.tanh(0.8 * h + x @ params["w_in"] + h @ params["w"])
        return h, h.sum()

    signs = jnp.where(jnp.arange(8) < 6, 1.0, -1.0)[:, None]
    params = {"w_in": jnp.ones((3, 8)), "w": 0.1 * signs * jnp.ones((8, 8))}
    net = braintrace.online(step, "d_rtrl")
    optimizer = optax.chain(optax.adam(0.05), wiring.keep_signs())
    xs = jnp.asarray(RNG.normal(size=(50, 3)))
    run = net.train(lambda out, y: (out - y) ** 2, optimizer)
    carry = net.init(params, jnp.zeros(8), xs[0])
    new, *_ = run(params, optimizer.init(params), carry, xs, xs[:, 0])
    assert (new["w"] * signs >= 0).all() and np.abs(new["w"] - params["w"]).max() > 0.01


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"31.*30"):
        wiring.deep_r(optax.sgd(0.1), 31).init(W)
    optimizer = wiring.keep_signs()
    with pytest.raises(ValueError, match="keep_signs"):
        optimizer.update(W, optimizer.init(W))
