"""Excitatory and inhibitory neurons that tell an order in time by the delays of their axons.

Eight inputs in a ring spike once each, one after another, this way round or the other, from any of
them on: which comes last says nothing. Every axon has a delay, of inputs and of neurons alike, and
all of them are 20 ms at first. Weights and delays are trained online, a neuron stays excitatory or
inhibitory (Dale's law), and the same network with fixed delays stands beside it.
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

CHANNELS, APART, LONGEST = 8, 5, 45  # ms
STEPS, ANSWER = CHANNELS * APART + LONGEST, 20


class Network(brainstate.nn.Module):
    """Four neurons in five are excitatory; the read-out sees these."""

    def __init__(self, units, train_delay):
        super().__init__()
        self.excitatory = 4 * units // 5
        sign = jnp.where(jnp.arange(units) < self.excitatory, 1.0, -4.0)[:, None]
        draw = lambda *shape: jnp.abs(brainstate.random.normal(size=shape))
        self.cell = braintrace.nn.DelayedLIFCell(
            CHANNELS,
            units,
            tau=5 * u.ms,
            delay=20 * u.ms,
            u_delay=20 * u.ms,
            max_delay=LONGEST * u.ms,
            interpolation="gaussian",
            width=3 * u.ms,
            train_delay=train_delay,
            through=False,  # D-RTRL leaves these paths out anyway
            surrogate="arctan",
            w_init=2.0 * draw(CHANNELS, units),
            u_init=0.1 * sign * draw(units, units) / units**0.5,
        )
        self.readout = braintrace.nn.FilteredReadout(self.excitatory, 2, tau=20 * u.ms)

    def update(self, x):
        return self.readout(self.cell(x)[..., : self.excitatory])


def trials(key, size):
    """Input spikes (steps, size, channels) with a jitter, and whether they go back."""
    of_way, of_start, of_jitter = jax.random.split(key, 3)
    back = jax.random.bernoulli(of_way, 0.5, (size,)).astype(int)
    start = jax.random.randint(of_start, (size, 1), 0, CHANNELS)
    order = (start + (1 - 2 * back)[:, None] * jnp.arange(CHANNELS)) % CHANNELS
    jitter = jax.random.randint(of_jitter, order.shape, 0, 2)
    return (jnp.arange(STEPS)[:, None, None] == APART * order + jitter).astype(float), back


def trained(train_delay, small, seed):
    """The accuracy on new trials, and how the delays have spread."""
    units, size, updates = (10, 4, 2) if small else (40, 32, 150)
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(seed)
    network = Network(units, train_delay)
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros((size, CHANNELS)), batch_size=size)
    fast, signs = optax.adam(0.3), braintrace.wiring.keep_signs()
    kinds = {path: path[-1] for path in learner.param_states}
    of_path = {p: "delay" if k == "delay" else "U" if "U" in p else "W" for p, k in kinds.items()}
    how = {"delay": fast, "W": optax.adam(5e-3), "U": optax.chain(optax.adam(5e-3), signs)}
    optimizer = optax.multi_transform(how, of_path)
    learner.init_optimizer(optimizer)
    counts = (jnp.arange(STEPS) >= STEPS - ANSWER).astype(float)

    @brainstate.transform.jit
    def update(key):
        learner.reset()
        xs, back = trials(key, size)
        loss = lambda x: cross_entropy(learner(x), back).mean()
        how = {"step_fn": loss, "optimizer": optimizer, "update_every": STEPS}
        return learner.etrace_train(xs, mask=counts, **how)[-ANSWER:].mean()

    @brainstate.transform.jit
    def accuracy(key):
        xs, back = trials(key, size)
        brainstate.nn.reset_all_states(network, batch_size=size)
        scores = brainstate.transform.for_loop(network, xs)
        return jnp.mean(scores[-ANSWER:].mean(0).argmax(-1) == back)

    started = time.time()
    for i, key in enumerate(jax.random.split(jax.random.key(seed), updates)):
        loss = update(key)
        if i % 30 == 0:
            print(f"{time.time() - started:4.0f} s, update {i:3d}: loss {loss:.2f}")
    tests = jax.random.split(jax.random.key(seed + 1000), 10)
    return sum(float(accuracy(key)) for key in tests) / 10, network.cell.W.delays()


def main(small):
    for train_delay in (True,) if small else (False, True):
        right, delays = trained(train_delay, small, seed=0)
        name = "trained" if train_delay else "fixed"
        ms = delays.to_decimal(u.ms)
        print(f"{name} delays, {ms.min():.0f} to {ms.max():.0f} ms: {right:.1%} of trials right")
    assert small or right > 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, learns nothing")
    main(**vars(parser.parse_args()))
