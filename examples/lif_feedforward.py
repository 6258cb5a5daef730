"""Feed-forward spiking neurons whose online gradient is that of back-propagation through time.

Frozen input spikes drive a layer of leaky integrate-and-fire neurons, and a leaky read-out has to
draw a curve while they come: no spike goes back, and the read-out filters before its weight, so
D-RTRL leaves nothing out. You see the largest difference of its gradient from BPTT, and the error
of the curve while the weights change every 50 ms.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax
import saiunit as u

import braintrace


class Network(brainstate.nn.Module):
    def __init__(self, channels, units):
        super().__init__()
        self.neurons = braintrace.nn.LIFCell(channels, units, recurrent=False, tau=20 * u.ms)
        self.readout = braintrace.nn.FilteredReadout(units, 1, tau=20 * u.ms)

    def update(self, x):
        return self.readout(self.neurons(x))


def pattern(key, steps, channels):
    """Input spikes at 50 Hz, and a sum of four sines that they have to become."""
    spikes, phases = jax.random.split(key)
    t = jnp.arange(steps)[:, None]
    angle = 2 * jnp.pi * (t * jnp.array([1, 2, 3, 5]) / steps + jax.random.uniform(phases, (4,)))
    curve = jnp.sin(angle).mean(-1, keepdims=True)
    return jax.random.bernoulli(spikes, 0.05, (steps, channels)).astype(float), curve


def main(small):
    channels, units, steps, updates = (8, 10, 50, 5) if small else (50, 100, 500, 200)
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(0)
    network = Network(channels, units)
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros(channels), strict=True)
    xs, ys = pattern(jax.random.key(0), steps, channels)

    loss = lambda net, x, y: jnp.mean((net(x) - y) ** 2)
    print(braintrace.verify.compare(learner, loss, xs[:50], ys[:50]))

    optimizer = optax.adam(2e-3)
    learner.init_optimizer(optimizer)
    train = learner.train(lambda y, want: jnp.mean((y - want) ** 2), optimizer, update_every=50)
    errors = []
    for i in range(updates):
        learner.reset()
        errors.append(float(train(xs, ys).mean()))
        if i % (updates // 5) == 0 or i == updates - 1:
            print(f"pass {i:3d}: squared error {errors[-1]:.4f}")
    assert small or errors[-1] < 0.1 * errors[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
