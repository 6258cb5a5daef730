"""Streaming reinforcement learning: act now, get credit when the reward comes.

An agent without replay, with a batch of one, sees a cue, walks past distracting noise, and at the
end has to act as the cue said. In the chain every action leads on, in the T-maze one of three. The
traces of the rule say how the present value depends on earlier steps, those of Sarsa(λ) say which
earlier values an error concerns. You see the mean return of three seeds at the end of training.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

from braintrace import nn, online

GAMMA, LAMBDA, EXPLORE = 0.99, 0.8, 0.05


def lambda_traces(decay):
    """Turn gradients of values into δ times their decaying sum; a new episode starts at zero."""

    def update(grads, sums, params=None, *, error, fresh):
        new = jax.tree.map(lambda z, g: jnp.where(fresh, 0, decay * z) + g, sums, grads)
        return jax.tree.map(lambda z: -error * z, sums), new  # the error is that of earlier values

    return optax.GradientTransformationExtraArgs(optax.tree.zeros_like, update)


AGENTS = {  # a cell of 16 complex or 32 real units, and a rule
    "RTU, D-RTRL": (nn.RTUCell, 16, "d_rtrl"),
    "RTU, one step": (nn.RTUCell, 16, "no_trace"),
    "LRU, D-RTRL": (nn.LRUCell, 16, "d_rtrl"),
    "LRU, one step": (nn.LRUCell, 16, "no_trace"),
    "GRU, one step": (nn.GRUCell, 32, "no_trace"),
    "feed-forward": (nn.RTUCell, 16, "no_trace"),  # its state is reset at every step
}


def functional(module):
    """A module as its parameters, its state, and a pure step of both."""
    brainstate.nn.init_all_states(module)
    call = brainstate.transform.StatefulFunction(module)
    states = dict(enumerate(call.get_state_trace(jnp.zeros(3)).states))
    state = {i: s.value for i, s in states.items() if isinstance(s, brainstate.HiddenState)}
    params = {i: s.value for i, s in states.items() if i not in state}

    def step(params, state, x):
        new, out = call.jaxpr_call([(params | state)[i] for i in states], x)
        return {i: new[i] for i in state}, out

    return params, state, step


def walk(maze, length, place, cue, action):
    """One step of the environment: the next place, the reward, whether the episode ends."""
    end, answer = place == length, jnp.where(action == (cue > 0), 1.0, -1.0)
    if not maze:
        return place + 1, jnp.where(end, answer, 0.0), end
    turns = action < 2
    reward = jnp.where(end & turns, answer, -0.1 * (end | turns))  # -0.1 against a wall
    return place + ~(end | turns), reward, end & turns


def train(agent, maze, length, steps, seeds):
    """The mean return of each seed in the last fifth of training."""
    (cell, units, rule), n_actions, made = AGENTS[agent], 3 if maze else 2, []
    for seed in range(seeds):
        brainstate.random.seed(seed)
        body = cell(3, units)
        made.append(functional(brainstate.nn.Sequential(body, nn.Linear(body.out_size, n_actions))))
    params, state, step = made[0]
    net = online(step, rule)
    start = net.init(params, state, jnp.zeros(3))
    optimizer = optax.chain(lambda_traces(GAMMA * LAMBDA), optax.adam(3e-3))

    def act(loop, key):
        params, opt, carry, place, cue, value, reward, ended = loop
        keys = jax.random.split(key, 4)
        place, cue = place * ~ended, jnp.where(ended, jax.random.rademacher(keys[0], ()), cue)
        carry = optax.tree.where(ended | (agent == "feed-forward"), start, carry)
        x = jnp.array([(place == 0) * cue, place == length, jax.random.normal(keys[1])], float)
        q, credit, carry = jax.vjp(lambda p: net(p, carry, x)[::-1], params, has_aux=True)
        guess = jax.random.randint(keys[2], (), 0, n_actions)
        action = jnp.where(jax.random.uniform(keys[3]) < EXPLORE, guess, q.argmax())
        error = reward + GAMMA * jnp.where(ended, 0, q[action]) - value  # of the last action
        grads = credit(jax.nn.one_hot(action, n_actions))[0]
        updates, opt = optimizer.update(grads, opt, error=error, fresh=ended)
        place, reward, ended = walk(maze, length, place, cue, action)
        params = optax.apply_updates(params, updates)
        return (params, opt, carry, place, cue, q[action], reward, ended), (reward, ended)

    def run(params, key):
        loop = params, optimizer.init(params), start, *map(jnp.asarray, (0, 1, 0.0, 0.0, True))
        rewards, ends = jax.lax.scan(act, loop, jax.random.split(key, steps))[1]
        return rewards[-steps // 5 :].sum() / ends[-steps // 5 :].sum()

    params = jax.tree.map(lambda *a: jnp.stack(a), *(m[0] for m in made))
    return jax.jit(jax.vmap(run))(params, jax.random.split(jax.random.key(0), seeds))


def main(maze, lengths, episodes, full, small):
    for length in [2] if small else lengths:
        for agent in list(AGENTS)[: None if full else 2]:
            steps, seeds = (300, 1) if small else (episodes * (length + 1), 3)
            found = train(agent, maze, length, steps, seeds)
            print(f"length {length:3d}, {agent:13s}:", *(f"{r:5.2f}" for r in found), flush=True)
            assert length != 32 or agent != "RTU, D-RTRL" or found.mean() > 0.5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    parser.add_argument("--full", action="store_true", help="all agents, not only the RTU")
    parser.add_argument("--maze", action="store_true", help="the T-maze, not the chain")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32])
    parser.add_argument("--episodes", type=int, default=1000, help="of the chain, or as many steps")
    main(**vars(parser.parse_args()))
