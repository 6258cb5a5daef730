"""Counts of steps that would pass 2**31: nothing begins anew."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.engine import COUNTED

XS = np.random.default_rng(0).standard_normal((6, 3))


def step(w, h, x):
    h = jnp.tanh(0.9 * h + braintrace.matmul(x, w))
    return h, h


def counts_at(carry, number):
    """The carry as after so many steps, with traces that are not zero."""

    def at(path, a):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return jnp.asarray(number, jnp.int32) if name == "steps" else a

    traces = jax.tree_util.tree_map_with_path(at, carry.traces)
    return dataclasses.replace(carry, traces=traces, steps=jnp.asarray(number, jnp.int32))


@pytest.mark.parametrize("rule, options", [("d_rtrl", {}), ("pp_prop", {"decay_or_rank": 0.9})])
@pytest.mark.parametrize("window", [None, 3])
def test_gradient_after_very_many_steps_is_that_after_many(rule, options, window):
    net = braintrace.online(step, rule, window=window, **options)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4)))
    carry, _ = net.scan(w, net.init(w, jnp.zeros(4), XS[0]), XS)
    grad = net.grad(lambda out: jnp.sum(out**2))
    want, (after, _) = grad(w, counts_at(carry, 10_000), XS)
    for number in (COUNTED - 2, COUNTED):
        got, (after, _) = grad(w, counts_at(carry, number), XS)
        np.testing.assert_allclose(got, want, rtol=1e-12)
        assert int(after.steps) == COUNTED
        for _ in range(2):
            got, (after, _) = grad(w, after, XS)
            assert int(after.steps) == COUNTED and np.isfinite(got).all()
    assert np.abs(want).max() > 1e-3
