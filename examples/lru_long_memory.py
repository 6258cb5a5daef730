"""A memory of ten thousand steps: a linear recurrent unit, where BPTT runs out of memory.

A number is shown in the first hundredth of a sequence, noise runs beside it all the time, and in
the last hundredth the number is asked for. The states of an LRU act on themselves only, so D-RTRL
is exact for it and needs the memory of a block of steps. You see that both gradients agree, what
XLA needs for both as sequences grow, and an online learner that at T = 10,000 explains more than
90 % of the variance of the number.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace


class Network(brainstate.nn.Module):
    """An LRU that can remember up to ten times the sequence, and turns slowly."""

    def __init__(self, units, steps):
        super().__init__()
        self.cell = braintrace.nn.LRUCell(2, units, 1 - 10 / steps, 1 - 0.1 / steps, 10 / steps)
        self.readout = braintrace.nn.Linear(2, 1, w_init=0.03)

    def update(self, x):
        return self.readout(self.cell(x))[..., 0]


def sequences(key, steps, batch):
    """The number and the noise (steps, batch, 2), the number to answer, the steps that count."""
    number = jax.random.normal(key, batch)
    time = jnp.arange(steps)
    shown = jnp.where(time[:, None] < steps // 100, number, 0)
    noise = jax.random.normal(jax.random.fold_in(key, 1), (steps, batch))
    answer = jnp.broadcast_to(number, (steps, batch))
    return jnp.stack([shown, noise], -1), answer, time >= steps - steps // 100


def compiled(gradient, steps, batch):
    """A gradient as a compiled function of the states and a sequence of this length."""
    f = brainstate.transform.StatefulFunction(gradient)
    shapes = jax.eval_shape(lambda: sequences(jax.random.key(0), steps, batch))
    states = f.get_state_trace(*shapes).get_state_values()
    call = jax.jit(lambda states, *args: f.jaxpr_call(states, *args)[1])
    return call.lower(states, *shapes).compile(), states


def main(small):
    units, batch, steps, updates = (4, 2, 200, 2) if small else (32, 16, 10_000, 60)
    brainstate.random.seed(0)
    network = Network(units, steps)
    x = jnp.zeros((batch, 2))
    learner = braintrace.compile(network, "d_rtrl", x, batch_size=batch, strict=True)
    loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)

    def online(xs, ys, counts):
        learner.reset()
        return learner.etrace_grad(xs, ys, step_fn=loss, mask=counts, keep_traces=False)

    def bptt(xs, ys, counts):
        def total():
            learner.reset()
            errors = (brainstate.transform.for_loop(network, xs) - ys) ** 2
            return (errors.mean(1) * counts).sum() / counts.sum()

        return brainstate.transform.grad(total, network.states(brainstate.ParamState))()

    for length in (200,) if small else (200, 10_000, 1_000_000):
        made = [compiled(gradient, length, batch) for gradient in (online, bptt)]
        if length == 200:
            short = sequences(jax.random.key(0), length, batch)
            found, truth = (run(states, *short) for run, states in made)
            distance = optax.global_norm(jax.tree.map(jnp.subtract, found, truth))
            error = float(distance / optax.global_norm(truth))
            print(f"the online gradient differs from that of BPTT by {error:.0e}")
            assert error < 1e-4
        sizes = [run.memory_analysis().temp_size_in_bytes / 1e6 for run, _ in made]
        told = f"{sizes[0]:.1f} MB online, {sizes[1]:,.1f} MB by BPTT"
        print(f"working memory of a gradient, {length:9,d} steps: {told}")
    assert small or sizes[0] < sizes[1] / 100

    optimizer = optax.adam(1e-2)
    learner.init_optimizer(optimizer)

    @brainstate.transform.jit
    def train(key):
        learner.reset()
        xs, ys, counts = sequences(key, steps, batch)
        errors = learner.etrace_train(
            *(xs, ys), step_fn=loss, optimizer=optimizer, update_every=steps, mask=counts
        )
        return 1 - (errors * counts).sum() / (counts.sum() * ys[0].var())

    explained = []
    for i, key in enumerate(jax.random.split(jax.random.key(1), updates)):
        explained.append(float(train(key)))
        if i % max(1, updates // 10) == 0 or i == updates - 1:
            print(f"update {i:4d}: variance explained {explained[-1]:7.1%}")
    assert small or sum(explained[-5:]) / 5 > 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
