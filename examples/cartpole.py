"""A streaming agent balances a pole that it sees the angle of, but not how fast it falls.

CartPole with the equations of gymnasium, without the two velocities: the agent sees positions, so
it must remember the last ones. Batch of one, no replay, an update at every step, Sarsa(λ). The same
network learns by D-RTRL, which is exact for its cell, or by the derivative of each step alone. You
see the mean length of an episode (500 steps at most) in the last tenth of training, per seed.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

from braintrace import nn, online

GAMMA, LAMBDA, EXPLORE, LIMIT = 0.99, 0.8, 0.02, 500
AGENTS = {  # a cell of 16 complex or 32 real units, and a rule
    "RTU, D-RTRL": (nn.RTUCell, 16, "d_rtrl"),
    "RTU, one step": (nn.RTUCell, 16, "no_trace"),
    "GRU, D-RTRL": (nn.GRUCell, 32, "d_rtrl"),
    "GRU, one step": (nn.GRUCell, 32, "no_trace"),
    "feed-forward": (nn.RTUCell, 16, "no_trace"),  # its state is reset at every step
}


def lambda_traces(decay):
    """Turn gradients of values into δ times their decaying sum; a new episode starts at zero."""

    def update(grads, sums, params=None, *, error, fresh):
        new = jax.tree.map(lambda z, g: jnp.where(fresh, 0, decay * z) + g, sums, grads)
        return jax.tree.map(lambda z: -error * z, sums), new  # the error is that of earlier values

    return optax.GradientTransformationExtraArgs(optax.tree.zeros_like, update)


def functional(module):
    """A module as its parameters, its state, and a pure step of both."""
    brainstate.nn.init_all_states(module)
    call = brainstate.transform.StatefulFunction(module)
    states = dict(enumerate(call.get_state_trace(jnp.zeros(2)).states))
    state = {i: s.value for i, s in states.items() if isinstance(s, brainstate.HiddenState)}
    params = {i: s.value for i, s in states.items() if i not in state}

    def step(params, state, x):
        new, out = call.jaxpr_call([(params | state)[i] for i in states], x)
        return {i: new[i] for i in state}, out

    return params, state, step


def push(world, action):
    """One step of cart and pole: position, speed, angle and its speed; and whether it fell."""
    _, speed, angle, turn = world
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    force = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * turn**2 * sin) / 1.1
    fall = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    world = world + 0.02 * jnp.array([speed, force - 0.05 * fall * cos / 1.1, turn, fall])
    return world, (jnp.abs(world[0]) > 2.4) | (jnp.abs(world[2]) > jnp.pi / 15)


def train(agent, steps, seeds):
    """The mean length of an episode in each tenth of training, for every seed."""
    (cell, units, rule), made = AGENTS[agent], []
    for seed in range(seeds):
        brainstate.random.seed(seed)
        body = cell(2, units)
        made.append(functional(brainstate.nn.Sequential(body, nn.Linear(body.out_size, 2))))
    params, state, step = made[0]
    net = online(step, rule)
    start = net.init(params, state, jnp.zeros(2))
    optimizer = optax.chain(lambda_traces(GAMMA * LAMBDA), optax.adam(1e-3))

    def act(loop, now):
        params, opt, carry, world, age, value, fell = loop
        keys, fresh = jax.random.split(now[0], 3), fell | (age == LIMIT)
        world = jnp.where(
            fresh, jax.random.uniform(keys[0], (4,), minval=-0.05, maxval=0.05), world
        )
        carry = optax.tree.where(fresh | (agent == "feed-forward"), start, carry)
        x = jnp.array([world[0] / 2.4, world[2] * 15 / jnp.pi])
        q, credit, carry = jax.vjp(lambda p: net(p, carry, x)[::-1], params, has_aux=True)
        explore = jnp.maximum(EXPLORE, 1 - 5 * now[1])  # less and less in the first fifth
        guess = jax.random.randint(keys[1], (), 0, 2)
        action = jnp.where(jax.random.uniform(keys[2]) < explore, guess, q.argmax())
        # Of the last action: the reward of a step is 0.1, nothing comes after a fall, and what
        # would have come after the limit is not known.
        error = (jnp.where(fell, 0, 0.1 + GAMMA * q[action]) - value) * (fell | ~fresh)
        grads = credit(jax.nn.one_hot(action, 2))[0]
        updates, opt = optimizer.update(grads, opt, error=error, fresh=fresh)
        world, fell = push(world, action)
        params = optax.apply_updates(params, updates)
        return (params, opt, carry, world, age * ~fresh + 1, q[action], fell), fresh

    def run(params, key):
        world, age, value, fell = jnp.zeros(4), jnp.array(LIMIT), jnp.array(0.0), jnp.array(False)
        loop = params, optimizer.init(params), start, world, age, value, fell
        times = (jax.random.split(key, steps), jnp.arange(steps) / steps)
        tenths = jax.lax.scan(act, loop, times)[1].reshape(10, -1)
        return tenths.shape[1] / jnp.maximum(tenths.sum(axis=1), 1)

    params = jax.tree.map(lambda *a: jnp.stack(a), *(m[0] for m in made))
    return jax.jit(jax.vmap(run))(params, jax.random.split(jax.random.key(0), seeds))


def main(steps, full, small):
    for agent in list(AGENTS)[: None if full else 2]:
        found = train(agent, *((300, 1) if small else (steps, 3)))
        print(f"{agent:13s}:", *(f"{length:4.0f}" for length in found[:, -1]), flush=True)
        assert small or agent != "RTU, D-RTRL" or found[:, -1].mean() > 100


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    parser.add_argument("--full", action="store_true", help="all agents, not only the RTU")
    parser.add_argument("--steps", type=int, default=300_000)
    main(**vars(parser.parse_args()))
