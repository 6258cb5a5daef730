"""The gradient of a learner is a value: to differentiate it again is refused.

Traces say how the states changed with the weights, not how that changes with weights and inputs: a
second derivative would silently lack these terms.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._errors import NotSupportedError, message
from .._jaxpr import is_inexact

_SECOND = message(
    "the gradient of a learner is differentiated once more.",
    why="it is made of traces, which are constants: how they change with the weights and the "
    "inputs is not known, and a second derivative would lack that part",
    do="differentiate a loop over the model itself, without the learner; or keep the gradient "
    "constant with jax.lax.stop_gradient",
)


def floating_of(*trees: Any) -> list[Any]:
    """All arrays that can carry a derivative."""
    return [a for a in jax.tree.leaves(trees) if is_inexact(jnp.result_type(a))]


@jax.custom_jvp
def once(cotangents: Any, live: list[Any]) -> Any:
    """`cotangents` of a reverse pass; to differentiate them by `live`, its inputs, is an error."""
    return cotangents


def _pushed(primals: Any, tangents: Any) -> Any:
    moved, live = tangents
    if any(not isinstance(t, SymbolicZero) for t in live):
        raise NotSupportedError(_SECOND)
    zero = lambda a, t: jnp.zeros_like(a) if isinstance(t, SymbolicZero) else t
    return primals[0], jax.tree.map(zero, primals[0], moved)


once.defjvp(_pushed, symbolic_zeros=True)
