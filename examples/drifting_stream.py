"""Learning that never stops: an update at every step of a stream whose rules change.

A network predicts the output of an unknown system from its input. After every 4,000 steps the
system is another one; nobody tells the learner. There are no sequences, no batches and no resets:
each step brings one number, one error and one update. You see the errors of two networks, in the
last quarter of each period, for a target with a variance of about one. The network that keeps
learning follows every change; its copy, frozen after the first period, is lost.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace


class Network(brainstate.nn.Module):
    def __init__(self, units):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(1, units)
        self.readout = braintrace.nn.Linear(units, 1)

    def update(self, x):
        return self.readout(self.cell(x))


def period(key, steps):
    """Noise that goes through three filters; how they are mixed is drawn anew in each period."""
    mixture, noise = jax.random.split(key)
    xs = jax.random.normal(noise, (steps, 1))
    leaks = jnp.array([0.5, 0.8, 0.9])
    step = lambda z, x: (leaks * z + jnp.sqrt(1 - leaks**2) * x,) * 2
    filtered = jax.lax.scan(step, jnp.zeros(3), xs)[1]
    weights = jax.random.normal(mixture, (3, 1))
    return xs, filtered @ (weights / jnp.linalg.norm(weights))


def main(small):
    units, steps, periods = (4, 100, 2) if small else (32, 4_000, 5)
    brainstate.random.seed(0)
    network, frozen = Network(units), Network(units)
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros(1))
    brainstate.nn.init_all_states(frozen)
    optimizer = optax.adam(3e-3)
    learner.init_optimizer(optimizer)

    @brainstate.transform.jit
    def live(xs, ys):
        loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        return learner.etrace_train(xs, ys, step_fn=loss, optimizer=optimizer, update_every=1)

    @brainstate.transform.jit
    def watch(xs, ys):
        return brainstate.transform.for_loop(lambda x, y: jnp.mean((frozen(x) - y) ** 2), xs, ys)

    print("period   online   frozen")
    for i, key in enumerate(jax.random.split(jax.random.key(0), periods)):
        xs, ys = period(key, steps)
        online = live(xs, ys)[-steps // 4 :].mean()
        if i == 0:
            for path, state in frozen.states(brainstate.ParamState).items():
                state.value = learner.param_states[path].value
        still = watch(xs, ys)[-steps // 4 :].mean()
        print(f"{i:6d} {online:8.3f} {still:8.3f}")
        assert small or i == 0 or online < still / 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
