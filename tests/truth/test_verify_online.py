"""`verify.compare` of a learner of a plain function."""

import jax.numpy as jnp
import pytest

import braintrace
from braintrace.verify import compare

XS = jnp.sin(jnp.arange(36.0).reshape(6, 2, 3))
YS = jnp.cos(jnp.arange(48.0).reshape(6, 2, 4))
PARAMS = {"w": 0.3 * jnp.cos(jnp.arange(12.0).reshape(3, 4)), "h0": jnp.ones(4), "name": "x"}
START = lambda params: jnp.ones((2, 1)) * params["h0"]


def step(params, h, x):
    h = 0.7 * h + jnp.tanh(x @ params["w"])
    return h, h + 0.1 * h @ jnp.ones((4, 4))


def loss(out, y):
    return ((out - y) ** 2).sum()


@pytest.mark.parametrize("against, tight", [("bptt", 1e-10), ("finite", 1e-6)])
@pytest.mark.parametrize("block", [None, 1])
def test_an_exact_learner_agrees_with_the_loop_over_its_step(against, tight, block):
    net = braintrace.online(step, "d_rtrl")
    result = compare(net, loss, PARAMS, START, XS, YS, against=against, block_size=block)
    assert list(result.errors) == [("h0",), ("w",)] and result.against == against
    assert result.max_error < tight and "w" in str(result)


def test_what_a_rule_leaves_out_is_seen():
    net = braintrace.online(step, "no_trace")
    assert compare(net, loss, PARAMS, jnp.zeros((2, 4)), XS, YS).errors["w",] > 0.1


def test_a_mixture_is_compared_parameter_by_parameter():
    def two(params, state, x):
        h, g = state
        h, _ = step(params, h, x)
        g = jnp.tanh(h @ params["v"] + g @ params["u"])
        return (h, g), g

    params = {"w": PARAMS["w"], "v": jnp.eye(4), "u": 0.5 * jnp.eye(4)[::-1]}
    net = braintrace.online(two, {"v": "no_trace", "*": braintrace.rules.snap(2)})
    result = compare(net, loss, params, (jnp.zeros((2, 4)),) * 2, XS, YS)
    assert result.errors["w",] < 1e-9 < 1e-3 < result.errors["v",]
    assert result.certificates["v",] == "not exact, by no_trace"
    assert "exact, by snap(n=2)" in str(result)


def test_arguments_of_another_kind_of_learner_are_refused():
    net = braintrace.online(step, "d_rtrl")
    with pytest.raises(TypeError, match=r"compare\(net, loss, params, state, xs"):
        compare(net, loss, XS, YS)
    with pytest.raises(TypeError, match="window="):
        compare(net, loss, PARAMS, START, XS, YS, chunk_size=2)
