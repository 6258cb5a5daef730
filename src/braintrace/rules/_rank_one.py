"""Everything a parameter has done to the states, as one outer product with the right mean.

E_t = (dF/dh) E_{t-1} + dF/dp is estimated by s w^T. With random signs nu, one per state element,

    d = (dF/dh) s,    p = nu^T dF/dp
    s <- r0 d + r1 nu,    w <- w / r0 + p / r1

for any positive r0, r1; these make both terms of equal length. A state that no parameter moves in
a step, a row of zeros in dF/dp, needs no sign; where derivatives may be infinite it has none, so
that s is zero wherever E is. The trace is one entry per parameter leaf, and a last one with s and
the number of signs drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._errors import not_supported
from ..engine import (
    Arrived,
    Rule,
    Values,
    evaluate_plain,
    new_hidden,
    product,
    pushed,
    singular,
    zeros_like_traces,
)
from ..graph import Graph, leaf_name, seed_of, step_digest
from ._full_influence import over_states, parameters_of


def rank_one(key: Array, eps: float = 1e-12) -> Rule:
    """The influence of every parameter on every state, as one random outer product."""

    def traced(graph: Graph) -> list[tuple[int, tuple[Any, ...]]]:
        leaves = parameters_of(graph)
        return [*leaves, (len(leaves), ("states",))]

    def reset(traces: Sequence[Any]) -> list[Any]:
        *ws, last = zeros_like_traces(traces)
        return [*ws, {**last, "draws": traces[-1]["draws"]}]

    return over_states(
        partial(_pushed, key, eps),
        init=_init,
        traced=traced,
        names=_names,
        credit=_credit,
        reset=reset,
        one_by_one=True,
        per_parameter=True,
        constants={"key": key, "eps": eps},
        approximates="the influence of every parameter: one random outer product stands for it",
    )


def _names(graph: Graph) -> list[str]:
    """One product follows all parameters and states, so it belongs to a step with just these."""
    leaves = (*(leaf_name(p) for p in graph.step.params), "states")
    return [f"{name} of {step_digest(graph.step)}" for name in leaves]


def _init(graph: Graph, values: Values) -> list[Any]:
    """Zero factors."""
    entries = [graph.step.entry(leaf) for leaf in graph.step.hidden]
    if any(v.is_complex for v in entries) or any(jnp.iscomplexobj(p) for p in values.params):
        raise not_supported(
            "a complex state or parameter.",
            why="random signs are drawn for real numbers",
            do="keep real and imaginary parts in states and parameters of their own",
        )
    s = {str(k): jnp.zeros(v.shape, v.dtype) for k, v in enumerate(entries)}
    floats = [jnp.issubdtype(jnp.result_type(p), jnp.inexact) for p in values.params]
    pairs = [
        (p, f and graph.owns(i)) for i, (p, f) in enumerate(zip(values.params, floats, strict=True))
    ]
    out: list[Any] = [{"w": jnp.zeros(p.shape, p.dtype)} if f else {} for p, f in pairs]
    return [*out, {"s": s, "draws": jnp.zeros((), jnp.int32)}]


def _pushed(key: Array, e: float, graph: Graph, values: Values, traces: Sequence[Any]) -> list[Any]:
    """The factors after a step."""
    *ws, last = traces
    s = per_state(last["s"])
    hidden, params = tuple(values.hidden), tuple(values.params)
    key = jax.random.fold_in(key, last["draws"])
    nu = [
        jax.random.rademacher(jax.random.fold_in(key, seed_of(leaf_name(leaf))), h.shape, h.dtype)
        for leaf, h in zip(graph.step.hidden, hidden, strict=True)
    ]
    forward = lambda h: new_hidden(graph, replace(values, hidden=h))
    d = pushed(graph, forward, hidden)(s)

    def at(theta: Sequence[Array]) -> Values:
        rest = iter(theta)
        return replace(values, params=tuple(next(rest) if t else p for p, t in pairs))

    def of(theta: Sequence[Array]) -> list[Array]:
        outs = evaluate_plain(graph, at(theta))
        return [outs[leaf.output] for leaf in graph.step.hidden]

    pairs = list(zip(params, ws, strict=True))
    theta = [p for p, t in pairs if t]
    if theta and singular(graph):
        # A tangent in a random direction of all parameters is zero where all their derivatives are.
        along = [
            jax.random.normal(jax.random.fold_in(key, i), p.shape, p.dtype)
            for i, p in enumerate(theta)
        ]
        moved_now = pushed(graph, lambda theta: new_hidden(graph, at(theta)), theta)(along)
        nu = [jnp.where(a != 0, n, 0) for a, n in zip(moved_now, nu, strict=True)]

    # Why the mean is right: with E[nu nu^T] = 1 and s w^T = E_{t-1} in the mean,
    #
    #     (r0 d + r1 nu)(w / r0 + p / r1)^T = d w^T + nu p^T + r0/r1 d p^T + r1/r0 nu w^T
    #
    # the first two terms have the means (dF/dh) E_{t-1} and nu nu^T dF/dp = dF/dp, and the others
    # zero, as nu is independent of d and w. r0, r1 make the noise small, they add no bias. Without
    # signs at rows of zeros, E[nu nu^T] is 1 at the others, and nu nu^T dF/dp has the same mean.
    (p,) = jax.vjp(of, theta)[1](list(nu))
    w = [t["w"] for t in ws if t]
    r0 = jnp.sqrt((_length(w) + e) / (_length(d) + e))
    r1 = jnp.sqrt((_length(p) + e) / (_length(nu) + e))
    factors = enumerate(zip(d, nu, strict=True))
    moved = {str(k): (r0 * a + r1 * n).astype(a.dtype) for k, (a, n) in factors}
    new = iter([(old / r0 + add / r1).astype(old.dtype) for old, add in zip(w, p, strict=True)])
    out: list[Any] = [{"w": next(new)} if t else t for t in ws]
    return [*out, {"s": moved, "draws": last["draws"] + 1}]


def per_state(arrays: dict[str, Array]) -> tuple[Array, ...]:
    """In the order of the states; that of the keys is another one from ten on."""
    return tuple(arrays[str(k)] for k in range(len(arrays)))


def _length(arrays: Sequence[Array]) -> Array:
    """The norm of all arrays as one vector, in single precision or better."""
    wide = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in arrays]
    return jnp.sqrt(sum((jnp.sum(a * a) for a in wide), jnp.zeros(())))


def _credit(graph: Graph, arrived: Arrived) -> tuple[Any, ...]:
    *ws, last = arrived.traces
    pairs = zip(per_state(last["s"]), arrived.entry, strict=True)
    dot = sum((product(c[0], a).sum() for a, c in pairs), jnp.zeros(()))
    return tuple(
        (dot * t["w"]).astype(t["w"].dtype) if t else np.zeros(p.shape, jax.dtypes.float0)
        for p, t in zip(arrived.params, ws, strict=True)
    )
