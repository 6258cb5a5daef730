"""The smallest program: compile a network, look at a gradient and at the report, train.

The network sees rare pulses, up or down, and has to say at every step which came last: a flip-flop.
A GRU learns it online. You see the report of the compiler, how close the online gradient is to that
of back-propagation through time, and an error that falls from 0.8 to below 0.05.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace


class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(1, 16)
        self.readout = braintrace.nn.Linear(16, 1)

    def update(self, x):  # one step
        return self.readout(self.cell(x))


def flip_flop(key, steps, batch):
    """Pulses in a tenth of the steps, and the sign of the last one: (steps, batch, 1) each."""
    pulses = jax.random.choice(key, jnp.array([-1.0, 1.0] + 18 * [0.0]), (steps, batch, 1))
    last = lambda old, new: jnp.where(new == 0, old, new)
    return pulses, jax.lax.associative_scan(last, pulses)


def main(small):
    steps, batch, updates = (20, 8, 20) if small else (100, 32, 120)
    brainstate.random.seed(0)
    network = Network()
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros((batch, 1)), batch_size=batch)
    learner.report.show()

    def loss(x, y):  # of one step
        return jnp.mean((learner(x) - y) ** 2)

    xs, ys = flip_flop(jax.random.key(0), steps, batch)
    gradients = learner.etrace_grad(xs, ys, step_fn=loss)
    for path, gradient in gradients.items():
        print(".".join(path), jax.tree.map(jnp.shape, gradient))

    learner.reset()  # states and traces, between sequences
    step = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
    print(braintrace.verify.compare(learner, step, xs, ys))

    optimizer = optax.adam(3e-3)
    learner.init_optimizer(optimizer)

    @brainstate.transform.jit
    def train(key):
        learner.reset()
        xs, ys = flip_flop(key, steps, batch)
        return learner.etrace_train(xs, ys, step_fn=loss, optimizer=optimizer, update_every=10)

    errors = []
    for i, key in enumerate(jax.random.split(jax.random.key(1), updates)):
        errors.append(float(train(key).mean()))
        if i % (updates // 10) == 0 or i == updates - 1:
            print(f"sequence {i:4d}: error {errors[-1]:.3f}")
    assert errors[-1] < (errors[0] if small else 0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
