"""A connectome that moves its synapses to where they are of use, with Dale's law (DEEP R).

Edges are drawn at random, as a list of them would be read from a file: one pair in a hundred
is connected. Four groups of sensory neurons hear four groups of inputs, and four groups of others
are read out; which group of inputs fires more? The synapses between neurons are all that learns:
by their strengths alone, and by rewiring at the same number of synapses, whose sign is that of the
sender. You see right answers, and how many synapses lead from a sensory group to its own output.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

from braintrace import data, nn, online, wiring

GROUPS, CHANNELS, STEPS, ANSWER, DENSITY = 4, 20, 60, 20, 0.01
spike = nn.surrogate("arctan")


def connectome(units, seed=0):
    """A matrix of strengths in millivolt, from edges; four senders in five are excitatory."""
    rng = np.random.default_rng(seed)
    pre, post = np.nonzero((rng.random((units, units)) < DENSITY) & ~np.eye(units, dtype=bool))
    sign = np.where(np.arange(units) % 5 < 4, 1.0, -1.0)
    weight = 0.3 * sign[pre] * rng.lognormal(0, 0.5, len(pre))
    edges = {"id": np.arange(units), "pre": pre, "post": post, "weight": weight}
    matrix = data.edge_matrix(edges)
    return jnp.asarray(matrix.toarray()), jnp.asarray(sign)[:, None] * jnp.ones((units, units))


def step(w, state, x):
    """Leaky integrate-and-fire neurons; the first half is sensory, the other half is read out."""
    v, r = state
    z = spike(v - 1)
    units = v.shape[-1]
    heard = 1.2 * x[..., jnp.arange(units // 2) % CHANNELS]  # one input each
    into = jnp.concatenate([heard, jnp.zeros_like(heard)], -1)
    v = 0.9 * (v - z) + into + z @ w
    r = 0.95 * r + spike(v - 1)[..., units // 2 :]
    scores = r.reshape(*r.shape[:-1], -1, GROUPS).mean(-2)
    return (v, r), scores


def trials(key, size):
    """Input spikes (steps, size, channels), and the group that fires more."""
    most = jax.random.randint(key, (size,), 0, GROUPS)
    lean = jnp.where(jnp.arange(CHANNELS) % GROUPS == most[:, None], 0.1, 0.05)
    spikes = jax.random.bernoulli(jax.random.fold_in(key, 1), lean, (STEPS, *lean.shape))
    return spikes.astype(float), most


def main(updates, small):
    units, size, updates = (40, 4, 2) if small else (200, 32, updates)
    first, signs = connectome(units)
    present = first != 0
    rest = jnp.zeros((size, units)), jnp.zeros((size, units - units // 2))
    group = jnp.arange(units) % GROUPS
    own = (group[:, None] == group) & (jnp.arange(units) < units // 2)[:, None]
    own = own & (jnp.arange(units) >= units // 2)
    rewire = wiring.deep_r(
        optax.adam(0.02), int(present.sum()), l1=1e-3, temperature=1e-6, signs=signs
    )
    stay = optax.chain(optax.adam(0.02), wiring.keep_mask(present), wiring.keep_signs(signs))
    net = online(step, "d_rtrl")
    start = net.init(first, rest, jnp.zeros((size, CHANNELS)))
    grad = net.grad(lambda scores, y, counts: counts * cross_entropy(5 * scores, y).mean())
    counts = (jnp.arange(STEPS) >= STEPS - ANSWER) / ANSWER

    @jax.jit
    def gradient(w, key):
        xs, most = trials(key, size)
        return grad(w, start, xs, jnp.broadcast_to(most, (STEPS, size)), counts)[0]

    @jax.jit
    def right(w, key):
        xs, most = trials(key, size)
        scores = jax.lax.scan(lambda s, x: step(w, s, x), rest, xs)[1]
        return jnp.mean(scores[-ANSWER:].mean(0).argmax(-1) == most)

    for name, optimizer in (("strengths", stay), ("rewired", rewire)):
        w, state = first, optimizer.init(first)
        if name == "rewired":  # it draws which are active; these are those of the connectome
            state = state._replace(active=present)
        change_of = jax.jit(optimizer.update)
        for key in jax.random.split(jax.random.key(0), updates):
            change, state = change_of(gradient(w, key), state, w)
            w = optax.apply_updates(w, change)
        tests = jax.random.split(jax.random.key(1), 10)
        score = sum(float(right(w, key)) for key in tests) / 10
        moved, useful = int(((w != 0) & ~present).sum()), int(((w != 0) & own).sum())
        print(f"{name}: {score:.1%} right, {int((w != 0).sum())} of {int(present.sum())} synapses")
        print(f"  {moved} moved, {useful} lead to their own output ({int((present & own).sum())})")
        assert (w * signs >= 0).all()
    assert small or score > 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    parser.add_argument("--updates", type=int, default=300)
    main(**vars(parser.parse_args()))
