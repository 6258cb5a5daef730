"""Weights that change between steps: traces of a parameter, not of what is computed from it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

T, B, I, N = 60, 2, 3, 4
XS = jax.random.normal(jax.random.key(0), (T, B, I))
H = jnp.zeros((B, N))
PARAMS = {
    "w": jax.random.normal(jax.random.key(1), (I, N)),
    "a": jnp.linspace(0.5, 2.0, N),
}


def sigmoid_decay(p, h, x):
    h = jax.nn.sigmoid(p["a"]) * h + x @ p["w"]
    return h, h


def marked_decay(p, h, x):
    h = braintrace.element_wise(p["a"], jax.nn.sigmoid) * h + braintrace.matmul(x, p["w"])
    return h, h


def positive_weights(p, h, x):
    h = 0.9 * h * jax.nn.tanh(p["a"]) + x @ jax.nn.softplus(p["w"])
    return h, h


def squared_and_masked(p, h, x):
    h = 0.9 * h + p["a"] ** 2 + x @ (p["w"] ** 3 * jnp.eye(I, N))
    return h, h


def linear(p, h, x):
    w = p["w"].T.T * jnp.arange(1.0, N + 1) + 0.5 * p["w"]
    h = 0.9 * h + p["a"] + x @ w
    return h, h


def low_rank(p, h, x):
    h = 0.9 * h + x @ (p["w"][:, :1] * p["a"])
    return h, h


def low_rank_operator(p, h, x):
    h = 0.9 * h + braintrace.lora_matmul(x, p["w"][:, :1], p["a"][None])
    return h, h


MODELS = {
    f.__name__: f
    for f in (sigmoid_decay, marked_decay, positive_weights, squared_and_masked, linear)
}


def loss(out):
    return ((out - 1.0) ** 2).mean()


def trained(model, rule, block_size=None, **options):
    optimizer = optax.adam(0.02)
    net = braintrace.online(model, rule, **options)
    train = net.train(loss, optimizer, 2, block_size=block_size)
    carry = net.init(PARAMS, H, XS[0])
    return train(PARAMS, optimizer.init(PARAMS), carry, XS)[0]


def drift(new, reference):
    far = lambda a, b: sum(float(((a[k] - b[k]) ** 2).sum()) for k in a)
    return (far(new, reference) / far(reference, PARAMS)) ** 0.5


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_updates_at_every_other_step_are_those_of_rtrl(model):
    assert drift(trained(model, "d_rtrl"), trained(model, "rtrl")) < 1e-9


@pytest.mark.parametrize("rule", ["snap", "eprop", "ostl_recurrent"])
def test_rules_with_a_trace_per_weight_follow_the_parameter(rule):
    assert drift(trained(sigmoid_decay, rule), trained(sigmoid_decay, "rtrl")) < 1e-9


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_move_of_the_weights_between_calls(model):
    moved = jax.tree.map(lambda a: a - 0.3, PARAMS)

    def later(rule):
        net = braintrace.online(model, rule)
        carry = net.scan(PARAMS, net.init(PARAMS, H, XS[0]), XS[:5])[0]
        return net.grad(loss)(moved, carry, XS[5:8])[0]

    expected = later("rtrl")
    for k, gradient in later("d_rtrl").items():
        assert np.abs(expected[k]).max() > 1e-6
        np.testing.assert_allclose(gradient, expected[k], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("block_size", [1, 7, T])
def test_constant_weights_have_the_gradient_of_bptt(model, block_size):
    def total(p):
        return jax.vmap(loss)(jax.lax.scan(lambda h, x: model(p, h, x), H, XS[:20])[1]).sum()

    net = braintrace.online(model, "d_rtrl")
    carry = net.init(PARAMS, H, XS[0])
    got = net.grad(loss, block_size=block_size)(PARAMS, carry, XS[:20])[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
        got,
        jax.grad(total)(PARAMS),
    )


@pytest.mark.parametrize("model", [low_rank, low_rank_operator])
def test_other_maps_drift_and_the_certificate_says_so(model):
    assert drift(trained(model, "d_rtrl"), trained(model, "rtrl")) > 1e-3
    net = braintrace.online(model, "d_rtrl", strict=True)
    net.init(PARAMS, H, XS[0])
    for report in net.report.parameters.values():
        assert report.exact and report.while_constant
        assert "exact while the weights are constant" in str(report)
    with pytest.raises(braintrace.CompilationError) as error:
        trained(model, "d_rtrl", strict=True)
    assert all(word in str(error.value) for word in ("train", "where:", "why:", "do:", "rtrl"))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_maps_that_are_followed_are_strictly_exact(model):
    net = braintrace.online(model, "d_rtrl", strict=True)
    carry = net.init(PARAMS, H, XS[0])
    assert not any(p.while_constant for p in net.report.parameters.values())
    train, optimizer = net.train(loss, optax.sgd(0.0)), optax.sgd(0.0)
    train(PARAMS, optimizer.init(PARAMS), carry, XS[:2])


def test_rtrl_has_traces_of_parameters():
    trained(low_rank, "rtrl", strict=True)
