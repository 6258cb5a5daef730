"""Tasks of rewards: what is shown, what a choice is worth, and rules that learn from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.lab.cli._network import Network
from braintrace.lab.comparison import compare
from braintrace.lab.comparison._gradient import Compiled
from braintrace.lab.comparison._model import pure_model
from braintrace.lab.comparison._rules import parse
from braintrace.lab.comparison._sequences import sequences_of
from braintrace.lab.tasks import Bandit, TMaze

KEY, SIZE = jax.random.key(0), 6
TASKS = {"bandit": Bandit(16), "t-maze": TMaze(16)}


@pytest.mark.parametrize("name", TASKS)
def test_a_trial_shows_what_its_choice_hangs_on(name):
    task = TASKS[name]
    xs, (good, noise) = task.batch(KEY, 64)
    assert xs.shape == (16, 64, task.inputs) and good.shape == (16, 64)
    assert noise.shape == (16, 64, task.outputs) and (noise == noise[0]).all()
    channels = task.inputs // (4 if name == "bandit" else 3)
    seen = xs[: 8 if name == "bandit" else 2].reshape(-1, 64, task.inputs // channels, channels)
    shown = seen.sum((0, 3)).argmax(-1)
    np.testing.assert_array_equal(shown % 2, good[0])
    assert xs[12:].sum() == 0  # the pause before the reward
    assert 0.3 < good[0].mean() < 0.7


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_minus_the_expected_reward(name):
    task = TASKS[name]
    _, targets = task.batch(KEY, SIZE)
    outputs = jax.random.normal(jax.random.key(1), (16, SIZE, 2))
    judged = task.judge(outputs, targets)
    taken = (0.5 * jnp.tensordot(task.mask, outputs, axes=1) + targets[1][0]).argmax(-1)
    right = (taken == targets[0][0]).astype(float)
    reward = right - right.mean()

    def expected(outputs):
        p = jax.nn.log_softmax(0.5 * jnp.tensordot(task.mask, outputs, axes=1))
        return -(reward * jnp.take_along_axis(p, taken[:, None], 1)[:, 0]).mean()

    through = lambda o: (task.mask * jax.vmap(task.loss)(o, judged)).sum()
    want = jax.grad(expected)(outputs)
    assert jnp.abs(want).max() > 1e-3
    np.testing.assert_allclose(jax.grad(through)(outputs), want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(judged.reward[-1], reward)
    assert not judged.reward[:-1].any() and not judged.chosen[:-1].any()


def test_a_constant_choice_is_right_half_of_the_time():
    for task in TASKS.values():
        _, targets = task.test(2000)
        outputs = jnp.broadcast_to(jnp.array([1.0, 0.0]), (16, 2000, 2))
        assert abs(task.score(outputs, targets) - task.chance) < 0.05


def test_the_gradient_is_that_of_a_policy_and_modulators_reach_units():
    task = TASKS["t-maze"]
    sequences = sequences_of(task, SIZE)
    network = Network("alif", task, 5, seed=0)
    model = pure_model(network, SIZE, sequences.x)
    assert model.readout in model.params
    xs, targets = task.batch(KEY, SIZE)
    run = lambda p: jax.lax.scan(lambda h, x: model.step(p, h, x), model.state, xs)[1]
    judged = task.judge(run(model.params), targets)
    loss = lambda p: (task.mask * jax.vmap(task.loss)(run(p), judged)).sum() / task.mask.sum()
    want = jax.grad(loss)(model.params)
    choices = parse(["bptt", "reward_eprop", "r_stdp", "three_factor"])
    grads = [Compiled(c, model, sequences)(model.params, (xs, targets))[0] for c in choices]
    for k, g in want.items():
        np.testing.assert_allclose(grads[0][k], g, rtol=1e-9, atol=1e-12)
    for of_rule in grads[1:]:
        assert all(np.isfinite(g).all() for g in of_rule.values())
        assert np.abs(of_rule["params['cell.W']"]).max() > 0


def test_rules_of_all_kinds_are_compared_and_a_trial_is_one_update():
    task = TASKS["bandit"]
    make = lambda seed: Network("alif", task, 6, seed)
    how = {"seeds": 1, "batch": 4, "held_out": 16, "rates": 0.01, "rounds": 1, "points": 1}
    rules = ["bptt", "d_rtrl", "reward_eprop", "r_stdp"]
    result = compare(make, task, rules, updates=2, **how)
    assert [row.refused for row in result.rows] == [None] * 4
    with pytest.raises(ValueError, match="trial"):
        compare(make, task, rules, updates=2, update_every=4, **how)
