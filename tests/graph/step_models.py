"""Small steps for the analyses, and the graph found for them."""

from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

import braintrace


def normal(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


class Model(brainstate.nn.Module):
    """`update(model, x)` on parameters and hidden states given by name."""

    def __init__(self, update: Callable, params: dict, hidden: dict):
        super().__init__()
        self.rule = update
        for name, value in params.items():
            setattr(self, name, brainstate.ParamState(value))
        for name, value in hidden.items():
            setattr(self, name, brainstate.HiddenState(value))

    def update(self, x: Any) -> Any:
        return self.rule(self, x)


def compiled(update: Callable, params: dict, hidden: dict, x: Any) -> braintrace.ETraceGraph:
    return braintrace.compile_etrace_graph(Model(update, params, hidden), x)


def driven(tail: Callable, n: int = 6) -> braintrace.ETraceGraph:
    """The graph of h <- tail(y), y = matmul(x, w) with n elements."""
    shape = np.shape(tail(jnp.zeros(n)))

    def update(m, x):
        m.h.value = tail(braintrace.matmul(x, m.w.value))

    return compiled(update, {"w": normal(0, 2, n)}, {"h": jnp.zeros(shape)}, jnp.zeros(2))


def carried(move: Callable, shape: tuple[int, ...] = (6,)) -> braintrace.ETraceGraph:
    """The graph of h <- move(h) + y, so that `move` is the transition."""

    def update(m, x):
        y = braintrace.matmul(x, m.w.value).reshape(shape)
        m.h.value = move(m.h.value) + y

    size = int(np.prod(shape))
    return compiled(update, {"w": normal(0, 2, size)}, {"h": jnp.zeros(shape)}, jnp.zeros(2))


def claimed(graph: braintrace.ETraceGraph, source: int, exit: int = 0) -> np.ndarray:
    """Boolean (exit elements, source elements): what the influence map says."""
    found = graph.analysis.influence
    low, high = found.offsets[source], found.offsets[source + 1]
    rows = found.rows[exit]
    out = np.zeros((len(rows), high - low), bool)
    element, slot = np.nonzero((rows >= low) & (rows < high))
    out[element, rows[element, slot] - low] = True
    return out
