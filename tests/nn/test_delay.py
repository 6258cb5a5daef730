"""Axonal delays: what arrives, and gradients against a plain function under reverse mode."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn

RNG = np.random.default_rng(0)
T, I, N, LONGEST = 14, 3, 4, 5
XS = jnp.asarray((RNG.random((T, I)) < 0.5).astype(float))
TARGETS = jnp.asarray(RNG.normal(size=(T, N)))
DELAY = np.array([0.4, 2.3, 4.8])
KINDS = ["linear", "gaussian"]


@pytest.fixture(autouse=True)
def setting():
    brainstate.random.seed(0)
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


def made(kind=nn.DelayedLIFCell, interpolation="linear", **options):
    how = {"delay": DELAY * u.ms, "max_delay": LONGEST * u.ms, "width": 1.5 * u.ms}
    weight = 0.5 + np.random.default_rng(1).normal(size=(I, N))
    options = {**how, "w_init": weight, "interpolation": interpolation, **options}
    cell = kind(I, N, **options)
    cell.init_state()
    return cell


def arriving(xs, delay, kind):
    """The definition: of every sender the inputs of the past, weighted by a kernel at its delay."""
    steps = jnp.arange(LONGEST + 1)[:, None] - delay
    if kind == "linear":
        kernel = jnp.maximum(0, 1 - jnp.abs(steps))
    else:
        kernel = jnp.exp(-((steps / 1.5) ** 2) / 2)
        kernel = kernel / kernel.sum(0)
    known = jnp.concatenate([jnp.zeros((LONGEST, xs.shape[1])), xs])
    late = lambda t: sum(kernel[k] * known[t + LONGEST - k] for k in range(LONGEST + 1))
    return jnp.stack([late(t) for t in range(len(xs))])


@pytest.mark.parametrize("interpolation", KINDS)
def test_inputs_arrive_by_the_kernel_at_their_delay(interpolation):
    layer = made(nn.DelayedLinear, interpolation, b_init=RNG.normal(size=N))
    want = arriving(XS, DELAY, interpolation) @ layer.weight.value["weight"]
    got = jnp.stack([layer(x) for x in XS])
    np.testing.assert_allclose(got, want + layer.weight.value["bias"], rtol=1e-12, atol=1e-14)
    layer.init_state(batch_size=2)
    both = jnp.stack([layer(jnp.stack([x, 2 * x])) for x in XS])
    np.testing.assert_allclose(both[:, 0], got, rtol=1e-12, atol=1e-14)


def plain_loss(params, interpolation, cell, xs, targets):
    """Neurons that are reached late, written out; nothing of the layer is used."""
    into = arriving(xs, params["delay"], interpolation) @ params["weight"] + params["bias"]
    V, total = jnp.zeros(N), 0.0
    for drive, target in zip(into, targets, strict=True):
        z = cell.surrogate(V - 1.0)
        V = jnp.exp(-1 / 20.0) * (V - z) + drive
        total += jnp.sum((cell.surrogate(V - 1.0) + 0.1 * V - target) ** 2)
    return total


@pytest.mark.parametrize("interpolation", KINDS)
def test_d_rtrl_of_weights_and_delays_is_reverse_mode_through_time(interpolation):
    cell = made(interpolation=interpolation, recurrent=False, b_init=RNG.normal(size=N))
    learner = braintrace.compile(cell, "d_rtrl", XS[0], strict=True)

    def loss(x, target):
        spikes = learner(x)
        return jnp.sum((spikes + 0.1 * cell.V.value - target) ** 2)

    grads = learner.etrace_grad(XS, TARGETS, step_fn=loss, reduction="sum", block_size=5)
    params = {"delay": jnp.asarray(DELAY), **cell.W.weight.value}
    want = jax.grad(plain_loss)(params, interpolation, cell, XS, TARGETS)
    got = {"delay": grads["W", "delay"], **grads["W", "weight"]}
    assert {k for k, v in want.items() if jnp.any(v != 0)} == {"delay", "weight", "bias"}
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("interpolation", KINDS)
def test_recurrent_delays_are_exact_under_rtrl_and_reported_under_d_rtrl(interpolation):
    own = {"u_init": RNG.normal(size=(N, N)), "u_delay": np.array([0.2, 1.3, 2.1, 0.7]) * u.ms}
    cell = made(interpolation=interpolation, **own)
    learner = braintrace.compile(cell, "rtrl", XS[0], strict=True)
    loss = lambda net, x, y: jnp.sum((net(x) - y) ** 2)
    found = braintrace.verify.compare(learner, loss, XS, TARGETS)
    assert found.max_error < 1e-9 and jnp.any(found.gradients["U", "delay"] != 0)
    report = braintrace.compile(cell, "d_rtrl", XS[0]).report.parameters
    assert report["U", "delay"].how == "trace" and not report["U", "delay"].exact


def test_d_rtrl_is_the_same_without_a_derivative_on_the_way_back_and_smaller():
    u_init, u_delay = RNG.normal(size=(N, N)), np.array([0.2, 1.3, 2.1, 0.7]) * u.ms
    found = []
    for through in (True, False):
        cell = made(u_init=u_init, u_delay=u_delay, through=through)
        learner = braintrace.compile(cell, "d_rtrl", XS[0])
        grads = learner.etrace_grad(
            XS, TARGETS, step_fn=lambda x, y, f=learner: jnp.sum((f(x) - y) ** 2)
        )
        shapes = learner.report.parameters["U", "delay"].trace_shapes
        found.append((jax.tree.leaves(dict(grads)), shapes))
    (full, large), (same, small) = found
    assert large == ((N, N, 1 + LONGEST),) and small == ((N, N, 1),)
    for a, b in zip(full, same, strict=True):
        assert np.any(a)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_delays_are_told_in_ms_and_stay_between_zero_and_the_longest():
    layer = made(nn.DelayedLinear)
    assert layer.delays().unit == u.ms
    np.testing.assert_allclose(layer.delays().to_decimal(u.ms), DELAY)
    layer.delay.value = jnp.array([-3.0, 2.0, 99.0])
    np.testing.assert_allclose(layer.delays().to_decimal(u.ms), [0.0, 2.0, LONGEST])
    with brainstate.environ.context(dt=0.5 * u.ms):
        half = made(nn.DelayedLinear)
    np.testing.assert_allclose(half.delay.value, 2 * DELAY)
    assert half.past.value.shape == (2 * LONGEST, I)
    drawn = nn.DelayedLinear(50, 1, max_delay=8 * u.ms).delays().to_decimal(u.ms)
    assert drawn.min() < 2 and 6 < drawn.max() <= 8


def test_fixed_delays_have_no_parameter_and_the_same_outputs():
    free, fixed = (made(nn.DelayedLinear, train_delay=t, w_init=1.0) for t in (True, False))
    assert set(fixed.states(brainstate.ParamState)) == {("weight",)}
    np.testing.assert_allclose([free(x) for x in XS], [fixed(x) for x in XS], rtol=1e-12)


REFUSED = {
    "a delay beyond the longest": ({"delay": 6 * u.ms}, "a delay is 6 steps"),
    "a negative delay": ({"delay": -1 * u.ms}, "delay is"),
    "no time": ({"delay": 1 * u.mV}, "must be a plain number"),
    "an unknown kernel": ({"interpolation": "cubic"}, "no interpolation 'cubic'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_delay_is_refused(name):
    options, text = REFUSED[name]
    with pytest.raises(ValueError, match=text) as refusal:
        made(nn.DelayedLinear, **options)
    assert "why:" in str(refusal.value) and "do:" in str(refusal.value)
