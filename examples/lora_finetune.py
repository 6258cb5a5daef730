"""Fine-tuning online: a frozen recurrent network learns a new task through matrices of low rank.

A GRU has learned to say which pulse came last on its first input. Then its weights are frozen, and
low-rank factors beside its three matrices learn the same for the second input, which the network
has learned to ignore. You see the error of the new task start above that of a constant answer (1)
and fall below 0.1, although only a twelfth as many numbers are trained.
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace

GATES = "Wz", "Wr", "Wh"


class Adapter(brainstate.nn.Module):
    """A layer that is no longer trained, plus the product of two factors that are."""

    def __init__(self, layer, rank):
        super().__init__()
        self.frozen = layer.weight.value  # plain arrays: no parameters
        n_in, n_out = self.frozen["weight"].shape
        b = brainstate.random.normal(size=(n_in, rank)) / n_in**0.5
        self.factors = brainstate.ParamState({"B": b, "A": jnp.zeros((rank, n_out))})

    def update(self, x):
        base = braintrace.matmul(x, self.frozen["weight"], self.frozen["bias"])
        return base + braintrace.lora_matmul(x, **self.factors.value)


class Network(brainstate.nn.Module):
    def __init__(self, units):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(2, units)
        self.readout = braintrace.nn.Linear(units, 1)

    def update(self, x):
        return self.readout(self.cell(x))

    def adapt(self, rank):
        """Freeze the cell, with factors of this rank beside its matrices."""
        for gate in GATES:
            setattr(self.cell, gate, Adapter(getattr(self.cell, gate), rank))


def flip_flops(key, steps, batch, which):
    """Pulses on two inputs (steps, batch, 2), and the sign of the last one on input `which`."""
    pulses = jax.random.choice(key, jnp.array([-1.0, 1.0] + 18 * [0.0]), (steps, batch, 2))
    last = lambda old, new: jnp.where(new == 0, old, new)
    return pulses, jax.lax.associative_scan(last, pulses)[..., which : which + 1]


def train(network, which, batch, steps, updates, choose=dict):
    """Train online on one of the tasks; returns the first and the last error."""
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros((batch, 2)), batch_size=batch)
    weights = choose(learner.param_states)
    optimizer = optax.adam(5e-3)
    learner.init_optimizer(optimizer, weights)

    @brainstate.transform.jit
    def sequence(key):
        learner.reset()
        loss = lambda x, y: jnp.mean((learner(x) - y) ** 2)
        return learner.etrace_train(
            *flip_flops(key, steps, batch, which),
            step_fn=loss,
            optimizer=optimizer,
            update_every=10,
            weights=weights,
        ).mean()

    count = sum(a.size for s in weights.values() for a in jax.tree.leaves(s.value))
    print(f"input {which}: {count} numbers are trained")
    errors = []
    for i, key in enumerate(jax.random.split(jax.random.key(which), updates)):
        errors.append(float(sequence(key)))
        if i % max(1, updates // 5) == 0 or i == updates - 1:
            print(f"  sequence {i:4d}: error {errors[-1]:.3f}")
    return errors[0], errors[-1]


def main(small):
    units, rank, sizes = (8, 1, (2, 20, 5)) if small else (48, 2, (32, 60, 100))
    brainstate.random.seed(0)
    network = Network(units)
    train(network, 0, *sizes)
    network.adapt(rank)
    factors = lambda states: {p: s for p, s in states.items() if p[-1] == "factors"}
    first, last = train(network, 1, *sizes, factors)
    assert small or last < 0.1 < first


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    main(**vars(parser.parse_args()))
