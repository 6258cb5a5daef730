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
from brainstate.nn import init

import braintrace


class LRU(brainstate.nn.Module):
    """h = λ h + γ B x and y = Re(C h), λ = exp(-exp(ν) + i exp(θ)); complex numbers as pairs."""

    def __init__(self, d_in, d_hidden, r_min, r_max, max_phase):
        super().__init__()
        modulus, phase = brainstate.random.rand(2, d_hidden)
        nu = -0.5 * jnp.log(r_min**2 + modulus * (r_max**2 - r_min**2))
        self.nu = brainstate.ParamState(jnp.log(nu))
        self.theta = brainstate.ParamState(jnp.log(max_phase * phase))
        self.gamma = brainstate.ParamState(0.5 * jnp.log(-jnp.expm1(-2 * nu)))
        self.B = braintrace.nn.Linear(d_in, 2 * d_hidden, init.LecunNormal(), None)
        self.C = braintrace.nn.Linear(2 * d_hidden, 1, init.LecunNormal())

    def init_state(self, batch_size=None, **kwargs):
        shape = (batch_size, *self.nu.value.shape)
        self.re = brainstate.HiddenState(jnp.zeros(shape))
        self.im = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        modulus = braintrace.element_wise(self.nu.value, lambda nu: jnp.exp(-jnp.exp(nu)))
        phase = braintrace.element_wise(self.theta.value, jnp.exp)
        gamma = braintrace.element_wise(self.gamma.value, jnp.exp)
        cos, sin = modulus * jnp.cos(phase), modulus * jnp.sin(phase)
        bx_re, bx_im = jnp.split(self.B(x), 2, axis=-1)
        re, im = self.re.value, self.im.value
        self.re.value = cos * re - sin * im + gamma * bx_re
        self.im.value = sin * re + cos * im + gamma * bx_im
        return self.C(jnp.concatenate([self.re.value, self.im.value], -1))[..., 0]


def sequences(key, steps, batch):
    """The number and the noise (steps, batch, 2), the number to answer, the steps that count."""
    number = jax.random.normal(key, batch)
    time = jnp.arange(steps)
    shown = jnp.where(time[:, None] < steps // 100, number, 0)
    noise = jax.random.normal(jax.random.fold_in(key, 1), (steps, batch))
    answer = jnp.broadcast_to(number, (steps, batch))
    return jnp.stack([shown, noise], -1), answer, time >= steps - steps // 100


def working_bytes(gradient, steps, batch):
    """XLA's temporary buffers for the gradient of a sequence; nothing is run."""
    f = brainstate.transform.StatefulFunction(gradient)
    shapes = jax.eval_shape(lambda: sequences(jax.random.key(0), steps, batch))
    states = f.get_state_trace(*shapes).get_state_values()
    compiled = jax.jit(lambda s, *a: f.jaxpr_call(s, *a)[1]).lower(states, *shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main(small):
    units, batch, steps, updates = (4, 2, 200, 4) if small else (32, 8, 10_000, 40)
    brainstate.random.seed(0)
    network = LRU(2, units, r_min=1 - 10 / steps, r_max=1, max_phase=10 / steps)
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

    short = sequences(jax.random.key(0), 200, batch)
    found, truth = (brainstate.transform.jit(gradient)(*short) for gradient in (online, bptt))
    for path, part in truth.items():
        distance = optax.global_norm(jax.tree.map(jnp.subtract, found[path], part))
        error = float(distance / optax.global_norm(part))
        print(f"{'.'.join(path):10} differs from BPTT by {error:.0e}")
        assert error < 1e-3
    print("working memory of a gradient (MB):   online      BPTT")
    for length in (200, 2_000) if small else (100, 10_000, 1_000_000):
        sizes = [working_bytes(gradient, length, batch) / 1e6 for gradient in (online, bptt)]
        print(f"    {length:9,d} steps           {sizes[0]:16.1f}{sizes[1]:10.1f}")
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
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    main(**vars(parser.parse_args()))
