"""An operator of your own: a ring of units whose connections depend on distance only.

Registered as a plain function, `circulant(x, w)` is learned online like the operators of the
library: its traces and their products are derived from the function. You see that the online
gradient is that of BPTT up to rounding, and a ring that finds the kernel of its teacher.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace


def ring_product(x, weight):
    """y_i = sum_d weight_d x_{i-d}, around the ring, for the last axis of x."""
    places = jnp.arange(weight.size)
    return x[..., (places[:, None] - places) % weight.size] @ weight


circulant = braintrace.register_primitive("circulant", ring_product, batched=True)


class Ring(brainstate.nn.Module):
    """Leaky units, driven by the activity of a ring of inputs."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = brainstate.ParamState(kernel)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.kernel.value.shape)))

    def update(self, x):
        drive = circulant.bind(x, self.kernel.value)
        self.h.value = 0.9 * self.h.value + 0.1 * jnp.tanh(drive)
        return self.h.value


def main(small):
    units, batch, steps, updates = (5, 2, 10, 20) if small else (32, 16, 50, 150)
    distance = jnp.minimum(jnp.arange(units), units - jnp.arange(units))
    target = jnp.exp(-((distance / 3) ** 2)) - 0.5 * jnp.exp(-((distance / 6) ** 2))
    teacher, ring = Ring(target), Ring(jnp.zeros(units))
    brainstate.nn.init_all_states(teacher, batch_size=batch)
    xs = jax.random.normal(jax.random.key(0), (steps, batch, units))
    ys = brainstate.transform.for_loop(teacher, xs)

    learner = braintrace.compile(ring, "d_rtrl", xs[0], batch_size=batch, strict=True)
    step = lambda net, x, y: jnp.mean((net(x) - y) ** 2)
    print(learner.report.parameters["kernel",])
    comparison = braintrace.verify.compare(learner, step, xs, ys)
    print(comparison)
    assert comparison.max_error < 1e-4

    optimizer = optax.adam(2e-2)
    learner.init_optimizer(optimizer)

    @brainstate.transform.jit
    def train():
        learner.reset()
        loss = lambda x, y: step(learner, x, y)
        return learner.etrace_train(xs, ys, step_fn=loss, optimizer=optimizer, update_every=steps)

    for i in range(updates):
        error = float(train().mean())
        if i % (updates // 10) == 0 or i == updates - 1:
            distance = float(jnp.abs(ring.kernel.value - target).max())
            print(f"update {i:4d}: error {error:.2e}, kernel off by {distance:.4f}")
    assert small or distance < 0.02


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
