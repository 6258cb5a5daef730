"""Optax transformations for an agent that learns from one step at a time.

The gradients of a call are those g_t of the present value, or log-probability; the error that comes
with them is that of the value before, which is known only now. With z the λ-trace of the gradients,

    direction    δ_{t-1} z_{t-1}                        then z_t = γλ z_{t-1} + g_t

where z starts at zero in a new episode (`fresh`). `error` and `fresh` are arguments of `update`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


def lambda_trace(decay: float) -> Any:
    """Gradients as minus the error times their decaying sum, for an optimizer behind it to descend.

    Args:
        decay: γλ.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from braintrace.rl import lambda_trace
        >>> optimizer = optax.chain(lambda_trace(0.9), optax.sgd(0.1))
        >>> state = optimizer.init(jnp.zeros(2))
        >>> _, state = optimizer.update(jnp.ones(2), state, error=0.0, fresh=True)
        >>> optimizer.update(jnp.ones(2), state, error=2.0, fresh=False)[0]
        Array([0.2, 0.2], dtype=float32)
    """

    def update(grads: Tree, z: Tree, params: Tree = None, *, error: Any, fresh: Any, **_: Any):
        return jax.tree.map(lambda a: -error * a, z), _moved(decay, z, grads, fresh)

    return _transformation(_zeros, update)


def obgd(learning_rate: float = 1.0, decay: float = 0.792, kappa: float = 2.0) -> Any:
    """Overshooting-bounded gradient descent: a step that cannot jump over its own target.

    The update is α' δ z with α' = α / max(1, α κ max(|δ|, 1) ‖z‖₁), arXiv 2410.14606.

    Args:
        learning_rate: α.
        decay: γλ of the trace z.
        kappa: κ, how far from overshooting a step stays.
    """

    def update(grads: Tree, z: Tree, params: Tree = None, *, error: Any, fresh: Any, **_: Any):
        length = sum(jnp.abs(a).sum() for a in jax.tree.leaves(z))
        bound = learning_rate * kappa * jnp.maximum(jnp.abs(error), 1.0) * length
        rate = learning_rate / jnp.maximum(1.0, bound)
        return jax.tree.map(lambda a: rate * error * a, z), _moved(decay, z, grads, fresh)

    return _transformation(_zeros, update)


class IntentionalState(NamedTuple):
    """The trace, the squared gradients and their scale, of `intentional`."""

    z: Tree
    squares: Tree
    sigma: Any
    count: Any


def intentional(eta: float = 0.5, decay: float = 0.792, beta: float | None = 0.999) -> Any:
    """Intentional updates: a step that takes off the fraction `eta` of the error.

    arXiv 2604.19033. Without `beta` the update is η δ z / ‖z‖². With it, v the mean of the squared
    gradients (decay `beta`, bias corrected), D = √v and σ the mean of Σ g² / D (decay γλ, bias
    corrected), it is η δ (z / D) / √(σ Σ z² / D).

    Args:
        eta: η, the fraction of the error that a step is to take off.
        decay: γλ of the trace z.
        beta: decay of the squared gradients, None for the plain form.
    """

    def init(params: Tree) -> IntentionalState:
        zeros = _zeros(params)
        return IntentionalState(zeros, zeros, jnp.zeros(()), jnp.zeros(()))

    def update(
        grads: Tree,
        state: IntentionalState,
        params: Tree = None,
        *,
        error: Any,
        fresh: Any,
        **_: Any,
    ):
        z, squares, sigma, count = state
        if beta is None:
            scale = jax.tree.map(jnp.ones_like, z)
            size = _weighted(z, scale)
        else:
            seen = jnp.maximum(count, 1)
            root = lambda v: jnp.sqrt(v / (1 - beta**seen)) + 1e-8
            scale = jax.tree.map(root, squares)
            size = jnp.sqrt(sigma / (1 - decay**seen) * _weighted(z, scale))
        rate = eta * error / jnp.maximum(size, 1e-8)
        updates = jax.tree.map(lambda a, d: rate * a / d, z, scale)
        if beta is not None:
            mean = lambda v, g: beta * v + (1 - beta) * g**2
            squares, seen = jax.tree.map(mean, squares, grads), count + 1
            now = jax.tree.map(lambda v: jnp.sqrt(v / (1 - beta**seen)) + 1e-8, squares)
            sigma = sigma + (1 - decay) * (_weighted(grads, now) - sigma)
        return updates, IntentionalState(_moved(decay, z, grads, fresh), squares, sigma, count + 1)

    return _transformation(init, update)


def _transformation(init: Any, update: Any) -> Any:
    import optax  # an extra, needed where a transformation is made

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros(params: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, params)


def _moved(decay: float, z: Tree, grads: Tree, fresh: Any) -> Tree:
    return jax.tree.map(lambda a, g: jnp.where(fresh, 0, decay * a) + g, z, grads)


def _weighted(tree: Tree, scale: Tree) -> Any:
    """Σ a² / D."""
    return sum(jax.tree.leaves(jax.tree.map(lambda a, d: (a**2 / d).sum(), tree, scale)))
