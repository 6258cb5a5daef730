"""The forward numbers of a step: each relation's x, f and D."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph import Graph, Pushed

Array = jax.Array


@dataclass(frozen=True, slots=True)
class Observation:
    """What one relation did in one step (see `rules` for the letters)."""

    x: Array | None
    f: Array
    D: Array


def observe(graph: Graph, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Observation]:
    """Evaluate the kept Jacobian of a step at a point, relation by relation."""
    tangent = graph.tangent
    pushed = Pushed(tangent, [*consts, *inputs], graph.cut, graph.found.bodies)
    by_colour = _push_states(graph, pushed)
    xs = pushed.xs()
    out = []
    for relation, t in zip(graph.relations, graph.tapped, strict=True):
        tap, parts = graph.taps[t], tangent.taps[t]
        arrivals = {
            (p, c): pushed.push({var: _seed(tap.colours[p] == c, var)})
            for p, var in enumerate(parts)
            for c in range(tap.n_colours[p])
        }
        slots = relation.slots
        dtype = slots.dtype
        f = jnp.stack(
            [_arrival(slots.arrival[k], arrivals, slots, dtype) for k in range(slots.width)], -1
        )
        D = jnp.stack(
            [
                jnp.stack(
                    [
                        _total([p(by_colour[c], dtype) for c, p in cell], slots, dtype)
                        for cell in row
                    ],
                    -1,
                )
                for row in slots.transition
            ],
            -2,
        )
        out.append(Observation(xs[t], f, D))
    return out


def _push_states(graph: Graph, pushed: Pushed) -> list[list[Array | None]]:
    """One tangent per colour of the state pattern, at all exits."""
    pattern, offsets = graph.pattern, graph.found.offsets
    out = []
    for c in range(pattern.n_colours):
        seeds = {}
        for k, var in enumerate(graph.tangent.entries):
            here = pattern.colours[offsets[k] : offsets[k + 1]] == c
            if here.any():
                seeds[var] = _seed(here, var)
        out.append(pushed.push(seeds))
    return out


def group_jacobians(graph: Graph, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Array]:
    """Per hidden group the kept Jacobian within a unit, (*varshape, S, S) in real components."""
    pushed = Pushed(graph.tangent, [*consts, *inputs], graph.cut, graph.found.bodies)
    by_colour = _push_states(graph, pushed)
    offsets, kept = graph.found.offsets, graph.pattern.kept
    edges = set(map(tuple, kept.tolist()))
    out = []
    for g in graph.groups:
        size = int(np.prod(g.varshape, dtype=np.int64))
        rows = []
        for to in g.components:
            row = []
            for source in g.components:
                total = jnp.zeros(g.varshape, graph.tangent.entries[to].dtype)
                first, start = int(offsets[to]), int(offsets[source])
                there = np.array([(first + i, start + i) in edges for i in range(size)])
                colours = graph.pattern.colours[start : start + size]
                for c in np.unique(colours[there]):
                    value = by_colour[c][to]
                    if value is not None:
                        here = (there & (colours == c)).reshape(g.varshape)
                        total = jnp.where(here, value, total)
                row.append(total)
            rows.append(jnp.stack(row, -1))
        out.append(jnp.stack(rows, -2))
    return out


def _seed(here: np.ndarray, var) -> Array:
    if here.all():
        return jnp.ones(var.shape, var.dtype)
    return jnp.asarray(here.reshape(var.shape), var.dtype)


def _total(terms: list[Array], slots, dtype) -> Array:
    return sum(terms[1:], terms[0]) if terms else jnp.zeros(slots.shape, dtype)


def _arrival(cell, arrivals, slots, dtype) -> Array:
    # A slot is real; its derivative by a complex y is the covector d/d(re) - i d/d(im).
    real = [pick(arrivals[p, c], dtype) for p, c, pick in cell if p == 0]
    imag = [pick(arrivals[p, c], dtype) for p, c, pick in cell if p == 1]
    if any(p == 1 for p, _ in arrivals):
        return jax.lax.complex(_total(real, slots, dtype), -_total(imag, slots, dtype))
    return _total(real, slots, dtype)
