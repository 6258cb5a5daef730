"""The network of the demo, and its gradient over a sequence: online, and by BPTT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import nn
from ..learner import compile
from ._task import Recall

Array = jax.Array
Grads = dict[Any, Any]
Gradient = Callable[[Array, Array], tuple[Grads, Array]]


class Network(brainstate.nn.Module):
    """A GRU and a linear read-out."""

    def __init__(self, channels: int, units: int, symbols: int):
        super().__init__()
        self.cell = nn.GRUCell(channels, units)
        gate = self.cell.Wz.weight
        # Small update gates: units start with a memory of about 20 steps.
        gate.value = {**gate.value, "bias": jnp.full_like(gate.value["bias"], -3)}
        self.readout = nn.Linear(units, symbols)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the scores of the symbols."""
        return self.readout(self.cell(x))

    @property
    def weights(self) -> Any:
        """The parameters by path."""
        return self.states(brainstate.ParamState)


def online(network: Network, task: Recall, size: int) -> Gradient:
    """`(xs, labels) -> (gradients, loss)`, forward in time."""
    learner = compile(network, "d_rtrl", jnp.zeros((size, task.channels)), batch_size=size)

    def gradient(xs: Array, labels: Array) -> tuple[Grads, Array]:
        learner.reset()
        grads, loss = learner.etrace_grad(
            xs,
            block_size=10,  # a divisor of the lengths: a shorter rest is a program of its own
            step_fn=lambda x: cross_entropy(learner(x), labels),
            mask=task.mask(len(xs)),
            loss_output="scalar",
            return_value=True,
        )
        return dict(grads), loss

    return gradient


def bptt(network: Network, task: Recall, size: int) -> Gradient:
    """`(xs, labels) -> (gradients, loss)`, by reverse mode through the whole sequence."""
    brainstate.nn.init_all_states(network, batch_size=size)

    def gradient(xs: Array, labels: Array) -> tuple[Grads, Array]:
        def loss():
            mask = task.mask(len(xs))
            losses = jax.vmap(cross_entropy, (0, None))(scores(network, xs), labels)
            return (losses * mask).sum() / mask.sum()

        reverse: Any = brainstate.transform.grad(loss, network.weights, return_value=True)
        grads, value = reverse()
        return dict(grads), value

    return gradient


def scores(network: Network, xs: Array) -> Array:
    """The read-out at every step, from the initial state."""
    brainstate.nn.reset_all_states(network, batch_size=xs.shape[1])
    return brainstate.transform.for_loop(network, xs)


def cross_entropy(scores: Array, labels: Array) -> Array:
    """Mean over the batch, in nats."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1).mean()


def agreement(grads: Grads, reference: Grads) -> tuple[float, float]:
    """Cosine between two gradients, and relative error of the first."""
    a, b = (
        jnp.concatenate([leaf.ravel() for path in reference for leaf in jax.tree.leaves(g[path])])
        for g in (grads, reference)
    )
    norm = jnp.linalg.norm
    return float(a @ b / (norm(a) * norm(b))), float(norm(a - b) / norm(b))
