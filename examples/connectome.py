"""A connectome of leaky integrate-and-fire neurons whose synapses learn firing rates online.

Synapses are drawn at random, with heavy-tailed degrees and delays of one to four steps. A sender is
excitatory or inhibitory at all of its synapses (Dale's law), and each of them has one trained
number. This is a hundredth of the fly's brain, with `--small` for a few updates;
benchmarks/connectome.py trains and measures all of it, or a network from a file of edges.

    python examples/connectome.py [--small]
"""

import argparse
import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import saiunit as u
import scipy.sparse

import braintrace

NEURONS, SYNAPSES, DELAYS, CHANNELS = 139_255, 15_100_000, 4, 8
REST, GAP = -52 * u.mV, 7 * u.mV  # from rest to threshold
TAU_V, TAU_G, TAU_RATE = 20 * u.ms, 5 * u.ms, 300 * u.ms
OPTIMIZER = optax.chain(optax.adam(0.03), optax.keep_params_nonnegative())


def random_edges(scale, seed=0, neurons=NEURONS, synapses=SYNAPSES):
    """Neurons are numbers, weights in mV. Three neurons in ten are inhibitory."""
    rng, n, size = np.random.default_rng(seed), round(scale * neurons), round(scale * synapses)
    degrees = [rng.multinomial(size, p / p.sum()) for p in rng.lognormal(0, 1, (2, n))]
    pre, post = (np.repeat(np.arange(n, dtype=np.int32), d) for d in degrees)
    rng.shuffle(post)
    strength = np.where(rng.random(n) < 0.7, 0.3, -1.0)[pre]
    return {"pre": pre, "post": post, "weight": strength * rng.lognormal(-0.5, 1, size)}


class Connectome(brainstate.nn.Module):
    def __init__(self, edges, through=False, seed=0):
        """D-RTRL and pp_prop leave out the paths from neuron to neuron, so spikes are sent without
        a derivative: with one (`through`), a synapse would need a slot for every delay."""
        super().__init__()
        rng = np.random.default_rng(seed)
        edges = {"delay": rng.integers(1, DELAYS + 1, len(edges["pre"])), **edges}
        order = np.lexsort((edges["pre"], edges["delay"]))  # for fast products: by row
        pre, post, weight, delay = (edges[k][order] for k in ("pre", "post", "weight", "delay"))
        self.n, self.delays, self.through = 1 + max(pre.max(), post.max()), delay.max(), through
        sign = np.where(np.bincount(pre, weight, self.n) < 0, -1, 1)  # of a sender: Dale's law
        self.sign = jnp.asarray(sign, jnp.int8)
        self.connect(pre + (delay - 1) * self.n, post, np.abs(weight), sign[pre])
        self.bias = jnp.asarray(rng.normal(6, 2, self.n), float) * u.mV
        self.gain = jnp.asarray(5.0 * (rng.random(self.n) < 0.1)) * u.mV  # a tenth is sensory
        self.channel = jnp.asarray(rng.integers(0, CHANNELS, self.n))
        self.spike = braintrace.nn.surrogate("arctan")

    def connect(self, sender, receiver, weight, sign):
        shape = (self.delays * self.n, self.n)
        matrix = scipy.sparse.coo_array((weight, (sender, receiver)), shape)
        self.synapses = braintrace.nn.SparseLinear(matrix)

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros(self.n) * u.mV)  # from rest, before its reset
        self.g = brainstate.HiddenState(jnp.zeros(self.n) * u.mV)
        kind = float if self.through else jnp.int8
        self.past = brainstate.ShortTermState(jnp.zeros((self.delays - 1) * self.n, kind))
        self.rate = brainstate.ShortTermState(jnp.zeros(self.n) * u.Hz)

    def spikes(self):
        return self.spike(u.maybe_decimal((self.V.value - GAP) / GAP))

    def arriving(self, sent, V, keep):
        self.g.value = keep * self.g.value + self.synapses(sent) * u.mV
        return self.g.value

    def update(self, x):
        dt = brainstate.environ.get("dt")
        keep_V, keep_g, keep = (jnp.exp(-dt / tau) for tau in (TAU_V, TAU_G, TAU_RATE))
        z = self.spikes()
        sent = self.sign * (z if self.through else z.astype(jnp.int8))
        sent = jnp.concatenate([sent, self.past.value])  # one part per delay
        self.past.value, V = sent[: len(self.past.value)], self.V.value - GAP * z
        drive = self.bias + self.gain * x[self.channel] + self.arriving(sent, V, keep_g)
        self.V.value = keep_V * V + (1 - keep_V) * drive
        # The derivative of a rate is that of its last step: its memory would be one more slot.
        rate = keep * self.rate.value + (1 - keep) * (self.spikes() / dt).in_unit(u.Hz)
        self.rate.value = jax.lax.stop_gradient(rate)
        return rate


def train(learner, some, target, updates, steps=50):
    """Train the rates of some neurons; returns the errors in Hz, update by update."""
    loss = lambda x: jnp.mean((learner(x)[some] / u.Hz - target) ** 2)
    started, errors = time.time(), []
    for i in range(updates):
        xs = jax.random.uniform(jax.random.key(i), (steps, CHANNELS))
        losses = learner.etrace_train(xs, step_fn=loss, optimizer=OPTIMIZER, update_every=steps)
        errors.append(float(losses.mean()) ** 0.5)
        if i % 20 == 0:
            print(f"{time.time() - started:4.0f} s, {i * steps:4d} ms: off by {errors[-1]:.1f} Hz")
    return errors


def main(small=False):
    brainstate.environ.set(dt=1.0 * u.ms)
    network = Connectome(random_edges(0.01))
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros(CHANNELS), verbose=1)
    some = jnp.arange(0, network.n, 10)
    target = jax.random.uniform(jax.random.key(1), some.shape, minval=5, maxval=20)
    errors = train(learner, some, target, 3 if small else 101)
    print(f"{network.n:,} neurons: rates off by {errors[-1]:.1f} Hz, at first {errors[0]:.1f} Hz")
    assert small or errors[-1] < 0.75 * errors[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few updates, learns nothing")
    main(**vars(parser.parse_args()))
