"""How much working memory the compiled gradient of a sequence takes."""

from __future__ import annotations

import math

import brainstate
import jax
import jax.numpy as jnp

from ._gradients import Gradient
from ._task import Recall


def working_bytes(gradient: Gradient, task: Recall, length: int, size: int) -> float:
    """XLA's temporary buffers for a sequence of this length; nothing is run.

    Weights and sequence are arguments and gradients are results, so neither is counted. States
    and traces are not returned, so they are.
    """
    xs, labels = jnp.zeros((length, size, task.channels)), jnp.zeros(size, int)
    stateful = brainstate.transform.StatefulFunction(gradient)
    states = stateful.get_state_trace(xs, labels).get_state_values()
    pure = jax.jit(lambda states, xs, labels: stateful.jaxpr_call(states, xs, labels)[1])
    found = pure.lower(states, xs, labels).compile().memory_analysis()
    return math.nan if found is None else found.temp_size_in_bytes  # not every backend tells
