"""What rules read of the forward pass of a step: each relation's x, f and D."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph import (
    NONE,
    Graph,
    HiddenParamOpRelation,
    Pushed,
    Table,
    TapPattern,
    bind_reversible,
    looked_up,
)
from ..program import Atom, Equation, Var, trace
from ._evaluate import inputs_of
from ._recurrence import StepValues, evaluate_all_steps
from ._repeats import repeats
from ._rule import Steps
from ._seeds import without_seeds
from ._singular import guarded, zero_stays
from ._values import Block

Array = jax.Array
_FEW = 4  # derivatives that are written out one by one; more are computed at once


def observe(
    graph: Graph,
    consts: Sequence[Array],
    inputs: Sequence[Array],
    ys: Mapping[int, Array] | None = None,
) -> list[Steps]:
    """Evaluate the kept Jacobian of a step at a point, relation by relation.

    `ys` are outputs of operators that were computed before, by the number of the site.
    """
    parts = _observed(graph, consts, inputs, ys)
    pairs = zip(graph.relations, parts, strict=True)
    return [Steps(x, _at_all_slots(r, slots), D) for r, (x, slots, D) in pairs]


def _observed(
    graph: Graph, consts: Sequence[Array], inputs: Sequence[Array], ys: Mapping[int, Array] | None
) -> list[tuple[Any, list[Array], Array]]:
    """x, f slot by slot (one array of many), and D of each relation."""
    outputs: dict[Any, Any] = {graph.tangent.ys[i]: y for i, y in (ys or {}).items()}
    of_view: dict[int, tuple[Pushed, _States]] = {}
    for k in {0, *graph.view_of}:
        pushed = _pushed(graph, k, consts, inputs, outputs)
        of_view[k] = pushed, _States(graph, k, pushed)
    xs = of_view[0][0].xs()
    out = []
    for relation, t, k in zip(graph.relations, graph.tapped, graph.view_of, strict=True):
        pushed, states = of_view[k]
        x = jax.tree.map(relation.site.outward, xs[t])
        tail = _tail(graph, graph.views[k].taps[t], pushed, relation, t)
        out.append((x, tail, states.transition(relation)))
    return out


def observe_block(graph: Graph, block: Block) -> list[Steps]:
    """The same for every step of a block, D and `slots` with one entry where they repeat."""
    path, axes = block.path, block.axes
    leaves, tree = jax.tree.flatten((axes.slices(path), path.hidden, path.others, block.ys))
    trees = []

    def one(*leaves):
        slices, hidden, others, ys = jax.tree.unflatten(tree, leaves)
        now = axes.at(path, slices, hidden, others)
        outs, out_tree = jax.tree.flatten(_observed(graph, now.consts, inputs_of(graph, now), ys))
        trees.append(out_tree)
        return outs

    # Traced for one step and evaluated for all: what no slice reaches is computed once and has one
    # entry along the steps. Of h' = 0.9 h + x @ W, D = 0.9 and f = 1 are such; x has one per step.
    program, consts = trace(one, *(jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in leaves))
    program = without_seeds(program, consts)
    values = StepValues(
        dict(zip(program.consts, consts, strict=True)),
        dict(zip(program.inputs, leaves, strict=True)),
    )
    evaluate_all_steps(program.equations, values, axes.length)
    along = repeats(program)

    def once(atom: Atom) -> Array:
        """Without the steps, lanes and elements of y that repeat the first."""
        own = [
            slice(0, 1) if i in along.get(atom, ()) else slice(None) for i in range(len(atom.shape))
        ]
        steps = slice(None) if atom in values.timed else slice(0, 1)
        return values.all_steps(atom, axes.length)[(steps, *own)]

    out = []
    parts = jax.tree.unflatten(trees[-1], program.outputs)
    for r, (x, slots, D) in zip(graph.relations, parts, strict=True):
        x, f = jax.tree.map(lambda a: values.all_steps(a, axes.length), (x, slots))
        few = r.slots.table is None and r.site.iterations is None
        own = tuple(map(once, slots)) if few else None
        out.append(Steps(x, _at_all_slots(r, f), once(D), slots=own))
    return out


def _at_all_slots(relation: HiddenParamOpRelation, slots: Sequence[Array]) -> Array:
    return jnp.stack(slots, -1) if relation.slots.table is None else slots[0]


def _pushed(graph: Graph, k: int, consts, inputs, outputs: Mapping | None = None) -> Pushed:
    """The tangent program with what a view cuts left out."""
    view, values, of_zero = graph.views[k], [*consts, *inputs], guarded(graph.tangent)

    def rebind(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
        outs = bind_reversible(eqn, operands)
        return zero_stays(operands[of_zero[eqn]], outs) if eqn in of_zero else outs

    bodies = view.influence.bodies
    return Pushed(graph.tangent, values, view.cut, bodies, rebind, outputs, of_zero)


# One derivative: an array per component (None is zero).
Derivative = list[Array | None]


@dataclass(frozen=True, slots=True)
class _Derivatives:
    """Derivatives by number, and those that were computed at once: their numbers and arrays."""

    each: list[Derivative]
    at_once: list[tuple[list[int], list[Array | None]]]

    def read(self, table: Table, components: Sequence[Var], dtype: Any) -> Array:
        """Elements, counted through one derivative after another."""
        # Of derivatives 0 and [1, 2] at once, with components of 3 and 5 elements, the arrays are
        # 0a (3), 0b (5), 12a (2, 3) and 12b (2, 5). Element 1 * 8 + 2 is 12a[0, 2], 2 * 8 + 4 is
        # 12b[1, 1]: the 8th of the first 8 + 6, and the 8 + 6 + 5 + 1 = 20th of all.
        sizes = np.array([v.size for v in components])
        ends = np.cumsum(sizes)
        starts, n = ends - sizes, int(ends[-1])
        alone = [
            ([i], d) for i, d in enumerate(self.each) if not any(i in g for g, _ in self.at_once)
        ]
        groups = [*alone, *self.at_once]
        group, place = np.zeros((2, len(self.each)), np.int64)
        for g, (numbers, _) in enumerate(groups):
            group[numbers], place[numbers] = g, np.arange(len(numbers))
        lengths = np.outer([len(numbers) for numbers, _ in groups], sizes)
        before = np.cumsum(lengths).reshape(lengths.shape) - lengths
        number, element = np.divmod(np.maximum(table.index, 0), n)
        k = np.searchsorted(ends, element, side="right")
        index = before[group[number], k] + place[number] * sizes[k] + element - starts[k]
        index = np.where(table.index == NONE, NONE, index)
        arrays = [a for _, own in groups for a in own]
        return looked_up(arrays, lengths.reshape(-1).tolist(), index, dtype)


class _States:
    """The derivatives of the exits by the entries, as many as the colouring asks for."""

    def __init__(self, graph: Graph, view: int, pushed: Pushed):
        self._entries = entries = graph.tangent.entries
        c, offsets = graph.views[view].pattern.colouring, graph.influence.offsets
        parts = [slice(int(offsets[k]), int(offsets[k + 1])) for k in range(len(entries))]
        ahead = [
            {v: _seed(c.sources[p] == i, v) for v, p in zip(entries, parts, strict=True)}
            for i in range(c.n_sources)
        ]
        # A leaky layer of any size has one colour: the tangent of ones on h, pushed once, is the
        # whole diagonal of D. A delay line [h, d] has two, ones on h and ones on d, so that the
        # entries d'/h and d'/d stay apart.
        self.derivatives = _push(pushed, ahead)
        for i in range(c.n_exits):
            seeds = [_seed(c.exits[p] == i, v) for v, p in zip(entries, parts, strict=True)]
            sources = sorted({s for e, s in c.backward if seeds[e] is not None})
            (pulled,) = _pull(pushed, [entries[k] for k in sources], [seeds])
            by_entry = dict(zip(sources, pulled, strict=True))
            self.derivatives.each.append([by_entry.get(k) for k in range(len(entries))])

    def transition(self, relation: HiddenParamOpRelation) -> Array:
        slots = relation.slots
        if slots.table is not None:
            return self.derivatives.read(slots.table, self._entries, slots.dtype)
        rows = [
            jnp.stack(
                [
                    _total(
                        [p(self.derivatives.each[c], slots.dtype) for c, p in cell],
                        slots.shape,
                        slots.dtype,
                    )
                    for cell in row
                ],
                -1,
            )
            for row in slots.transition
        ]
        return jnp.stack(rows, -2)


def _push(pushed: Pushed, seeds: Sequence[Mapping[Var, Array | None]]) -> _Derivatives:
    """Tangents at the exits, one per set of seeds; those of the same variables at once."""
    alike: dict[tuple[Var, ...], list[int]] = {}
    for i, one in enumerate(seeds):
        alike.setdefault(tuple(v for v, s in one.items() if s is not None), []).append(i)
    out: dict[int, Derivative] = {}
    at_once = []
    seeded = lambda variables, *arrays: pushed.push(dict(zip(variables, arrays, strict=True)))
    for variables, numbers in alike.items():
        push = partial(seeded, variables)
        columns = [[_or_zeros(seeds[i][v], v) for i in numbers] for v in variables]
        if len(numbers) <= _FEW or not variables:
            rows = zip(*columns, strict=True) if variables else [() for _ in numbers]
            out |= {i: push(*row) for i, row in zip(numbers, rows, strict=True)}
            continue
        stacked = jax.vmap(push)(*map(jnp.stack, columns))
        at_once.append((numbers, stacked))
        out |= {i: [None if a is None else a[k] for a in stacked] for k, i in enumerate(numbers)}
    return _Derivatives([out[i] for i in range(len(seeds))], at_once)


def _pull(pushed: Pushed, sources: Sequence[Var], seeds: list[list[Array | None]]) -> list:
    """Cotangents at the sources, one per set of seeds at the exits."""
    if not seeds:
        return []
    exits = pushed.exit_shapes
    pushed = pushed.rebound(bind_reversible)  # transposed: a cotangent of zero is one already

    def run(*tangents):
        out = pushed.push(dict(zip(sources, tangents, strict=True)))
        return [_or_zeros(a, s) for a, s in zip(out, exits, strict=True)]

    _, back = jax.vjp(run, *(jnp.zeros(v.shape, v.dtype) for v in sources))

    def one(seed):
        return back([_or_zeros(a, s).astype(s.dtype) for a, s in zip(seed, exits, strict=True)])

    if len(seeds) <= _FEW:
        return [list(one(seed)) for seed in seeds]
    stacked = [
        jnp.stack([_or_zeros(a, s) for a in column])
        for column, s in zip(zip(*seeds, strict=True), exits, strict=True)
    ]
    rows = jax.vmap(one)(stacked)
    return [[a[i] for a in rows] for i in range(len(seeds))]


def _tail(
    graph: Graph, tap: TapPattern, pushed: Pushed, relation: HiddenParamOpRelation, t: int
) -> list[Array]:
    """f slot by slot, with an axis of iterations first where the operator has them."""
    parts, slots, site = graph.tangent.taps[t], relation.slots, relation.site
    entries, offsets = graph.tangent.entries, graph.influence.offsets
    shape = slots.shape if site.iterations is None else (site.iterations, *slots.shape)
    derivatives: dict[tuple[int, int, bool], Derivative] = {}
    ahead: list[_Derivatives] = []
    for p, (var, c) in enumerate(zip(parts, tap.colourings, strict=True)):
        ahead.append(_push(pushed, [{var: _seed(c.sources == i, var)} for i in range(c.n_sources)]))
        for i, d in enumerate(ahead[p].each):
            derivatives[p, i, False] = d
        back = [
            [
                _seed(c.exits[int(offsets[k]) : int(offsets[k + 1])] == i, v)
                for k, v in enumerate(entries)
            ]
            for i in range(c.n_exits)
        ]
        for i, d in enumerate(_pull(pushed, [var], back)):
            derivatives[p, i, True] = [site.outward(d[0])]

    def picked(k: int, part: int) -> Array:
        terms = []
        for p, i, backward, pick in slots.arrival[k]:
            if p != part:
                continue
            if not backward:
                terms.append(pick(derivatives[p, i, False], slots.dtype))
            elif site.iterations is None:
                terms.append(pick(derivatives[p, i, True], slots.dtype))
            else:
                read = jax.vmap(partial(pick, dtype=slots.dtype))
                terms.append(read(derivatives[p, i, True]))
        return _total(terms, shape, slots.dtype)

    def all_picked(part: int) -> Array:
        tails, c, terms = slots.tails[part], tap.colourings[part], []
        if tails.ahead is not None:
            terms.append(ahead[part].read(tails.ahead, entries, slots.dtype))
        if tails.back is not None:
            behind: list[Any] = [derivatives[part, i, True][0] for i in range(c.n_exits)]
            size, index = math.prod(slots.y_shape), tails.back.index
            read = lambda *of: looked_up(of, [size] * len(of), index, slots.dtype)
            in_loop = site.iterations is not None
            terms.append(jax.vmap(read)(*behind) if in_loop else read(*behind))
        return _total(terms, (*shape, slots.width), slots.dtype)

    if slots.table is None:
        by_part = [[picked(k, p) for k in range(slots.width)] for p in range(len(parts))]
    else:
        by_part = [[all_picked(p)] for p in range(len(parts))]  # one array of all slots
    if len(parts) == 1:
        return by_part[0]
    # A slot is real; its derivative by a complex y is the covector d/d(re) - i d/d(im).
    return [jax.lax.complex(re, -im) for re, im in zip(*by_part, strict=True)]


def _stacked(entries: Sequence[Var], derivatives: Sequence[Derivative], dtype: Any) -> Array:
    """Derivatives as one array, (derivatives, state elements)."""
    flat = lambda a, v: _or_zeros(a, v).astype(dtype).reshape(-1)
    rows = [
        jnp.concatenate([flat(a, v) for a, v in zip(derivative, entries, strict=True)])
        for derivative in derivatives
    ]
    return jnp.stack(rows)


def group_jacobians(graph: Graph, consts: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
    """Per hidden group the kept Jacobian within a unit, (*varshape, S, S) in real components."""
    states = _States(graph, 0, _pushed(graph, 0, consts, inputs))
    c, offsets = graph.pattern.colouring, np.asarray(graph.influence.offsets, np.int64)
    first, second = graph.pattern.kept.astype(np.int64).T
    edges = first * offsets[-1] + second
    starts = np.cumsum([0, *(v.size for v in graph.tangent.entries)])
    out = []
    for g in graph.groups:
        dtype = jnp.result_type(*(graph.tangent.entries[k].dtype for k in g.components))
        derivatives = _stacked(graph.tangent.entries, states.derivatives.each, dtype)
        units = np.arange(np.prod(g.varshape, dtype=np.int64))
        rows = []
        for to in g.components:
            for source in g.components:
                analysed = np.arange(offsets[to + 1] - offsets[to])
                exit_, entry = offsets[to] + analysed, offsets[source] + analysed
                there = np.isin(exit_ * offsets[-1] + entry, edges)
                back = (to, source) in c.backward
                colour = c.n_sources + c.exits[exit_] if back else c.sources[entry]
                there, colour = (_everywhere(a, g.varshape).reshape(-1) for a in (there, colour))
                at = starts[source if back else to] + units
                rows.append(jnp.where(there, derivatives[colour, at], 0))
        size = len(g.components)
        out.append(jnp.stack(rows, -1).reshape(*g.varshape, size, size))
    return out


def _or_zeros(array: Array | None, shape: Any) -> Array:
    return jnp.zeros(shape.shape, shape.dtype) if array is None else array


def _seed(here: np.ndarray, var: Var) -> Array | None:
    if not here.any():
        return None
    if here.all():
        return jnp.ones(var.shape, var.dtype)
    return jnp.asarray(_everywhere(here, var.shape), var.dtype)


def _everywhere(analysed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape, from its analysed elements: all, or a few samples of a batch."""
    if analysed.size == np.prod(shape, dtype=np.int64):
        return analysed.reshape(shape)
    one = analysed[: np.prod(shape[1:], dtype=np.int64)]
    return np.broadcast_to(one.reshape(shape[1:]), shape)


def _total(terms: list[Array], shape: tuple[int, ...], dtype: Any) -> Array:
    return sum(terms[1:], terms[0]) if terms else jnp.zeros(shape, dtype)
