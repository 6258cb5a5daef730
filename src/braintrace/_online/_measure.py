"""Seconds that a step of a gradient takes, measured on arrays of a step's shapes.

A block of a few steps is compiled and run, with small numbers in place of the arrays: a gradient
takes the same time whatever they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..engine import TimeAxes, Values, run_block
from ..graph import Graph
from ..program import PyTree, any_traced
from ..report import RuleCost
from ._blocks import nbytes

STEPS, REPEATS = 16, 5
MOST_BYTES = 1 << 30  # of traces that are allocated to be measured


def seconds_per_step(
    graph: Graph, shapes: Sequence[PyTree], consts: Sequence[Any], cost: RuleCost
) -> float | None:
    """How long a step of a gradient takes; None if a rule is too large, or has other inputs.

    Args:
        graph: the step, analysed for the rule.
        shapes: those of its traces.
        consts: values of the step's constants.
        cost: the rule.
    """
    record, program = cost.rule.record, graph.step.program
    if record.signal is not None or record.parts or nbytes(shapes) > MOST_BYTES:
        return None
    if any(map(_is_no_number, program.inputs)) or any_traced(consts):
        return None
    length = min(STEPS, cost.window or STEPS)
    step = graph.step
    n, entries = step.n_args, lambda leaves: tuple(_small(step.entry(leaf)) for leaf in leaves)
    args = tuple(_small(v, length) for v in step.program.inputs[:n])
    flags = (False,) * len(consts), (True,) * n
    axes = TimeAxes(length, *flags, None if cost.window is None else length)
    hidden, others = entries(step.hidden), entries(step.others)

    def gradient(params: Sequence[Any], args: Any, hidden: Any, others: Any, traces: Any) -> Any:
        def total(params: Sequence[Any]) -> Any:
            values = Values(tuple(consts), args, tuple(params), hidden, others)
            ran = run_block(graph, record, values, traces, axes)
            outs = [a for a in ran.outs if jnp.issubdtype(a.dtype, jnp.inexact)]
            return sum((jnp.sum(jnp.abs(a) ** 2) for a in outs), jnp.zeros(())), ran.traces

        return jax.grad(total, has_aux=True, allow_int=True)(params)

    traces = jax.tree.map(_small, list(shapes))
    arrays = list(entries(step.params)), args, hidden, others, traces
    compiled = jax.jit(gradient).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        best = min(best, time.perf_counter() - start)
    return best / length


def _is_no_number(var: Any) -> bool:
    return bool(jax.dtypes.issubdtype(var.dtype, jax.dtypes.extended))


def _small(like: Any, *lead: int) -> jax.Array:
    value = 0.01 if jnp.issubdtype(like.dtype, jnp.inexact) else 0
    return jnp.full((*lead, *like.shape), value, like.dtype)
