"""Streaming agents: their optimizers by the papers' equations, and that they learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.test_cartpole import PUSHES, START, STATES

import braintrace
from braintrace import rl

RNG = np.random.default_rng(0)
GRADS = RNG.normal(size=(12, 5))
ERRORS = 3 * RNG.normal(size=12)
FRESH = np.arange(12) == 7
DECAY = 0.7


def updates_of(optimizer):
    """The updates of twelve steps; parameters are a tree of two arrays."""
    tree = lambda a: {"a": jnp.asarray(a[:2]), "b": jnp.asarray(a[2:])}
    state, out = optimizer.init(tree(np.zeros(5))), []
    for g, error, fresh in zip(GRADS, ERRORS, FRESH, strict=True):
        new, state = optimizer.update(tree(g), state, tree(np.zeros(5)), error=error, fresh=fresh)
        out.append(np.concatenate([new["a"], new["b"]]))
    return np.array(out)


def traces():
    """The trace that each error meets: that of the gradients before it."""
    z, out = np.zeros(5), []
    for g, fresh in zip(GRADS, FRESH, strict=True):
        out.append(z)
        z = (0 if fresh else DECAY * z) + g
    return np.array(out)


def test_lambda_traces_are_gradients_to_descend():
    got = updates_of(optax.chain(rl.lambda_trace(DECAY), optax.sgd(0.5)))
    np.testing.assert_allclose(got, 0.5 * ERRORS[:, None] * traces(), rtol=1e-12)


def test_obgd_is_that_of_its_paper():
    alpha, kappa, want = 0.4, 2.0, []
    for z, error in zip(traces(), ERRORS, strict=True):
        bound = alpha * kappa * max(abs(error), 1) * np.abs(z).sum()
        want.append(min(alpha, alpha / bound if bound else alpha) * error * z)
    free = np.abs(0.4 * ERRORS[:, None] * traces()).max(1)
    assert (np.abs(want).max(1) < free).any()  # the bound has an effect
    np.testing.assert_allclose(updates_of(rl.obgd(alpha, DECAY, kappa)), want, rtol=1e-12)


def test_intentional_updates_are_those_of_their_paper():
    z, eta, beta = traces(), 0.3, 0.9
    plain = [eta * e * a / max((a**2).sum(), 1e-8) for a, e in zip(z, ERRORS, strict=True)]
    np.testing.assert_allclose(updates_of(rl.intentional(eta, DECAY, None)), plain, rtol=1e-12)
    v, sigma, want = np.zeros(5), 0.0, [np.zeros(5)]
    for t, g in enumerate(GRADS[:-1], 1):
        v = beta * v + (1 - beta) * g**2
        D = np.sqrt(v / (1 - beta**t)) + 1e-8
        sigma += (1 - DECAY) * ((g**2 / D).sum() - sigma)
        size = np.sqrt(sigma / (1 - DECAY**t) * (z[t] ** 2 / D).sum())
        want.append(eta * ERRORS[t] * z[t] / D / size)
    np.testing.assert_allclose(updates_of(rl.intentional(eta, DECAY, beta)), want, rtol=1e-10)


def test_a_plain_intentional_step_takes_its_fraction_off_a_linear_error():
    optimizer, x, w = rl.intentional(0.25, 0.0, None), jnp.array([1.0, -2.0, 0.5]), jnp.zeros(3)
    _, state = optimizer.update(x, optimizer.init(w), error=0.0, fresh=True)
    error = 3.0 - w @ x
    step, _ = optimizer.update(x, state, error=error, fresh=False)
    np.testing.assert_allclose(3.0 - (w + step) @ x, 0.75 * error, rtol=1e-12)


def agent_of(kind, environment, key):
    outputs = environment.actions + (kind == "actor-critic")
    params, state, step = rl.rotating_units(key, environment.observations, outputs, units=8)
    if kind == "actor-critic":
        whole = step
        step = lambda p, s, x: (lambda s, y: (s, (y[:-1], y[-1])))(*whole(p, s, x))
    net = braintrace.online(step, "d_rtrl", strict=True)
    carry = net.init(params, state, jnp.zeros(environment.observations))
    optimizer = lambda: optax.chain(rl.lambda_trace(0.8), optax.adam(1e-2))
    if kind == "actor-critic":
        agent = rl.actor_critic(net, optimizer(), optimizer())
    else:
        agent = rl.q_lambda(net, optimizer(), environment.actions)
    return agent, agent.start(jax.random.key(2), params, carry)


@pytest.mark.parametrize("kind", ["q", "actor-critic"])
def test_agents_learn_to_remember_a_cue(kind):
    environment = rl.memory_chain(2)
    agent, state = agent_of(kind, environment, jax.random.key(1))
    learn = jax.jit(lambda s, k: rl.run(agent, environment, s, k, 6000))
    _, seen = learn(state, jax.random.key(0))
    reward, ended = seen.reward[-600:].sum(), seen.terminated[-600:].sum()
    assert reward / ended > 0.7 and ended == 200


class Corridor:
    """The interface of gymnasium: two steps to the end, the second action 1 pays."""

    def reset(self, seed=None):
        self.place = 0
        return np.zeros(3), {}

    def step(self, action):
        self.place += 1
        ended = self.place == 2
        return np.full(3, self.place), float(ended and action == 1), ended, False, {}


def test_the_same_agent_runs_in_an_environment_of_gymnasium():
    agent, state = agent_of("q", rl.memory_chain(2), jax.random.key(1))
    state, returns = rl.run_gymnasium(agent, Corridor(), state, 200)
    assert len(returns) == 100 and np.mean(returns[-20:]) > 0.7


def test_an_episode_that_is_cut_teaches_nothing_of_its_end():
    agent, state = agent_of("q", rl.memory_chain(2), jax.random.key(1))
    no, yes = jnp.array(False), jnp.array(True)
    state, _ = agent.act(state, rl.Moment(jnp.ones(3), jnp.zeros(()), no, no))
    cut, _ = agent.act(state, rl.Moment(jnp.ones(3), jnp.ones(()), no, yes))
    over, _ = agent.act(state, rl.Moment(jnp.ones(3), jnp.ones(()), yes, no))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), cut.params, state.params)
    assert all(jax.tree.leaves(same))
    assert np.abs(over.params["out"] - state.params["out"]).max() > 0


def test_cartpole_is_that_of_gymnasium():
    environment, state = rl.cartpole(velocities=True), (jnp.array(START), jnp.array(0))
    for i, action in enumerate(PUSHES):
        state, now = environment.step(jax.random.key(0), state, jnp.array(action))
        assert now.reward == 0.1 and not now.terminated
        if i % 4 == 3:
            np.testing.assert_allclose(state[0], STATES[i // 4], rtol=1e-12)
    assert now.observation.shape == (4,)
    short = rl.cartpole(limit=1)
    assert short.step(jax.random.key(0), (jnp.zeros(4), jnp.array(0)), 1)[1].truncated
    fallen = (jnp.array([0, 0, 0.3, 0.0]), jnp.array(5))
    now = short.step(jax.random.key(0), fallen, 1)[1]
    assert now.terminated and not now.truncated and now.reward == 0


def test_walls_of_the_maze_cost_and_the_end_pays():
    maze = rl.t_maze(1)
    (place, cue), first = maze.reset(jax.random.key(0))
    assert first[0] == cue and not place
    state, now = maze.step(jax.random.key(1), (place, cue), 0)
    assert now.reward == -0.1 and not state[0] and not now.terminated
    state, now = maze.step(jax.random.key(1), state, 2)
    assert now.reward == 0 and state[0] == 1 and now.observation[1] == 1
    _, now = maze.step(jax.random.key(1), state, jnp.where(cue > 0, 1, 0))
    assert now.reward == 1 and now.terminated
