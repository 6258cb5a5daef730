"""A cue at the entrance of a T-maze, a turn at its end, and a reward some time after the turn.

Adaptive spiking neurons see the cue for five steps, a corridor of noise, and a sign at the end; of
two pools the one that spikes more at the sign turns to its side. What the turn was worth is known
only ten steps later. Until then the eligibility traces of e-prop decay; what comes then is a
modulator per neuron, the reward minus its running mean times whether the neuron voted for the turn
(`reward_eprop`). The same neurons without adaptation have nothing that lasts through the corridor.
You see the fraction of right turns in the last fifth of training, for three seeds.
"""

import argparse

import jax
import jax.numpy as jnp

from braintrace import online, rules

POOL, CUE, CORRIDOR, SIGN, LATER = 16, 5, 20, 5, 10
END = CUE + CORRIDOR
UNITS, STEPS = 2 * POOL, END + SIGN + LATER


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvps(lambda t, z, v: 0.3 * jnp.maximum(0, 1 - jnp.abs(v)) * t)


def network(beta):
    """Two pools of neurons whose threshold rises with every spike, for about fifty steps."""

    def step(params, state, x):
        v, a, z = state
        v = 0.8 * v * (1 - jax.lax.stop_gradient(z)) + x @ params["w"]
        a = 0.98 * a + z
        z = spike(v - 1.0 - beta * a)
        return (v, a, z), z @ params["votes"]

    return step


def train(beta, trials, seeds, rate=0.02):
    """Of every trial, whether the turn was right."""
    net = online(network(beta), rules.reward_eprop(0.9))
    votes = jnp.repeat(jnp.eye(2), POOL, axis=0)

    def run(key):
        of_weights, of_trials = jax.random.split(key)
        w = 0.4 * jax.random.uniform(of_weights, (12, UNITS))
        start = net.init({"w": w, "votes": votes}, (jnp.zeros(UNITS),) * 3, jnp.zeros(12))

        def trial(loop, key):
            w, mean = loop
            params = {"w": w, "votes": votes}
            of_cue, of_noise, of_turn = jax.random.split(key, 3)
            side = jax.random.randint(of_cue, (), 0, 2)
            t = jnp.arange(STEPS)[:, None]
            rows = jnp.arange(12)[None] // 4  # four inputs each: left, right, the sign
            on = ((t < CUE) & (rows == side)) | ((t >= END) & (t < END + SIGN) & (rows == 2))
            xs = (on & jax.random.bernoulli(of_noise, 0.7, on.shape)).astype(float)

            def now(carry, x):
                return net(params, carry, x, modulator=0.0)

            carry, counts = jax.lax.scan(now, start, xs[:-1])
            share = jax.nn.softmax(0.5 * counts[END : END + SIGN].sum(0))
            turn = jax.random.choice(of_turn, 2, p=share)
            right = turn == side
            voted = votes @ (jax.nn.one_hot(turn, 2) - share)  # known at the turn
            modulator = (jnp.where(right, 1.0, 0.0) - mean) * voted  # and this ten steps later
            late = lambda w: (
                0.0 * net(params | {"w": w}, carry, xs[-1], modulator=modulator)[1].sum()
            )
            return (w - rate * jax.grad(late)(w), 0.95 * mean + 0.05 * right), right

        return jax.lax.scan(trial, (w, 0.5), jax.random.split(of_trials, trials))[1]

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), seeds))


def main(trials, small):
    for name, beta in {"adaptive": 0.3, "not adaptive": 0.0}.items():
        right = train(beta, *((20, 1) if small else (trials, 3)))
        last = right[:, -right.shape[1] // 5 :].mean(1)
        print(f"{name:12s}:", *(f"{share:5.2f}" for share in last), flush=True)
        assert small or not beta or last.min() >= 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    parser.add_argument("--trials", type=int, default=6000)
    main(**vars(parser.parse_args()))
