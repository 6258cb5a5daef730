"""Outputs of functions with their own derivative, tied to all they read.

Under `vmap` JAX adds up the cotangent of an output that is the same for all samples, before the
function's own derivative sees it. So an output must be mapped whenever anything the derivative
reads is: it gets a dependence, on no value, on all of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def depending_on(value: Any, *others: Any) -> Any:
    """`value`, formally depending on every array in `others`."""
    flags = [_flag(leaf) for leaf in jax.tree.leaves(others) if jnp.size(leaf)]
    if not flags:
        return value
    flag = jax.lax.stop_gradient(sum(flags[1:], flags[0]) > 0)
    return jax.tree.map(lambda v: jnp.where(flag, v, v), value)


def _flag(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return (jnp.ravel(leaf)[0] == 0).astype("int32")
