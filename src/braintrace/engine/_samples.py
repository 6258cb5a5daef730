"""Whether a batch holds samples that have nothing to do with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph import Graph
from ..program import is_traced
from ._evaluate import new_hidden
from ._values import Values

Array = jax.Array


def has_samples(graph: Graph, consts: Sequence[Array]) -> bool:
    """Whether axis 0 counts samples that do not reach each other's states; tried out, at random.

    It is an axis of all states, inputs and outputs that runs along no weight.
    """
    step = graph.step
    states = [step.entry(leaf) for leaf in step.hidden]
    shapes = [v.shape for v in states]
    for r in graph.relations:
        op = r.operator
        shapes += [op.y.shape] if op.x is None else [op.y.shape, op.x.shape]
        if any(0 not in op.free_axes(k) for k in r.keys):
            return False
    if len({s[:1] for s in shapes}) != 1 or not shapes[0] or any(is_traced(c) for c in consts):
        return False
    rng = np.random.default_rng(0)

    def drawn(v: Any) -> Any:
        if jnp.issubdtype(v.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), v.shape)
        if not jnp.issubdtype(v.dtype, jnp.floating):
            return jnp.zeros(v.shape, v.dtype)
        return jnp.asarray(rng.standard_normal(v.shape), v.dtype)

    with jax.ensure_compile_time_eval():
        kinds = [[step.entry(leaf) for leaf in k] for k in (step.params, step.hidden, step.others)]
        args = tuple(map(drawn, step.program.inputs[: step.n_args]))
        params, hidden, others = (tuple(map(drawn, kind)) for kind in kinds)
        values = Values(tuple(consts), args, params, hidden, others)
        after = lambda h: new_hidden(graph, replace(values, hidden=h))
        for sample in (0, -1):  # what one of them does to the others
            one = lambda a, s=sample: jnp.zeros_like(a).at[s].set(a[s])
            moved = jax.jvp(after, (hidden,), (tuple(map(one, hidden)),))[1]
            if any(bool(a.at[sample].set(0).any()) for a in moved):
                return False
    return True
