"""A function of one step for all steps of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._values import Block, Values


def map_steps(count: int, function: Callable, *arrays: Any, mapped: bool = True) -> Any:
    """A function of slices along the first axis, for all of them at once.

    Without `jit` they are evaluated one after another, so that each can be looked at; in a scan
    if they cannot be `mapped`.
    """
    if count == 1:
        out = function(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: jnp.expand_dims(a, 0), out)
    config: Any = jax.config
    if config.jax_disable_jit:
        out = [function(*jax.tree.map(lambda a: a[i], arrays)) for i in range(count)]  # noqa: B023
        return jax.tree.map(lambda *a: jnp.stack(a), *out)
    if not mapped:
        return jax.lax.map(lambda slices: function(*slices), arrays)
    return jax.vmap(function, axis_size=count)(*arrays)


def scan_steps(block: Block, push: Callable[[Values, Any], Any], carry: Any) -> Any:
    """`push(values, carry)` at every step of a block, one after another."""
    axes, path = block.axes, block.path

    def step(carry, sliced):
        return push(axes.at(path, *sliced), carry), None

    sliced = (axes.slices(path), path.hidden, path.others)
    if axes.length == 1:
        return step(carry, jax.tree.map(lambda a: a[0], sliced))[0]
    return jax.lax.scan(step, carry, sliced, axes.length)[0]
