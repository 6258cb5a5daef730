"""Handwritten digits with two spiking convolutions, learned forward in time.

An image of 8 x 8 pixels is a constant current for 15 steps. The first layer turns it into spikes,
the second one sees spikes only, a leaky read-out sums up. Every kernel has a trace of its own.

    python examples/conv_spiking_digits.py [--small]
"""

import argparse
import time

import brainstate
import jax
import jax.numpy as jnp
import optax
import saiunit as u
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy
from sklearn.datasets import load_digits

import braintrace

STEPS, TRAIN = 15, 1400  # of 1797 images


class SpikingConv(brainstate.nn.Module):
    """A convolution into leaky integrate-and-fire neurons, one per channel and place."""

    def __init__(self, in_size, channels, stride):
        super().__init__()
        self.conv = braintrace.nn.Conv2d(in_size, channels, 3, stride=stride, b_init=0.1)
        self.spike = braintrace.nn.surrogate("triangle")

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, *self.conv.out_size)))

    def reset_state(self, batch_size=None, **kwargs):
        self.V.value = jnp.zeros((batch_size, *self.conv.out_size))

    def update(self, x):
        V = self.V.value
        self.V.value = 0.8 * (V - self.spike(V - 1)) + self.conv(x)  # a spike takes 1 off
        return self.spike(self.V.value - 1)


class Network(brainstate.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = SpikingConv((8, 8, 1), channels, stride=1)
        self.second = SpikingConv((8, 8, channels), 2 * channels, stride=2)
        self.readout = braintrace.nn.FilteredReadout(32 * channels, 10, tau=10 * u.ms)

    def update(self, image):
        spikes = self.second(self.first(image))
        return self.readout(spikes.reshape(len(image), -1))


def main(small=False, seed=0):
    """Train and test; returns the accuracy on images that were held out."""
    channels, size, epochs = (2, 8, 1) if small else (8, 50, 10)
    brainstate.environ.set(dt=1.0 * u.ms)
    brainstate.random.seed(seed)
    digits = load_digits()
    images, labels = jnp.asarray(digits.images[..., None] / 8), jnp.asarray(digits.target)
    network = Network(channels)
    learner = braintrace.compile(network, "d_rtrl", images[:size], batch_size=size)
    weights = learner.param_states
    adam = optax.adam(3e-3)
    moments = adam.init({path: w.value for path, w in weights.items()})

    @brainstate.transform.jit
    def update(moments, chosen):
        image, label = images[chosen], labels[chosen]
        learner.reset()
        grads, loss = learner.etrace_grad(
            jnp.broadcast_to(image, (STEPS, *image.shape)),
            step_fn=lambda x: cross_entropy(learner(x), label).mean(),
            loss_output="scalar",
            return_value=True,
            keep_traces=False,
        )
        change, moments = adam.update(dict(grads), moments)
        for path, w in weights.items():
            w.value = optax.apply_updates(w.value, change[path])
        return moments, loss

    @brainstate.transform.jit
    def accuracy():
        image = images[TRAIN:]
        brainstate.nn.reset_all_states(network, batch_size=len(image))
        scores = brainstate.transform.for_loop(lambda t: network(image), jnp.arange(STEPS))
        return jnp.mean(scores.mean(0).argmax(-1) == labels[TRAIN:])

    started = time.time()
    for epoch, key in enumerate(jax.random.split(jax.random.key(seed), epochs)):
        batches = jax.random.permutation(key, TRAIN)[: TRAIN // size * size].reshape(-1, size)
        for chosen in batches[:3] if small else batches:
            moments, loss = update(moments, chosen)
        right = float(accuracy())
        brainstate.nn.reset_all_states(network, batch_size=size)
        took = f"{time.time() - started:4.0f} s, epoch {epoch}"
        print(f"{took}: loss {loss:.3f}, {right:.1%} of {len(images) - TRAIN} new images are right")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, learns little")
    main(parser.parse_args().small)
