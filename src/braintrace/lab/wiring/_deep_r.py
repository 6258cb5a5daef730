"""DEEP R: a fixed number of connections that move to where they are of use (Bellec et al., 2018).

Every possible connection has a fixed sign s and, while it is active, a strength θ > 0 with
w = s θ. One update, with g the update of an optimizer:

    θ <- θ + s g - η α + √(2 η T) ν        ν normal, active connections only
    active where θ > 0                      others become dormant, w = 0
    as many dormant ones, drawn at random, become active with θ = 0 as have become dormant
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._errors import value_error
from ._constraints import _check, _transformation

Tree = Any


class RewiringState(NamedTuple):
    """Per weight whether it is active and its sign; the random key, and the optimizer's state."""

    active: Tree
    signs: Tree
    key: Any
    inner: Any


def deep_r(
    optimizer: Any,
    connections: int | float,
    *,
    l1: float = 0.0,
    temperature: float = 0.0,
    learning_rate: float = 1.0,
    signs: Tree = None,
    seed: int = 0,
) -> Any:
    """Rewire weights while an optimizer trains them; how many are connected never changes.

    Initialise with the weights; `braintrace.wiring.deep_r(...).init(w)` draws which of them are
    active, and those that are not must be zero: start from `params * state.active`. For some of the
    parameters, use `optax.multi_transform`.

    Args:
        optimizer: an optax transformation.
        connections: of every array, how many weights are active, or the fraction of them below 1.
        l1: α, by which every strength falls in an update, times η.
        temperature: T of the noise.
        learning_rate: η of these two; the optimizer has its own.
        signs: a tree like the parameters, of 1 and -1, for Dale's law; None draws them.
        seed: of signs, first connections, noise and new connections.

    Raises:
        ValueError: an array does not have so many weights.
    """

    def init(params: Tree) -> RewiringState:
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(seed), 2 * len(leaves) + 1)
        given = [None] * len(leaves) if signs is None else jax.tree.leaves(signs)
        active, own = [], []
        for i, (w, sign) in enumerate(zip(leaves, given, strict=True)):
            n = _count(connections, w)
            active.append(_drawn(keys[2 * i], jnp.ones(w.shape, bool), n))
            drawn = jax.random.rademacher(keys[2 * i + 1], w.shape, w.dtype)
            own.append(drawn if sign is None else jnp.sign(jnp.broadcast_to(sign, w.shape)))
        put = lambda arrays: jax.tree.unflatten(tree, arrays)
        return RewiringState(put(active), put(own), keys[-1], optimizer.init(params))

    def update(grads: Tree, state: RewiringState, params: Tree = None, **extra: Any):
        _check(params, "deep_r")
        masked = jax.tree.map(lambda g, on: jnp.where(on, g, 0), grads, state.active)
        updates, inner = optimizer.update(masked, state.inner, params, **extra)
        leaves, tree = jax.tree.flatten(params)
        key, *keys = jax.random.split(state.key, 2 * len(leaves) + 1)
        steps, active = [], []
        others = map(jax.tree.leaves, (updates, state.active, state.signs))
        each = zip(leaves, *others, strict=True)
        for i, (w, u, on, sign) in enumerate(each):
            noise = math.sqrt(2 * learning_rate * temperature)
            strength = sign * (w + u) - learning_rate * l1
            strength = strength + noise * jax.random.normal(keys[2 * i], w.shape, w.dtype)
            stays = on & (strength > 0)
            new = _drawn(keys[2 * i + 1], ~stays, on.sum() - stays.sum())
            active.append(stays | new)
            steps.append((jnp.where(stays, sign * strength, 0) - w).astype(u.dtype))
        put = lambda arrays: jax.tree.unflatten(tree, arrays)
        return put(steps), RewiringState(put(active), state.signs, key, inner)

    return _transformation(init, update)


def _count(connections: int | float, w: Any) -> int:
    """How many weights of an array are active."""
    n = round(connections * w.size) if isinstance(connections, float) else connections
    if not 0 < n <= w.size:
        raise value_error(
            f"{connections} connections of an array of {w.size} weights.",
            why="it is how many of them are active, or the fraction of them below 1",
            do="pass a number of at least one, and at most all of them",
        )
    return n


def _drawn(key: Any, free: Any, n: Any) -> Any:
    """Which of the free places are drawn, n of them."""
    scores = jnp.where(free, jax.random.uniform(key, free.shape), -1.0).ravel()
    rank = jnp.argsort(jnp.argsort(-scores))
    return (rank < n).reshape(free.shape) & free
