"""A sparse network of excitatory and inhibitory spiking neurons that keeps Dale's law.

A trained number is the logarithm of a synapse's strength, so no synapse changes its sign. Input
reaches one half of the excitatory neurons, the read-out sees the other half, and both have fixed
weights: only the sparse synapses learn. Which half of the input channels fired more?

    python examples/ei_sparse_network.py [--small]
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
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import braintrace

STEPS, ANSWER, CHANNELS = 100, 10, 20
LATE = np.where(np.arange(STEPS) < STEPS - ANSWER, 0.0, 1.0)


class EINetwork(braintrace.nn.SpikingCell):  # four neurons in five are excitatory
    def __init__(self, units, density=0.2):
        sees, excitatory = np.arange(units) < 2 * units // 5, np.arange(units) < 4 * units // 5
        rng = np.random.default_rng(0)
        weight = rng.normal(0, CHANNELS**-0.5, (CHANNELS, units)) * sees
        super().__init__(CHANNELS, units, recurrent=False, w_init=jnp.asarray(weight), b_init=0.04)
        present = (rng.random((units, units)) < density) & ~np.eye(units, dtype=bool)
        self.synapses = scipy.sparse.csr_array(present.astype(float))
        of_sender = np.repeat(excitatory, np.diff(self.synapses.indptr))
        self.sign = jnp.where(of_sender, 1.0, -1.0)
        # Inhibition is rarer and stronger: the two are in balance.
        strength = np.where(of_sender, 0.2, 0.8) / (density * units) ** 0.5
        self.log_strength = brainstate.ParamState(jnp.log(jnp.asarray(strength)))
        self.alpha, self.rho = (self.decay(name, 20 * u.ms) for name in ("tau", "tau_s"))

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(self.rest(batch_size))
        self.s = brainstate.HiddenState(self.rest(batch_size))  # the filter, by sender

    def update(self, x):
        V, z = self.V.value, self.spikes(self.V.value)
        self.s.value = self.rho() * self.s.value + z
        s, w = (1 - self.rho()) * self.s.value, self.sign * jnp.exp(self.log_strength.value)
        arriving = braintrace.sparse_matmul(s, w, sparse_mat=self.synapses)
        self.V.value = self.alpha() * self.after_reset(V, z) + self.current(x, z) + arriving
        return self.spikes(self.V.value)


class Network(brainstate.nn.Module):
    def __init__(self, units):
        super().__init__()
        self.cell, self.seen = EINetwork(units), slice(2 * units // 5, 4 * units // 5)
        self.readout = braintrace.nn.FilteredReadout(2 * units // 5, 2, tau=50 * u.ms)

    def update(self, x):
        return self.readout(self.cell(x)[..., self.seen])


def trials(key, size):
    """Input spikes (steps, size, channels), and the half that fires more."""
    half = jax.random.bernoulli(key, 0.5, (size,)).astype(int)
    lean = jnp.where(jnp.arange(CHANNELS) // (CHANNELS // 2) == half[:, None], 0.13, 0.07)
    spikes = jax.random.bernoulli(jax.random.fold_in(key, 1), lean, (STEPS, *lean.shape))
    return spikes.astype(float), half


def main(small=False, seed=0):
    """Train and test; returns the accuracy on new trials."""
    units, size, updates = (20, 4, 3) if small else (100, 32, 100)
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(seed)
    network = Network(units)
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros((size, CHANNELS)), batch_size=size)
    weights = {("cell", "log_strength"): network.cell.log_strength}
    adam = optax.adam(5e-2)
    moments = adam.init({path: w.value for path, w in weights.items()})

    @brainstate.transform.jit
    def update(moments, key):
        spikes, half = trials(key, size)
        learner.reset()
        loss = lambda x: cross_entropy(learner(x), half).mean()
        grads = learner.etrace_grad(spikes, step_fn=loss, mask=LATE, weights=weights)
        change, moments = adam.update(dict(grads), moments)
        for path, w in weights.items():
            w.value = optax.apply_updates(w.value, change[path])
        return moments

    @brainstate.transform.jit
    def accuracy(key):
        spikes, half = trials(key, size)
        brainstate.nn.reset_all_states(network, batch_size=size)
        scores = brainstate.transform.for_loop(network, spikes)
        return jnp.mean(scores[-ANSWER:].mean(0).argmax(-1) == half)

    started, before = time.time(), network.cell.log_strength.value
    train, test = (jax.random.split(k, updates) for k in jax.random.split(jax.random.key(seed)))
    for i, key in enumerate(train):
        if i % 20 == 0:
            print(f"{time.time() - started:4.0f} s, update {i:3d}: {accuracy(test[0]):.0%} right")
        moments = update(moments, key)
    right = float(jnp.mean(jnp.stack([accuracy(key) for key in test[:10]])))
    factor = jnp.exp(jnp.abs(network.cell.log_strength.value - before).mean())
    print(f"{time.time() - started:4.0f} s, {before.size} synapses changed by {factor:.2f} times,")
    print(f"none its sign: {right:.1%} of new trials are right")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, learns nothing")
    main(parser.parse_args().small)
