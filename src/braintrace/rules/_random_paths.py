"""RTRL along some random paths between units.

    E_t = K_t E_{t-1} + dF/dp,    K = dF/dh where it is kept, else 0

Of every row of dF/dh, how one state depends on all, K keeps what belongs to the same unit (elements
at one position of states of one shape), and of the others whose derivative is not zero the `paths`
with the largest of random numbers that are drawn once. dF/dh is read by one tangent per state, in
which zero stays zero, dF/dp by one cotangent per state, so a step costs states × (a step +
parameters × paths), where RTRL costs parameters × a step.

For three units and one path: K = [[a, b, 0], [0, c, d], [e, 0, f]], say, where dF/dh has nine
entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._errors import not_supported
from ..engine import Rule, Values, new_hidden, product, pushed
from ..graph import Graph
from ._full_influence import Trace, full_influence, over_states


def random_paths(paths: int, key: Array) -> Rule:
    """The influence of all parameters, moved on along so many paths to every state."""
    exact = full_influence()

    def init(graph: Graph, values: Values) -> list[Trace]:
        _check(graph)
        return exact.init(graph, values)

    return over_states(
        partial(_pushed, paths, key),
        init=init,
        traced=exact.traced,
        names=exact.names,
        credit=exact.credit,
        one_by_one=True,  # a block in reverse mode would follow all paths within it
        per_parameter=True,
        constants={"paths": paths, "path_key": key},
        approximates=f"the influence of every parameter: {paths} random paths to every state",
    )


def _check(graph: Graph) -> None:
    step = graph.step
    for leaf in (*step.params, *step.hidden):
        if step.entry(leaf).is_complex:
            raise not_supported(
                f"random paths with {leaf.name}, which is complex.",
                why="a path is one real derivative",
                do="keep real and imaginary parts apart, or leave out paths",
            )


def _pushed(
    paths: int, key: Array, graph: Graph, values: Values, traces: Sequence[Trace]
) -> list[Trace]:
    """The traces after a step."""
    hidden = values.hidden
    followed = [i for i, trace in enumerate(traces) if trace]
    if not followed:
        return list(traces)

    def of_params(params: list[Array]) -> Array:
        every = list(values.params)
        for i, p in zip(followed, params, strict=True):
            every[i] = p
        return _flat(new_hidden(graph, replace(values, params=tuple(every))))

    of_hidden = lambda *hidden: _flat(new_hidden(graph, replace(values, hidden=hidden)))
    after, back = jax.vjp(of_params, [values.params[i] for i in followed])
    (deposits,) = jax.vmap(back)(jnp.eye(after.size, dtype=after.dtype))
    units = jnp.split(np.eye(after.size), np.cumsum([h.size for h in hidden])[:-1], axis=1)
    tangents = [u.reshape(-1, *h.shape).astype(h.dtype) for u, h in zip(units, hidden, strict=True)]
    rows = jax.vmap(pushed(graph, of_hidden, *hidden))(*tangents).T
    move = _moves(rows, _units([h.shape for h in hidden]), paths, key)
    new = list(traces)
    for i, deposit in zip(followed, deposits, strict=True):
        size = values.params[i].size
        E = move(_joined(traces[i], hidden, size)) + deposit.reshape(after.size, size).T
        new[i] = _parted(E, traces[i], hidden)
    return new


def _moves(rows: Array, units: np.ndarray, paths: int, key: Array) -> Any:
    """`E -> E K'` of traces (parameters, states)."""
    n, own = len(rows), units[:, None] == units[None]
    within = np.argsort(~own, axis=1, kind="stable")[:, : own.sum(1).max()]
    drawn = jax.random.uniform(key, (n, n), rows.dtype)
    score, others = jax.lax.top_k(jnp.where(own | (rows == 0), -1, drawn), min(paths, n))
    at = jnp.concatenate([within, others], axis=1)
    kept = jnp.concatenate([np.take_along_axis(own, within, axis=1), score >= 0], axis=1)
    values = jnp.where(kept, jnp.take_along_axis(rows, at, axis=1), 0)
    return lambda E: sum(product(values[:, c], E[:, at[:, c]]) for c in range(at.shape[1]))


def _units(shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """A number for each state element, the same for elements at one position of equal shapes."""
    first: dict[tuple[int, ...], int] = {}
    ends = accumulate((int(np.prod(s)) for s in shapes), initial=0)
    starts = [first.setdefault(s, at) for s, at in zip(shapes, ends, strict=False)]
    parts = [np.arange(np.prod(s, dtype=int)) + at for s, at in zip(shapes, starts, strict=True)]
    return np.concatenate(parts)


def _flat(states: Sequence[Array]) -> Array:
    return jnp.concatenate([a.reshape(-1) for a in states])


def _joined(trace: Trace, hidden: Sequence[Array], size: int) -> Array:
    """The trace of a parameter, (elements, states); zero where it is not followed."""
    zero = lambda h: jnp.zeros((size, h.size), h.dtype)
    parts = [
        trace[str(k)].reshape(size, -1) if str(k) in trace else zero(h)
        for k, h in enumerate(hidden)
    ]
    return jnp.concatenate(parts, axis=1)


def _parted(E: Array, trace: Trace, hidden: Sequence[Array]) -> Trace:
    """The parts of a trace, in the shapes that they had."""
    ends = list(accumulate(h.size for h in hidden))
    parts = jnp.split(E, ends[:-1], axis=1)
    return {k: parts[int(k)].reshape(a.shape).astype(a.dtype) for k, a in trace.items()}
