"""Spike trains of populations that are active or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

ACTIVE, BACKGROUND = 0.4, 0.02  # probability of a spike per step


def poisson(key: Array, active: Array, channels: int) -> Array:
    """Independent spikes, (T, B, populations * channels), from activity (T, B, populations)."""
    rates = BACKGROUND + (ACTIVE - BACKGROUND) * jnp.repeat(active, channels, axis=-1)
    return jax.random.bernoulli(key, rates).astype(active.dtype)
