"""Everything a parameter has done to the states, pushed forward: one tangent per parameter element.

E_t = dh_t/dp = (dF/dh) E_{t-1} + dF/dp, for all states at once: exact, whatever lies between. A
trace is (parts, *parameter, *state): a complex parameter has two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..engine import Arrived, Block, Fresh, Rule, Values, new_hidden, pushed, scan_steps
from ..graph import Graph, leaf_name

Trace = Any  # arrays by name
Push = Callable[[Graph, Values, Sequence[Trace]], list[Trace]]


def over_states(push: Push, **functions: Any) -> Rule:
    """A rule that goes through the steps itself on all paths; `push` moves the traces by one."""

    def advance(
        graph: Graph, block: Block, traces: Sequence[Trace], observed: Any, fresh: Fresh
    ) -> list[Trace]:
        return scan_steps(block, partial(push, graph), list(traces))

    return Rule(advance=advance, entry_only=True, complete=True, **functions)


def full_influence(at_once: int = 4096) -> Rule:
    """Every parameter's influence on every state; so many parameter elements are pushed at once."""

    def push(graph: Graph, values: Values, traces: Sequence[Trace]) -> list[Trace]:
        each = enumerate(traces)
        return [_pushed(graph, i, values, t, at_once) if t else t for i, t in each]

    return over_states(
        push, init=_init, traced=parameters_of, names=_names, credit=_credit, per_parameter=True
    )


def parameters_of(graph: Graph) -> list[tuple[int, tuple[Any, ...]]]:
    """The parameter leaves: number and path."""
    return [(i, leaf.path) for i, leaf in enumerate(graph.step.params)]


def _names(graph: Graph) -> list[Any]:
    """Per parameter leaf and state leaf."""
    states = [leaf_name(leaf) for leaf in graph.step.hidden]
    each = enumerate(zip(graph.step.params, graph.influenced, strict=True))
    return [
        {str(k): f"{leaf_name(p)} -> {states[k]}" for k in reached if graph.owns(i)}
        for i, (p, reached) in each
    ]


def _init(graph: Graph, values: Values) -> list[Trace]:
    """Zero traces: per parameter leaf, one array for every state leaf that it can reach."""
    out = []
    for i, (reached, p) in enumerate(zip(graph.influenced, values.params, strict=True)):
        followed = reached if graph.owns(i) else ()
        entries = {k: graph.step.entry(graph.step.hidden[k]) for k in followed}
        shape = (2 if jnp.iscomplexobj(p) else 1, *p.shape)
        out.append({str(k): jnp.zeros(shape + v.shape, v.dtype) for k, v in entries.items()})
    return out


def _pushed(graph: Graph, i: int, values: Values, trace: Trace, at_once: int) -> Trace:
    """The trace of one parameter leaf after a step."""
    params, hidden = values.params, values.hidden
    p = params[i]
    parts = 2 if jnp.iscomplexobj(p) else 1
    flat = {k: e.reshape((parts * p.size, *e.shape[1 + p.ndim :])) for k, e in trace.items()}
    shapes = [jax.ShapeDtypeStruct(h.shape, h.dtype) for h in hidden]

    def of(value, states):
        new = (*params[:i], value, *params[i + 1 :])
        return new_hidden(graph, replace(values, params=new, hidden=states))

    derivative = pushed(graph, of, p, tuple(hidden))

    # Of w (2, 3) and h (4,), the trace (1, 2, 3, 4) is six tangents of h. Number 4 is w at (1, 1):
    #
    #     d_param     [[0, 0, 0], [0, 1, 0]]      one step of the parameter itself: dF/dp
    #     d_hidden    the trace of that element   what it has done to h so far: E
    #     out         dF/dh E + dF/dp             both in one tangent, as the derivative is linear
    #
    # A complex parameter has twelve: a unit step along 1 and one along 1j of each element.
    def push(args):
        number, moved = args
        place = jnp.arange(p.size).reshape(p.shape) == number % p.size
        unit = jnp.where(number < p.size, 1, 1j) if parts == 2 else 1
        d_param = jnp.where(place, jnp.asarray(unit, p.dtype), jnp.zeros((), p.dtype))
        d_hidden = tuple(
            moved[str(k)] if str(k) in moved else jnp.zeros(s.shape, s.dtype)
            for k, s in enumerate(shapes)
        )
        out = derivative(d_param, d_hidden)
        return {k: out[int(k)] for k in moved}

    batch = max(1, min(parts * p.size, at_once))
    new = jax.lax.map(push, (jnp.arange(parts * p.size), flat), batch_size=batch)
    return {k: e.reshape(trace[k].shape) for k, e in new.items()}


def _credit(graph: Graph, arrived: Arrived) -> tuple[Any, ...]:
    cotangents = [c[0] for c in arrived.entry]
    pairs = zip(arrived.params, arrived.traces, strict=True)
    return tuple(_contracted(p, t, cotangents) for p, t in pairs)


def _contracted(p: Array, trace: dict[str, Array], cotangents: Sequence[Array]) -> Any:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return np.zeros(p.shape, jax.dtypes.float0)
    total = jnp.zeros((2 if jnp.iscomplexobj(p) else 1, *p.shape), p.real.dtype)
    for k, e in trace.items():
        # A state that no element has reached may have an infinite cotangent.
        reached = (e != 0).any(tuple(range(1 + p.ndim)))
        ct = jnp.where(reached, cotangents[int(k)], 0)
        # A cotangent of a + ib is dL/da - i dL/db, so dL is the real part of the product.
        product = jnp.tensordot(e, ct.astype(jnp.result_type(e, ct)), axes=ct.ndim)
        total = total + product.real.astype(total.dtype)
    return jax.lax.complex(total[0], -total[1]) if jnp.iscomplexobj(p) else total[0]
