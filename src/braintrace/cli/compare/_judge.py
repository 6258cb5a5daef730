"""The score of weights on held-out sequences."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from ._network import Network
from .tasks import Task


class Judge:
    """Runs a network of its own, so that scoring disturbs no training.

    Attributes:
        held_out: inputs and targets.
    """

    def __init__(self, network: Network, task: Task, tests: int):
        self.network = network
        self.held_out = jax.jit(lambda: task.test(tests))()
        size = self.held_out[0].shape[1]
        brainstate.nn.init_all_states(network, batch_size=size)

        @brainstate.transform.jit
        def score(xs, ys):
            brainstate.nn.reset_all_states(network, batch_size=size)
            outputs = brainstate.transform.for_loop(network, xs)
            return task.measure.score(outputs, ys, task.mask)

        self._score = score

    def __call__(self, weights: dict[Any, Any]) -> float:
        """The score of these weights."""
        assign(self.network, weights)
        return float(self._score(*self.held_out))


def assign(network: Network, weights: dict[Any, Any]) -> None:
    """Give a network these weights."""
    for path, state in network.weights.items():
        state.value = weights[path]
