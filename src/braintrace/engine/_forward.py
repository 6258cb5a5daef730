"""Everything a parameter has done to the states, pushed forward: one tangent per parameter element.

E_t = dh_t/dp = (dF/dh) E_{t-1} + dF/dp, for all states together: exact, whatever lies between. A
trace is (parts, *parameter, *state): a complex parameter has two parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._control import bind_quietly, run
from .._jaxpr import Equation
from ..graph import Graph
from ..rules import FullInfluence
from ._evaluate import Values, inputs_of
from ._remember import remembering

Array = jax.Array


def forward_init(graph: Graph, params: Sequence[Any]) -> list[Any]:
    """Zero traces: per parameter leaf, one array for every state leaf that it can reach."""
    out = []
    for reached, p in zip(graph.influenced, params, strict=True):
        entries = {k: graph.step.entry(graph.step.hidden[k]) for k in reached}
        shape = (2 if jnp.iscomplexobj(p) else 1, *p.shape)
        out.append({str(k): jnp.zeros(shape + v.shape, v.dtype) for k, v in entries.items()})
    return out


def forward_advance(
    graph: Graph, rule: FullInfluence, values: Values, traces: Sequence[Any]
) -> list[Any]:
    """Push all traces through the step."""
    return [
        _advance_one(graph, rule, i, values, trace) if trace else trace
        for i, trace in enumerate(traces)
    ]


def quiet_apply(eqn: Equation, operands: list[Any], feed: Any) -> tuple[list[Any], dict]:
    """Apply an equation so that it can be differentiated forward."""
    return bind_quietly(eqn, operands), {}


def new_hidden(graph: Graph, values: Values) -> list[Any]:
    """The new hidden states as a function that can be differentiated forward."""
    inputs = inputs_of(graph, values)
    outs = run(graph.step.program, values.consts, inputs, quiet_apply, graph.custom)[0]
    return [outs[leaf.output] for leaf in graph.step.hidden]


def _advance_one(graph: Graph, rule: FullInfluence, i: int, values: Values, trace: Any) -> Any:
    params, hidden = values.params, values.hidden
    p = params[i]
    parts = 2 if jnp.iscomplexobj(p) else 1
    flat = {k: e.reshape((parts * p.size, *e.shape[1 + p.ndim :])) for k, e in trace.items()}
    shapes = [jax.ShapeDtypeStruct(h.shape, h.dtype) for h in hidden]

    def of(value, states):
        new = (*params[:i], value, *params[i + 1 :])
        return new_hidden(graph, replace(values, params=new, hidden=states))

    def push(args):
        number, moved = args
        place = jnp.arange(p.size).reshape(p.shape) == number % p.size
        unit = jnp.where(number < p.size, 1, 1j) if parts == 2 else 1
        d_param = jnp.where(place, jnp.asarray(unit, p.dtype), jnp.zeros((), p.dtype))
        d_hidden = tuple(
            moved[str(k)] if str(k) in moved else jnp.zeros(s.shape, s.dtype)
            for k, s in enumerate(shapes)
        )
        out = jax.jvp(of, (p, tuple(hidden)), (d_param, d_hidden))[1]
        return {k: out[int(k)] for k in moved}

    at_once = max(1, min(parts * p.size, rule.at_once))
    pushed = jax.lax.map(push, (jnp.arange(parts * p.size), flat), batch_size=at_once)
    return {k: e.reshape(trace[k].shape) for k, e in pushed.items()}


def forward_remember(
    graph: Graph, params: Sequence[Any], hidden: Sequence[Any], traces: Sequence[Any]
) -> tuple[Any, ...]:
    """The entry states; their cotangent meets the traces, nothing goes to the past."""

    def credit(params, traces, cotangents):
        return tuple(_contract(p, t, cotangents) for p, t in zip(params, traces, strict=True))

    return remembering(params, hidden, list(traces), credit)


def _contract(p: Array, trace: dict[str, Array], cotangents: Sequence[Array]) -> Any:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return np.zeros(p.shape, jax.dtypes.float0)
    total = jnp.zeros((2 if jnp.iscomplexobj(p) else 1, *p.shape), p.real.dtype)
    for k, e in trace.items():
        ct = cotangents[int(k)]
        # A cotangent of a + ib is dL/da - i dL/db, so dL is the real part of the product.
        found = jnp.tensordot(e, ct.astype(jnp.result_type(e, ct)), axes=ct.ndim)
        total = total + found.real.astype(total.dtype)
    return jax.lax.complex(total[0], -total[1]) if jnp.iscomplexobj(p) else total[0]
