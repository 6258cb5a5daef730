"""From gradients of operands to gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..graph import Graph


def operands_pulled(graph: Graph, consts: Sequence[Any], params: Sequence[Any]) -> tuple[Any, Any]:
    """The operands of every relation, and a function from their gradients to the parameters'."""

    def traced(p):
        weights = graph.operands(consts, p)
        pairs = zip(graph.relations, weights, strict=True)
        return [{k: w[k] for k in r.keys} for r, w in pairs], weights

    _, pull, weights = jax.vjp(traced, params, has_aux=True)
    return weights, lambda grads: pull(grads)[0]
