"""Streaming agents on memory chains, a T-maze and CartPole without velocities.

    python benchmarks/streaming_agents.py chains        # 2 to 128 steps, the same settings for all
    python benchmarks/streaming_agents.py maze cartpole

Prints a line per task, agent, optimizer and rule: the mean return (CartPole: steps of an episode)
in the last fifth of training, one number per seed.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from braintrace import online, rl

GAMMA, LAMBDA = 0.99, 0.8
OPTIMIZERS = {
    "adam": lambda: optax.chain(rl.lambda_trace(GAMMA * LAMBDA), optax.adam(1e-3)),
    "obgd": lambda: rl.obgd(1.0, GAMMA * LAMBDA),
    "intentional": lambda: rl.intentional(0.1, GAMMA * LAMBDA),
}
TASKS = {
    "chains": {f"chain {n}": (rl.memory_chain(n), 3000 * (n + 1)) for n in (2, 8, 32, 128)},
    "maze": {f"maze {n}": (rl.t_maze(n), 12_000 * (n + 1)) for n in (4, 16)},
    "cartpole": {"cartpole": (rl.cartpole(), 300_000)},
}


def train(environment, agent, optimizer, rule, steps, seeds):
    """What the agent got at every step, per seed."""
    inputs, actions = environment.observations, environment.actions
    outputs = actions + (agent == "actor-critic")

    def step(params, state, x):
        state, y = core(params, state, x)
        return state, y if agent == "q" else (y[:-1], y[-1])

    make = lambda key: rl.rotating_units(key, inputs, outputs, units=16, ring=ring)
    ring = (0.0, 0.999) if inputs == 2 else (0.9, 0.999)  # velocities are two steps' memory
    _, state, core = make(jax.random.key(0))
    net = online(step, rule)

    def run(key):
        of_params, of_agent, of_world = jax.random.split(key, 3)
        params = make(of_params)[0]
        carry = net.init(params, state, jnp.zeros(inputs))
        if agent == "q":
            learner = rl.q_lambda(net, OPTIMIZERS[optimizer](), actions, discount=GAMMA)
        else:
            pair = (OPTIMIZERS[optimizer]() for _ in range(2))
            learner = rl.actor_critic(net, *pair, discount=GAMMA)
        start = learner.start(of_agent, params, carry)
        return rl.run(learner, environment, start, of_world, steps)[1]

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(1), seeds))


def main(tasks, agents, optimizers, rules, seeds, share):
    for task in tasks:
        for name, (environment, steps) in TASKS[task].items():
            for agent in agents:
                for optimizer in optimizers:
                    for rule in rules:
                        how = (agent, optimizer, rule, int(share * steps), seeds)
                        seen = train(environment, *how)
                        last = -seen.reward.shape[1] // 5
                        ends = (seen.terminated | seen.truncated)[:, last:].sum(1)
                        total = seen.reward[:, last:].sum(1) * (10 if task == "cartpole" else 1)
                        found = (f"{r:6.2f}" for r in total / jnp.maximum(ends, 1))
                        words = f"{name:10s} {agent:12s} {optimizer:11s} {rule:8s}"
                        print(words, *found, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--agents", nargs="+", default=["q"], choices=["q", "actor-critic"])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--rules", nargs="+", default=["d_rtrl", "no_trace"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps")
    main(**vars(parser.parse_args()))
