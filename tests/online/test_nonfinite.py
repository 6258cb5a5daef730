"""Updates that are not finite: left out whole, or the end of training."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import NonFiniteError

T, B, I, N = 12, 2, 3, 4
RNG = np.random.default_rng(0)
XS = RNG.standard_normal((T, B, I))
PARAMS = {"w": RNG.standard_normal((I, N)), "u": 0.3 * RNG.standard_normal((N, N))}
ADAM = optax.adam(0.05)


def step(params, state, x):
    """A rate cell beside the time since its last large value, infinite at first, and a count."""
    h, last, n = state
    h = jnp.tanh(0.8 * h + braintrace.matmul(x, params["w"]) + braintrace.matmul(h, params["u"]))
    return (h, jnp.where(h > 0.5, 0.0, last + 1), n + 1), h


def loss(out, scale):
    return jnp.sum(scale * (out - 0.2) ** 2)


def start(rule="d_rtrl"):
    net = braintrace.online(step, rule)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = jnp.zeros((B, N)), jnp.full((B, N), -jnp.inf), 0
    return net, params, ADAM.init(params), net.init(params, state, XS[0])


def train(rule, xs, scales, every, *, nonfinite="skip", mask=None, **options):
    net, params, opt, carry = start(rule)
    run = net.train(loss, ADAM, every, nonfinite=nonfinite, **options)
    return net, run(params, opt, carry, jnp.asarray(xs), jnp.asarray(scales), mask=mask)


def assert_equal(one, two):
    for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def without(a, *updates, every):
    return np.delete(a, [u * every + k for u in updates for k in range(every)], axis=0)


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "rtrl", "uoro"])
@pytest.mark.parametrize("every", [1, 3])
def test_update_that_is_not_finite_is_as_if_its_steps_had_never_been(rule, every):
    options = {"decay_or_rank": 0.9} if rule == "pp_prop" else {}
    rule = getattr(braintrace.rules, rule)(**options)
    xs, scales = XS.copy(), np.ones(T)
    xs[every, 1, 0] = np.nan  # one sample of the second update, and a loss of the fourth
    scales[3 * every + every - 1] = np.inf
    net, (*got, losses) = train(rule, xs, scales, every)
    assert net.last_run.skipped == 2
    clean = [without(a, 1, 3, every=every) for a in (XS, np.ones(T))]
    if rule.name == "uoro":  # its random signs are those of the step's number
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(got[:2]))
    else:
        net, (*want, _) = train(rule, *clean, every)
        assert_equal(got, want)
        assert net.last_run.skipped == 0
    wrong = ~np.isfinite(np.asarray(losses)).reshape(-1, every).all(axis=1)
    assert wrong.nonzero()[0].tolist() == [1, 3]  # losses are those that were computed


def test_training_without_bad_updates_is_that_of_warn():
    _, want = train("d_rtrl", XS, np.ones(T), 2, nonfinite="warn")
    _, got = train("d_rtrl", XS, np.ones(T), 2)
    assert_equal(got, want)


def test_gradient_that_overflows_behind_a_finite_loss_is_left_out():
    def sharp(out, scale):
        return jnp.sum(jnp.sqrt(jnp.abs(out - out[..., :1]) * scale))  # infinite slope at zero

    net, params, opt, carry = start()
    run = net.train(sharp, ADAM, 3, nonfinite="skip")
    scales = np.ones(T)
    scales[3:6] = 0.0
    new, *_, losses = run(params, opt, carry, jnp.asarray(XS), jnp.asarray(scales))
    assert np.isfinite(losses).all() and net.last_run.skipped == T // 3
    assert_equal(new, params)


def test_masked_step_may_be_nan():
    mask = np.ones(T)
    mask[4] = 0
    scales = np.ones(T)
    scales[4] = np.nan
    net, (*got, _) = train("d_rtrl", XS, scales, 2, mask=jnp.asarray(mask))
    _, (*want, _) = train("d_rtrl", XS, np.ones(T), 2, mask=jnp.asarray(mask))
    assert net.last_run.skipped == 0
    assert_equal(got, want)


def test_skipping_works_inside_jit_and_with_a_function_for_every_update():
    net, params, opt, carry = start()
    xs, scales = XS.copy(), jnp.ones(T)
    xs[5] = np.inf
    seen = []
    run = net.train(loss, ADAM, 2, nonfinite="skip", on_update=lambda n, m: seen.append(n))
    want = run(params, opt, carry, jnp.asarray(xs), scales)
    assert seen == [1, 2, 3, 4, 5, 6] and net.last_run.skipped == 1
    inside = jax.jit(net.train(loss, ADAM, 2, nonfinite="skip"))
    assert_equal(inside(params, opt, carry, jnp.asarray(xs), scales), want)


def test_stop_raises_with_the_results_of_the_updates_before():
    xs = XS.copy()
    xs[6] = np.nan
    with pytest.raises(NonFiniteError, match="update 4") as error:
        train("d_rtrl", xs, np.ones(T), 2, nonfinite="stop")
    assert "why:" in str(error.value) and "do:" in str(error.value)
    _, (*want, _) = train("d_rtrl", XS[:6], np.ones(6), 2)
    assert_equal(error.value.results[:3], want)
    train("d_rtrl", XS, np.ones(T), 2, nonfinite="stop")
    with pytest.raises(TypeError, match=r"nonfinite='stop'.*transformation"):
        net, *arrays = start()
        jax.jit(net.train(loss, ADAM, nonfinite="stop"))(*arrays, XS, np.ones(T))


def test_other_words_are_refused_and_skip_does_not_warn():
    with pytest.raises(ValueError, match="nonfinite='drop'"):
        start()[0].train(loss, ADAM, nonfinite="drop")
    xs = XS.copy()
    xs[0] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net, results = train("d_rtrl", xs, np.ones(T), 2)
        jax.block_until_ready(results)
        assert net.last_run.skipped == 1
