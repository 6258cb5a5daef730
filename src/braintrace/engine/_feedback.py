"""Random feedback: other operands in the reverse pass through an operator than forward."""

from __future__ import annotations

import math

import jax

from .._jaxpr import Var
from ..graph import Graph, bits_of, reach
from ..ops import ETPPrimitive
from ._evaluate import Backs
from ._rule import Feedback


def back_operands(graph: Graph, feedback: Feedback | None) -> Backs | None:
    """Random operands for the operators that states pass on their way to the loss only."""
    if feedback is None:
        return None
    step = graph.step
    states = [v for leaf in step.hidden for v in (step.entry(leaf), step.exit(leaf))]
    carries = reach(step.program, {v: 1 for v in states if isinstance(v, Var)})
    out = {}
    for i, site in enumerate(graph.sites):
        eqn = site.equation
        if not isinstance(eqn.primitive, ETPPrimitive) or eqn in graph.links.cut_entries:
            continue
        if site.x is None or not bits_of(site.x, carries):
            continue
        operands = {}
        for k, at in enumerate(site.operator.positions.values()):
            shape, dtype = site.operator.operands[at].shape, site.operator.operands[at].dtype
            key = jax.random.fold_in(jax.random.fold_in(feedback.key, i), k)
            fan = max(1, math.prod(shape) // shape[0]) if shape else 1
            operands[at] = feedback.scale / math.sqrt(fan) * jax.random.normal(key, shape, dtype)
        out[eqn] = operands
    return out
