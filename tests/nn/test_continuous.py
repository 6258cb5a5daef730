"""Cells in continuous time, resonators, and units that send changes: what they compute."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import nn

RNG = np.random.default_rng(0)


def run(cell, xs):
    cell.init_state()
    return np.array([cell(x) for x in xs])


def test_liquid_time_constants_are_the_fused_step():
    with brainstate.environ.context(dt=0.5):
        cell = nn.LTCCell(2, 3, tau=2.0)
    W, b = (np.asarray(cell.W.weight.value[k]) for k in ("weight", "bias"))
    A, h = np.asarray(cell.A.value), np.zeros(3)
    xs = RNG.normal(size=(6, 2))
    for x, got in zip(xs, run(cell, jnp.asarray(xs)), strict=True):
        f = 1 / (1 + np.exp(-(np.concatenate([x, h]) @ W + b)))
        h = (h + f * A) / (1 + 0.25 + f)
        np.testing.assert_allclose(got, h, rtol=1e-10)


def test_closed_form_is_between_its_two_states():
    cell = nn.CfCCell(2, 3)
    cell.init_state()
    x, h = jnp.asarray(RNG.normal(size=2)), jnp.zeros(3)
    both = jnp.concatenate([x, h])
    ends = jnp.stack([jnp.tanh(cell.W_g(both)), jnp.tanh(cell.W_k(both))])
    s = jax.nn.sigmoid(cell.W_s(both))
    np.testing.assert_allclose(cell(x), (1 - s) * ends[0] + s * ends[1], rtol=1e-12)


def test_a_resonator_answers_inputs_of_its_own_period():
    with brainstate.environ.context(dt=1.0):
        cell = nn.ResonateCell(1, 3, tau=50.0, period=jnp.array([8.0, 12.0, 20.0]), recurrent=False,
                               w_init=jnp.ones((1, 3)), V_th=1e6)  # fmt: skip
    for k, period in enumerate((8, 12, 20)):
        cell.init_state()
        seen = []
        for t in range(200):
            cell(jnp.ones(1) * (t % period == 0))
            seen.append(cell.V.value)
        assert np.abs(np.array(seen[100:])).max(0).argmax() == k


def test_a_resonator_spikes_and_is_reset():
    with brainstate.environ.context(dt=1.0):
        cell = nn.ResonateCell(
            1, 1, tau=20.0, period=8.0, recurrent=False, w_init=5 * jnp.ones((1, 1))
        )
    spikes = run(cell, jnp.ones((40, 1)))
    assert 0 < spikes.mean() < 1


def test_what_is_sent_adds_up_to_the_activation():
    cell = nn.SigmaDeltaCell(2, 3, 0.2, activation="tanh")
    xs = 0.3 * RNG.normal(size=(50, 2))
    sent = run(cell, jnp.asarray(xs))
    want = np.tanh(np.cumsum(xs @ np.asarray(cell.W.weight.value["weight"]), 0))
    assert np.abs(np.cumsum(sent, 0) - want).max() <= 0.2
    assert 0 < (sent != 0).mean() < 0.9  # and most of the time, nothing


def test_a_threshold_is_positive():
    with pytest.raises(ValueError, match="the threshold is 0"):
        nn.SigmaDeltaCell(2, 3, 0.0)
