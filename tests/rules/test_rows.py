"""Rows looked up by an index that the step computes, as in a mixture of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

T, I, N, EXPERTS = 6, 3, 4, 5
XS = jax.random.normal(jax.random.key(0), (T, I))
FACTORED = {
    "pp_prop": {"decay_or_rank": 0.9},
    "ottt": {"leak": 0.9},
    "otpe": {"mode": "approx", "leak": 0.9},
    "ostl_feedforward": {},
    "stllr": {},
    "kf_rtrl": {},
}


def _params():
    gate, experts = jax.random.split(jax.random.key(1))
    return {
        "gate": jax.random.normal(gate, (I, EXPERTS)),
        "experts": jax.random.normal(experts, (EXPERTS, I, N)),
    }


def _mixture(look_up):
    def step(params, h, x):
        _, best = jax.lax.top_k(x @ params["gate"], 2)
        return (jnp.tanh(0.9 * h + (x @ look_up(params["experts"], best)).sum(0)),) * 2

    return step


def _gradient(step, rule, **options):
    net = braintrace.online(step, rule, **options)
    params = _params()
    return net.grad(lambda out: (out**2).sum())(params, net.init(params, jnp.zeros(N), XS[0]), XS)[
        0
    ]["experts"]


@pytest.mark.parametrize("rule, options", FACTORED.items())
def test_rows_of_experts_have_the_gradient_of_products_with_one_hot_vectors(rule, options):
    of_rows = _gradient(_mixture(lambda experts, best: experts[best]), rule, **options)
    one_hot = lambda experts, best: jnp.tensordot(jax.nn.one_hot(best, EXPERTS), experts, 1)
    of_products = _gradient(_mixture(one_hot), rule, **options)
    assert jnp.abs(of_products).max() > 1e-3
    np.testing.assert_allclose(of_rows, of_products, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule, options", FACTORED.items())
def test_elements_by_index_are_refused_with_what_to_do(rule, options):
    def step(params, h, x):
        places = (jnp.arange(N) + jnp.argmax(x @ params["gate"])) % N
        return (jnp.tanh(0.9 * h + params["experts"][0, 0, places]),) * 2

    with pytest.raises(braintrace.NotSupportedError) as error:
        _gradient(step, rule, **options)
    text = str(error.value)
    assert "unmarked_gather" in text and "where:" in text and "do:" in text
