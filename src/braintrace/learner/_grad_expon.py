"""A leaky accumulator of gradients."""

from __future__ import annotations

import numbers
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import type_error, value_error


class GradExpon(brainstate.nn.Module):
    """Accumulate gradients with exponential forgetting: `acc <- decay * acc + grad`.

    Args:
        grad_shape: pytree of arrays like the gradients.
        tau_or_decay: a time constant with unit (decay `exp(-dt / tau)`), or a decay in (0, 1).
    """

    def __init__(self, grad_shape: Any, tau_or_decay: Any):
        super().__init__()
        self.decay = _decay(tau_or_decay)
        self.gradients = brainstate.LongTermState(jax.tree.map(jnp.zeros_like, grad_shape))

    def update(self, grads: Any) -> Any:
        """Add new gradients and return the accumulated ones."""
        new = jax.tree.map(lambda a, g: self.decay * a + g, self.gradients.value, grads)
        self.gradients.value = new
        return new


def _decay(value: Any) -> float:
    if isinstance(value, u.Quantity):
        ratio = brainstate.environ.get_dt() / value
        return float(
            jnp.exp(
                -u.get_mantissa(
                    ratio.to_decimal(u.UNITLESS) if isinstance(ratio, u.Quantity) else ratio
                )
            )
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(
            f"tau_or_decay is a {type(value).__name__}.",
            why="it is a time constant or a decay",
            do="pass a quantity of time, or a float in (0, 1)",
        )
    if not 0 < float(value) < 1:
        raise value_error(
            f"tau_or_decay={value}.",
            why="a decay outside (0, 1) does not forget",
            do="pass a float in (0, 1), or a time constant with unit",
        )
    return float(value)
