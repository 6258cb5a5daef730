"""Gradients of a case (step, params, state, inputs of all steps): by a rule, BPTT, definition."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import braintrace as bt
from interpret import interpreted
from oracle import reference_grad
from recognised import of_online


def loss(out):
    return jnp.sum((out - 0.3) ** 2)


def learner(case, rule, **options):
    step, params, state, xs = case
    net = bt.online(step, rule, **options)
    return net, net.init(params, state, jax.tree.map(lambda a: a[0], xs))


def gradient(case, rule, block_size=3, **extra):
    net, carry = learner(case, rule)
    _, params, _, xs = case
    run = lambda: net.grad(loss, block_size=block_size)(params, carry, xs, **extra)[0]
    return jax.tree.leaves(interpreted(run, lower=False)), net


def bptt(case):
    step, params, state, xs = case

    def total(params):
        def body(state, x):
            state, out = step(params, state, x)
            return state, loss(out)

        return lax.scan(body, state, xs)[1].sum()

    return jax.tree.leaves(interpreted(lambda: eqx.filter_grad(total)(params), lower=False))


def definition(case, net):
    """D-RTRL of the operators that were recognised, with dense matrices."""
    _, params, state, xs = case
    step = lambda model, *x: loss(model(*x)[0])
    model = of_online(net, params, state)
    found = reference_grad("d_rtrl", model, step, *jax.tree.leaves(xs))
    return [found["w", i] for i in range(len(model.w))]


def close(got, want, tolerance=1e-9):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def differ(a, b):
    return np.abs(a - b).max() > 1e-9 * np.abs(b).max()
