"""Entry states whose cotangent becomes a gradient of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import Graph
from ._depending import depending_on
from ._once import floating_of, once


def remembering(
    params: Sequence[Any], hidden: Sequence[Any], saved: Any, credit: Callable[..., Any]
) -> tuple[Any, ...]:
    """The entry states; what reaches them becomes `credit(params, saved, cotangents)`."""

    @jax.custom_vjp
    def remember(params, hidden, saved):
        return depending_on(hidden, params, saved)

    def forward(params, hidden, saved):
        return depending_on(hidden, params, saved), (params, hidden, saved)

    def backward(kept, cotangents):
        params, hidden, saved = kept
        cotangents = once(cotangents, floating_of(params, hidden))
        return credit(params, saved, cotangents), tuple(map(jnp.zeros_like, hidden)), None

    remember.defvjp(forward, backward)
    return remember(tuple(params), tuple(hidden), saved)


def operands_pulled(graph: Graph, consts: Sequence[Any], params: Sequence[Any]) -> tuple[Any, Any]:
    """The operands of every relation, and the way from their gradients to the parameters'."""

    def traced(p):
        found = graph.operands(consts, p)
        pairs = zip(graph.relations, found, strict=True)
        return [{k: w[k] for k in r.keys} for r, w in pairs], found

    _, pull, weights = jax.vjp(traced, params, has_aux=True)
    return weights, lambda grads: pull(grads)[0]
