"""Delayed match to sample with spiking neurons, in millivolt, milliseconds and hertz.

One of two stimuli is shown, then nothing, then one of the two again: are they the same? Neurons
with a slow threshold remember which of them fired. They learn forward in time with D_RTRL.

    python examples/spiking_match_to_sample.py [--small]
"""

import argparse
import time

import brainstate
import jax
import jax.numpy as jnp
import optax
import saiunit as u
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import braintrace

DT = 5.0 * u.ms
SAMPLE, DELAY, TEST = 100 * u.ms, 400 * u.ms, 100 * u.ms
CHANNELS = 15  # per stimulus
ON, OFF = 40 * u.Hz, 2 * u.Hz
ANSWER = 10  # steps at the end that count


class Network(brainstate.nn.Module):
    def __init__(self, units):
        super().__init__()
        normal = brainstate.nn.init.Normal
        self.cell = braintrace.nn.ALIFCell(
            2 * CHANNELS,
            units,
            tau=20 * u.ms,
            tau_a=500 * u.ms,
            V_th=20 * u.mV,
            beta=2 * u.mV,
            # Weights without a unit count in that of V_th.
            w_init=normal(0.0, 4.0),
            u_init=normal(0.0, 10 / units**0.5),
            b_init=None,
        )
        self.readout = braintrace.nn.FilteredReadout(units, 2, tau=50 * u.ms)

    def update(self, spikes):
        return self.readout(self.cell(spikes))


def trials(key, size):
    """Input spikes (steps, size, channels), and whether test and sample are the same."""
    n_sample, n_delay, n_test = (round(t / DT) for t in (SAMPLE, DELAY, TEST))
    keys = jax.random.split(key, 3)
    sample, test = (jax.random.bernoulli(k, 0.5, (size,)).astype(int) for k in keys[:2])

    def shown(stimulus, steps):
        on = jnp.repeat(jax.nn.one_hot(stimulus, 2), CHANNELS, axis=-1)
        return jnp.broadcast_to(on, (steps, *on.shape))

    silence = jnp.zeros((n_delay, size, 2 * CHANNELS))
    on = jnp.concatenate([shown(sample, n_sample), silence, shown(test, n_test)])
    chance = u.maybe_decimal((OFF + (ON - OFF) * on) * DT)
    return jax.random.bernoulli(keys[2], chance).astype(float), (sample == test).astype(int)


def main(small=False, seed=0):
    """Train and test; returns the accuracy on new trials."""
    units, size, updates = (10, 4, 3) if small else (100, 64, 400)
    brainstate.environ.set(dt=DT)
    brainstate.random.seed(seed)
    network = Network(units)
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros((size, 30)), batch_size=size)
    for path, found in learner.report.parameters.items():
        print(f"{'.'.join(path):24} {found.how}")

    adam = optax.scale_by_adam()
    weights = learner.param_states
    moments = adam.init({path: w.value for path, w in weights.items()})
    rate = {path: 0.1 if path[0] == "cell" else 0.01 for path in weights}  # the cell's are in mV

    @brainstate.transform.jit
    def update(moments, key):
        spikes, answers = trials(key, size)
        learner.reset()
        grads, loss = learner.etrace_grad(
            spikes,
            step_fn=lambda x: cross_entropy(learner(x), answers).mean(),
            mask=(jnp.arange(len(spikes)) >= len(spikes) - ANSWER).astype(float),
            keep_traces=False,
            loss_output="scalar",
            return_value=True,
        )
        change, moments = adam.update(dict(grads), moments)
        for path, w in weights.items():
            w.value = jax.tree.map(lambda a, d, r=rate[path]: a - r * d, w.value, change[path])
        return moments, loss

    @brainstate.transform.jit
    def accuracy(key):
        spikes, answers = trials(key, size)
        brainstate.nn.reset_all_states(network, batch_size=size)
        scores = brainstate.transform.for_loop(network, spikes)
        return jnp.mean(scores[-ANSWER:].mean(0).argmax(-1) == answers)

    started = time.time()
    train, test = (jax.random.split(k, updates) for k in jax.random.split(jax.random.key(seed)))
    for i, key in enumerate(train):
        if i % 50 == 0:
            print(f"{time.time() - started:4.0f} s, update {i:3d}: {accuracy(test[0]):.0%} right")
        moments, loss = update(moments, key)
    right = float(jnp.mean(jnp.stack([accuracy(key) for key in test[:10]])))
    print(f"{time.time() - started:4.0f} s, loss {loss:.3f}: {right:.1%} of new trials are right")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, learns nothing")
    main(parser.parse_args().small)
