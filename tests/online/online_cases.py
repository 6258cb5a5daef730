"""A small recurrent step in plain JAX, its sequence, and its gradient by BPTT."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import braintrace

T, BATCH, N_IN, N, N_OUT = 7, 2, 3, 4, 2


class Case(NamedTuple):
    """A step function with everything needed to run it."""

    step: Any
    params: Any
    state: Any
    xs: Any
    ys: Any

    def loss(self, out, y):
        return 0.5 * jnp.sum((out - y) ** 2)

    def bptt(self, mask=None):
        weights = jnp.ones(T) if mask is None else mask

        def total(params):
            def body(state, slices):
                state, out = self.step(params, state, slices[0])
                return state, slices[2] * self.loss(out, slices[1])

            return jax.lax.scan(body, self.state, (self.xs, self.ys, weights))[1].sum()

        return jax.grad(total)(self.params)


def recurrent(params, state, x):
    """A tanh layer with recurrent weights, a leaky filter on top, a plain read-out."""
    joined = jnp.concatenate([x, state["h"]], -1)
    h = jnp.tanh(0.5 * state["h"] + braintrace.matmul(joined, params["cell"]["w"], params["b"]))
    v = 0.8 * state["v"] + braintrace.matmul(h, params["up"])
    return {"h": h, "v": v}, v @ params["out"]


def leaky(params, state, x):
    """Only what D-RTRL follows exactly."""
    v = 0.8 * state["v"] + jnp.tanh(braintrace.matmul(x, params["w"], params["b"]))
    return {"v": v}, v @ params["out"]


def drawn(seed, *shape):
    return jnp.asarray(0.6 * np.random.default_rng(seed).normal(size=shape))


SEQUENCE = (drawn(8, T, BATCH, N_IN), drawn(9, T, BATCH, N_OUT))


def recurrent_case() -> Case:
    params = {
        "cell": {"w": drawn(0, N_IN + N, N)},
        "b": drawn(1, N),
        "up": drawn(2, N, N),
        "out": drawn(3, N, N_OUT),
    }
    state = {"h": drawn(4, BATCH, N), "v": drawn(5, BATCH, N)}
    return Case(recurrent, params, state, *SEQUENCE)


def leaky_case() -> Case:
    params = {"w": drawn(0, N_IN, N), "b": drawn(1, N), "out": drawn(3, N, N_OUT)}
    return Case(leaky, params, {"v": drawn(5, BATCH, N)}, *SEQUENCE)


def error(found, truth) -> float:
    """The largest difference, relative to the largest entry."""
    flat = lambda tree: np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
    a, b = flat(found), flat(truth)
    return float(np.abs(a - b).max() / np.abs(b).max())
