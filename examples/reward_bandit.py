"""Spiking neurons choose an arm, and learn from a reward that comes when they are silent again.

Four cues, two arms; for every cue one arm pays. Each cue has five noisy inputs of its own, on for
20 steps; of two pools of leaky neurons the one with more spikes pulls its arm, and the reward minus
its running mean arrives 20 steps later. No derivative of a loss is used: a synapse whose input came
before a spike is eligible, its eligibility decays, and the reward strengthens what is left of it
(`r_stdp`). Where it is eligible for one step only, nothing is left when the reward comes. You see
the fraction of good choices in the last fifth of training, for three seeds.
"""

import argparse

import jax
import jax.numpy as jnp

from braintrace import online, rules

CUES, EACH, POOL, ON, OFF = 4, 5, 8, 20, 20
INPUTS = CUES * EACH


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvps(lambda t, z, v: 0.3 * jnp.maximum(0, 1 - jnp.abs(v)) * t)


def step(params, state, x):
    """Two pools of leaky neurons that leave their membrane when they spike."""
    v, z = state
    current, noise = x
    v = 0.9 * v * (1 - jax.lax.stop_gradient(z)) + current @ params["w"] + noise
    z = spike(v - 1.0)
    return (v, z), z.reshape(2, POOL).sum(1)


spikes_of = lambda h: h[..., 0] > 1.0
RULES = {  # by how long a coincidence stays eligible
    "20 steps": rules.r_stdp(spikes_of, decay=0.95, decay_pre=0.8, a_post=0.0),
    "one step": rules.r_stdp(spikes_of, decay=0.0, decay_pre=0.8, a_post=0.0),
}


def train(rule, trials, seeds, rate=0.01):
    """Of every trial, whether the choice was the good one."""
    net = online(step, RULES[rule])
    zeros = (jnp.zeros(2 * POOL), jnp.zeros(2 * POOL))
    silent = (jnp.zeros(INPUTS), jnp.zeros(2 * POOL))

    def run(key):
        keys = jax.random.split(key, 4)
        patterns = jnp.repeat(jnp.eye(CUES), EACH, axis=1)
        pays = jax.random.permutation(keys[1], jnp.arange(CUES) % 2)
        params = {"w": 0.3 * jax.random.uniform(keys[2], (INPUTS, 2 * POOL))}
        start = net.init(params, zeros, silent)

        def trial(loop, key):
            params, mean = loop
            of_cue, of_spikes, of_drive = jax.random.split(key, 3)
            cue = jax.random.randint(of_cue, (), 0, CUES)
            spikes = jax.random.bernoulli(of_spikes, 0.3, (ON, INPUTS)) * patterns[cue]
            currents = jnp.zeros((ON + OFF, INPUTS)).at[:ON].set(spikes)
            drive = 0.1 * jnp.repeat(jax.random.normal(of_drive, (2,)), POOL)  # explores
            noise = jnp.zeros((ON + OFF, 2 * POOL)).at[:ON].set(drive)

            def now(loop, x):  # the modulator is zero until the reward comes
                carry, counts = loop
                carry, counts_now = net(params, carry, x, modulator=0.0)
                return (carry, counts + counts_now), None

            xs = (currents[:-1], noise[:-1])
            (carry, counts), _ = jax.lax.scan(now, (start, jnp.zeros(2)), xs)
            good = jnp.argmax(counts) == pays[cue]
            reward = jnp.where(good, 1.0, 0.0) - mean
            last = (currents[-1], noise[-1])
            changed = lambda p: 0.0 * net(p, carry, last, modulator=reward)[1].sum()
            change = jax.grad(changed)(params)
            params = {"w": jnp.clip(params["w"] - rate * change["w"], 0.0, 1.0)}
            return (params, 0.95 * mean + 0.05 * good), good

        return jax.lax.scan(trial, (params, 0.5), jax.random.split(keys[3], trials))[1]

    return jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), seeds))


def main(trials, small):
    for rule in RULES:
        good = train(rule, *((20, 1) if small else (trials, 3)))
        last = good[:, -good.shape[1] // 5 :].mean(1)
        print(f"eligible for {rule}:", *(f"{share:5.2f}" for share in last), flush=True)
        assert small or rule == "one step" or last.min() >= 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    parser.add_argument("--trials", type=int, default=2000)
    main(**vars(parser.parse_args()))
