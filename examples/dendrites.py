"""Neurons with dendrites: a cable of compartments each, which hears in which direction inputs come.

Inputs spike one after another, towards the soma or away from it. On a dendrite the first reaches
the soma late, so both come together, or one by one (Rall, 1964). All synapses are trained, on all
compartments, and nothing but the cable tells where. D-RTRL by default leaves out what goes from
compartment to compartment; with `couple_axis` its gradient is that of BPTT. You see the distance
from BPTT and the right answers after training, of both.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

from braintrace import nn, online, rules

INPUTS, NEURONS, COMPARTMENTS, APART, STEPS, ANSWER = 6, 10, 6, 4, 50, 20
RULES = {"cable followed": rules.d_rtrl(couple_axis=-1), "cable left out": rules.d_rtrl()}
spike = nn.surrogate("arctan")


def cable(leak=0.9, axial=0.25):
    """What a step leaves of each compartment: sealed ends, the soma is the first."""
    near = jnp.eye(COMPARTMENTS, k=1) + jnp.eye(COMPARTMENTS, k=-1)
    return leak * (jnp.eye(COMPARTMENTS) + axial * (near - jnp.diag(near.sum(0))))


def step(params, state, x):
    """One sample: voltages (neurons, compartments), filtered spikes of the somata, a read-out."""
    v, r = state
    v = v.at[:, 0].add(-spike(v[:, 0] - 1))  # the reset of the soma
    v = v @ cable() + (x @ params["w"]).reshape(NEURONS, COMPARTMENTS)
    r = 0.95 * r + spike(v[:, 0] - 1)
    return (v, r), r @ params["w_out"]


def trials(key, batch):
    """Input spikes (steps, batch, inputs) with a jitter, and whether they come towards the soma."""
    towards = jax.random.bernoulli(key, 0.5, (batch,)).astype(int)
    order = jnp.where(towards[:, None], jnp.arange(INPUTS)[::-1], jnp.arange(INPUTS))
    jitter = jax.random.randint(jax.random.fold_in(key, 1), order.shape, 0, 3)
    spikes = jnp.arange(STEPS)[:, None, None] == APART * order + jitter
    return spikes.astype(float), towards


def loss(scores, towards, t):
    return (t >= STEPS - ANSWER) * cross_entropy(scores, towards).mean()


def main(updates, small):
    batch, updates = (4, 2) if small else (32, updates)
    net = jax.vmap(step, (None, 0, 0))
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": 0.3 + 0.3 * jax.random.normal(keys[0], (INPUTS, NEURONS * COMPARTMENTS)),
        "w_out": 0.3 * jax.random.normal(keys[1], (NEURONS, 2)),
    }
    rest = jnp.zeros((batch, NEURONS, COMPARTMENTS)), jnp.zeros((batch, NEURONS))
    labels = lambda towards: jnp.broadcast_to(towards, (STEPS, batch))
    times, optimizer = jnp.arange(STEPS), optax.adam(0.01)
    xs, towards = trials(keys[2], batch)

    def run(params, xs):
        return jax.lax.scan(lambda s, x: net(params, s, x), rest, xs)[1]

    bptt = jax.grad(lambda p: jax.vmap(loss)(run(p, xs), labels(towards), times).sum())
    exact = jax.jit(bptt)(params)["w"]
    for name, rule in list(RULES.items())[: 1 if small else 2]:
        learner = online(net, rule)
        start = learner.init(params, rest, xs[0])
        grad = learner.grad(loss)
        gradient = jax.jit(lambda p, xs, y, f=grad, s=start: f(p, s, xs, labels(y), times)[0])
        got, norm = gradient(params, xs, towards)["w"], jnp.linalg.norm
        cosine = (got * exact).sum() / norm(got) / norm(exact)
        new, moments = params, optimizer.init(params)
        for key in jax.random.split(jax.random.key(1), updates):
            change, moments = optimizer.update(gradient(new, *trials(key, batch)), moments)
            new = optax.apply_updates(new, change)
        right = 0.0
        for key in jax.random.split(jax.random.key(2), 10):
            seen, told = trials(key, batch)
            right += float((run(new, seen)[-ANSWER:].mean(0).argmax(-1) == told).mean()) / 10
        error = norm(got - exact) / norm(exact)
        print(f"{name}: cosine to BPTT {cosine:.4f}, error {error:.1e}, {right:.1%} right")
        assert small or name != "cable followed" or (right > 0.9 and error < 1e-4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    parser.add_argument("--updates", type=int, default=150)
    main(**vars(parser.parse_args()))
