"""Other Jacobians than the step's own, and traces that are filtered once more.

A filtered trace, e_t = kappa e_{t-1} + eps_t, lies in slots of its own beside the first:

    (eps_t, e_t) = ((D, 0), (D, kappa)) (eps_{t-1}, e_{t-1}) + (f, f) (x) x
"""

from __future__ import annotations

import jax.numpy as jnp

from ..engine import Signals, Steps
from ..graph import HiddenParamOpRelation as Relation
from ._relation_rule import Kept


def leak(decay: float) -> Kept:
    """Every slot keeps the same part of itself."""

    def kept(r: Relation, steps: Steps) -> Steps:
        one = decay * jnp.eye(steps.D.shape[-1], dtype=steps.D.dtype)
        return steps._replace(D=one.reshape((1,) * (steps.D.ndim - 2) + one.shape))

    return kept


def filtered(kept: Kept | None, kappa: float) -> Kept:
    """`kept`, and the slots of the filtered trace."""

    def both(r: Relation, steps: Steps) -> Steps:
        steps = steps if kept is None else kept(r, steps)
        D, f = steps.D, steps.f
        # One slot, D = 0.5, kappa = 0.8: slots (eps, e) with [[0.5, 0], [0.5, 0.8]], as the new
        # eps, 0.5 eps + f x, is what e filters. After one deposit of 1 both are 1, then (0.5, 1.3).
        stay = jnp.broadcast_to(kappa * jnp.eye(D.shape[-1], dtype=D.dtype), D.shape)
        upper = jnp.concatenate([D, jnp.zeros_like(D)], -1)
        lower = jnp.concatenate([D, stay], -1)
        wide = jnp.concatenate([upper, lower], -2)
        slots = None if steps.slots is None else 2 * steps.slots
        return steps._replace(D=wide, f=jnp.concatenate([f, f], -1), slots=slots)

    return both


def at_filtered(signals: Signals, kappa: float) -> Signals:
    """Signals at the slots of both traces.

    A step's own gradient meets the first trace; the filtered one, before the step, meets the
    cotangent of the new states. Whatever else there is meets the filtered trace.
    """
    lam, none = signals.lam, jnp.zeros_like(signals.lam)
    if signals.exits is not None:
        exits = jnp.concatenate([jnp.zeros_like(signals.exits), signals.exits], -1)
        return signals._replace(lam=jnp.concatenate([lam, none], -1), exits=exits)
    if signals.every is not None:
        return signals._replace(lam=jnp.concatenate([none, lam], -1))
    assert signals.new is not None
    return signals._replace(lam=jnp.concatenate([lam, kappa * signals.new], -1))
