"""A rule of your own: errors that reach each unit as one bit.

A rule is a trace and a signal that meets it. `OneBit` keeps the traces of D-RTRL and replaces the
signal: each unit hears only the sign of its error, at the volume of the whole layer. `leaky` needs
no code at all: it is a point in the space of rules, with one leak in place of the Jacobian. A
number, +1 or -1, is shown once and asked for 15 steps later. You see the errors of four rules fall
from the same weights on the same data: one bit is enough, but without a trace nothing is learned.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace


class OneBit(braintrace.D_RTRL):
    """D-RTRL with the sign of the learning signal."""

    def learning_signal(self, group, cotangent, state, extra):
        """Signals of some steps, (steps, batch, units, states)."""
        volume = jnp.abs(cotangent).mean(-2, keepdims=True)
        return jnp.sign(cotangent) * volume


leaky = braintrace.ETraceConfig(temporal_recursion="scalar_leak", decay=0.9)
RULES = {"D-RTRL": "d_rtrl", "one bit": OneBit, "leaky": leaky, "no trace": "no_trace"}


class Network(brainstate.nn.Module):
    def __init__(self, units):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(2, units)
        self.readout = braintrace.nn.Linear(units, 1)

    def update(self, x):
        return self.readout(self.cell(x))


def recall(key, steps, batch):
    """A sign at the first step beside noise (steps, batch, 2), and that sign at all steps."""
    sign = jax.random.rademacher(key, (batch,), float)
    noise = jax.random.normal(jax.random.fold_in(key, 1), (steps, batch))
    shown = jnp.zeros((steps, batch)).at[0].set(sign)
    return jnp.stack([shown, noise], -1), jnp.broadcast_to(sign[:, None], (steps, batch, 1))


def train(rule, units, batch, steps, updates):
    """Errors of all sequences, from the same weights on the same data for every rule."""
    with brainstate.random.seed_context(0):
        learner = braintrace.compile(Network(units), rule, jnp.zeros((batch, 2)), batch_size=batch)
    optimizer = optax.adam(5e-3)
    learner.init_optimizer(optimizer)

    def sequence(key):
        learner.reset()
        loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        errors = learner.etrace_train(
            *recall(key, steps, batch),
            step_fn=loss,
            optimizer=optimizer,
            update_every=steps,
            mask=jnp.arange(steps) >= steps - 2,  # asked for in the last two
        )
        return errors[-2:].mean()

    keys = jax.random.split(jax.random.key(0), updates)
    return brainstate.transform.jit(lambda: brainstate.transform.for_loop(sequence, keys))()


def main(small):
    sizes = (4, 2, 6, 5) if small else (32, 32, 17, 400)
    last = {}
    for name in ["one bit", "leaky"] if small else RULES:
        errors = train(RULES[name], *sizes)
        last[name] = float(errors[-5:].mean())
        told = "  ".join(f"{e:.3f}" for e in errors[:: max(1, sizes[-1] // 5)])
        print(f"{name:9} {told}  ->  {last[name]:.3f}")
    assert small or (last["one bit"] < 0.1 and last["no trace"] > 0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
