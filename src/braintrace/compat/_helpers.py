"""Small states and matrices for rules of one's own."""

from __future__ import annotations

import numbers
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import type_error, value_error
from ..program import PyTree
from ..rules import check_fraction, key_of

Array = jax.Array


class _Filter(brainstate.ShortTermState):
    def reset_state(self, batch_size: int | None = None, **kwargs: PyTree) -> None:
        """Zero the filter; with `batch_size`, for another number of samples."""

        def zero(a: PyTree) -> Array:
            shape = jnp.shape(a)
            lead = shape if batch_size is None else (batch_size, *shape[1:])
            return jnp.zeros(lead, jnp.result_type(a))

        self.value: Any = jax.tree.map(zero, self.value)


class KappaFilter(_Filter):
    """A low-pass filter that keeps the scale of its input: `f <- (1 - kappa) x + kappa f`.

    Args:
        init_value: the initial value, an array or a tree of arrays.
        kappa: decay in [0, 1).

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> f = braintrace.KappaFilter(jnp.zeros(2), 0.5)
        >>> f.update(jnp.ones(2)).tolist()
        [0.5, 0.5]
    """

    def __init__(self, init_value: PyTree, kappa: float):
        super().__init__(init_value)
        self.kappa = check_fraction("kappa", kappa)

    def update(self, x: PyTree) -> PyTree:
        """Take in `x`; returns the filtered value."""
        k = self.kappa
        self.value = jax.tree.map(lambda f, x: (1 - k) * x + k * f, self.value, x)
        return self.value


class PresynapticTrace(_Filter):
    """A leaky sum: `a <- leak a + x`.

    Args:
        init_value: the initial value, an array or a tree of arrays.
        leak: decay in (0, 1).
    """

    def __init__(self, init_value: PyTree, leak: float):
        super().__init__(init_value)
        self.leak = check_fraction("leak", leak, zero=False)

    def update(self, x: PyTree) -> PyTree:
        """Take in `x`; returns the trace."""
        self.value = jax.tree.map(lambda a, x: self.leak * a + x, self.value, x)
        return self.value


class FixedRandomFeedback:
    """A random matrix that is never trained: `project(y)` is `y @ B`.

    Args:
        n_target: width of what is projected.
        n_layer: width of what it is projected to.
        key: seed or key.
        init_scale: standard deviation of the entries.
    """

    def __init__(self, n_target: int, n_layer: int, key: Any, init_scale: float = 0.1):
        entries = jax.random.normal(key_of("key", key), (n_target, n_layer))
        self.B = jax.lax.stop_gradient(init_scale * entries)

    def project(self, y: PyTree) -> Array:
        """`y @ B`, (..., n_target) to (..., n_layer)."""
        return y @ jax.lax.stop_gradient(self.B)


class GradExpon(brainstate.nn.Module):
    """Accumulate gradients with exponential forgetting: `acc <- decay * acc + grad`.

    Args:
        grad_shape: pytree of arrays like the gradients.
        tau_or_decay: a time constant with unit (decay `exp(-dt / tau)`), or a decay in (0, 1).
    """

    def __init__(self, grad_shape: PyTree, tau_or_decay: Any):
        super().__init__()
        self.decay = _decay(tau_or_decay)
        self.gradients = brainstate.LongTermState(jax.tree.map(jnp.zeros_like, grad_shape))

    def update(self, grads: PyTree) -> PyTree:
        """Add new gradients and return the accumulated ones."""
        new = jax.tree.map(lambda a, g: self.decay * a + g, self.gradients.value, grads)
        self.gradients.value = new
        return new


def _decay(value: PyTree) -> float:
    if isinstance(value, u.Quantity):
        ratio = brainstate.environ.get_dt() / value
        return float(jnp.exp(-u.Quantity(ratio).to_decimal(u.UNITLESS)))
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(
            f"tau_or_decay has type {type(value).__name__}.",
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
