"""A function for many steps at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def map_steps(count: int, function: Callable, *arrays: Any, mapped: bool = True) -> Any:
    """A function of slices along the first axis, for all of them side by side.

    Without `jit` they are evaluated one after another, so that each can be looked at; in a scan
    if they cannot be `mapped`.
    """
    if count == 1:
        out = function(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: jnp.expand_dims(a, 0), out)
    config: Any = jax.config
    if config.jax_disable_jit:
        found = [function(*jax.tree.map(lambda a: a[i], arrays)) for i in range(count)]  # noqa: B023
        return jax.tree.map(lambda *a: jnp.stack(a), *found)
    if not mapped:
        return jax.lax.map(lambda slices: function(*slices), arrays)
    return jax.vmap(function, axis_size=count)(*arrays)
