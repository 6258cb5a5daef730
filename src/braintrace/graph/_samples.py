"""A tangent program that runs along a batch is analysed on one or two of its samples.

If every equation between tangents treats the places along one axis alike and apart, what one sample
reads says what all of them read. `thin` follows that axis through the program, equation by
equation, and makes the same program of a few samples; an equation that joins samples, or one that
it has no rule for, ends the attempt, and the analysis takes the whole batch. Sources are told apart
by their leading axis: with h of shape (32, 4) and y of shape (32, 4) in `h' = 0.9 * h + y`

    the program       add(mul(0.9, h: (32, 4)), y: (32, 4))
    of one sample     add(mul(0.9, h: (1, 4)), y: (1, 4))

Where a source has no such axis (a weight that all samples share), two samples are analysed: it
reaches both, in lanes that do not meet, and so there are 32 of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ..program import CUMULATIVE, ELEMENTWISE, Atom, Equation, Var
from ._influence import Influence
from ._pattern import Pattern, TapPattern
from ._sets import NONE, NotAlike
from ._slots import Cell, Pick, Slots, Table
from ._slots import pick as as_pick
from ._step import Component
from ._tangent import Tangent

Axes = Sequence[int | None]


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """A tangent program of `few` of the `size` samples of `whole`.

    `batched[s]` is whether source s (entries, then taps) has the axis of samples, its first;
    `original` the equation of the whole program that an equation comes from, where it is another;
    `parts` the variable and axis that an operand without a tangent is a part of.
    """

    whole: Tangent
    tangent: Tangent
    size: int
    few: int
    batched: tuple[bool, ...]
    original: Mapping[Equation, Equation]
    parts: Mapping[Var, tuple[Atom, int]]

    def of_whole(self, influence: Influence) -> Influence:
        """What the walk found, by the equations of the whole program."""
        original = self.original
        cuts = [replace(c, equation=original.get(c.equation, c.equation)) for c in influence.cuts]
        bodies = {original.get(e, e): outs for e, outs in influence.bodies.items()}
        return replace(influence, cuts=tuple(cuts), bodies=bodies)

    def check(self, pattern: Pattern, taps: Sequence[TapPattern]) -> None:
        """Every sample must be read by the same derivatives."""
        sources = iter(self.batched)
        n = len(self.tangent.entries)
        batched, sizes = [next(sources) for _ in range(n)], [v.size for v in self.tangent.entries]
        self._check_alike(pattern.colouring.sources, batched, sizes)
        self._check_alike(pattern.colouring.exits, batched, sizes)
        for tap, parts in zip(taps, self.tangent.taps, strict=True):
            for colouring, var in zip(tap.colourings, parts, strict=True):
                self._check_alike(colouring.sources, [next(sources)], [var.size])
                self._check_alike(colouring.exits, batched, sizes)

    def _check_alike(
        self, colours: np.ndarray, batched: Sequence[bool], sizes: Sequence[int]
    ) -> None:
        parts = np.split(colours, np.cumsum(sizes)[:-1])
        for own, part in zip(batched, parts, strict=True):
            if own and (part.reshape(self.few, -1) != part[: part.size // self.few]).any():
                raise NotAlike

    # ------------------------------------------------------------------------- slots of the whole

    def copies(self, site: int) -> int:
        """How many times the slots of an operator are there for the analysed ones."""
        return self.size // self.few if self.batched[self.tangent.tap_sources(site)[0]] else 1

    def widened(self, slots: Slots, site: int) -> Slots:
        """The slots of all samples."""
        y = self.tangent.taps[site][0]
        entries = _Places(self, self.tangent.entries, self.batched)
        own = self.batched[self.tangent.tap_sources(site)[0]]
        output = _Places(self, [y], [own])
        axis: int | None = len(slots.lanes)
        if not own:
            axis = 0 if entries.any_batched(slots.analysed) else None
            if axis == 0 and slots.lanes != (self.few,):
                raise NotAlike
        lanes = (self.size,) if axis == 0 and not own else slots.lanes
        y_shape = self.whole.taps[site][0].shape
        shape = lanes + y_shape

        def wide(pick: Pick, places: _Places) -> Pick:
            if pick.component is not None and not axis:
                return Pick(shape, pick.component, None, places.sizes)
            if pick.component is not None:  # of one sample: behind lanes the samples come later
                return as_pick(places.widened(pick.elements, axis), places.starts)
            return Pick(shape, None, places.widened(pick.index, axis), places.sizes)

        cell = lambda cell: tuple((c, wide(p, entries)) for c, p in cell)
        transition: tuple[tuple[Cell, ...], ...] = tuple(
            tuple(cell(c) for c in row) for row in slots.transition
        )
        arrival = tuple(
            tuple((p, d, back, wide(k, output if back else entries)) for p, d, back, k in row)
            for row in slots.arrival
        )
        table = slots.table
        if table is not None:
            derivative, element = np.divmod(table.index, entries.n)
            element = entries.widened(np.where(table.index == NONE, NONE, element), axis)
            first = derivative if axis is None else derivative.take([0], axis)
            table = Table(np.where(element == NONE, NONE, first * sum(entries.sizes) + element))
        return replace(
            slots,
            lanes=lanes,
            y_shape=y_shape,
            at=tuple(wide(p, entries) for p in slots.at),
            transition=transition,
            arrival=arrival,
            table=table,
        )


class _Places:
    """Elements of variables of a few samples, and where they are in the whole batch."""

    def __init__(self, samples: Samples, variables: Sequence[Var], batched: Sequence[bool]):
        few, size = samples.few, samples.size
        pairs = list(zip(variables, batched, strict=False))
        self.few, self.size = few, size
        self.offsets = np.cumsum([0, *(v.size for v in variables)])
        self.n = int(self.offsets[-1])
        self.inner = np.array([v.size // few if own else 0 for v, own in pairs], int)
        self.sizes = tuple(v.size // few * size if own else v.size for v, own in pairs)
        self.starts = np.cumsum([0, *self.sizes])

    def any_batched(self, elements: np.ndarray) -> bool:
        variable = np.searchsorted(self.offsets, elements[elements != NONE], side="right") - 1
        return bool((self.inner[variable] > 0).any())

    def widened(self, index: np.ndarray | None, axis: int | None) -> np.ndarray:
        """Indices of all samples, which are places along `axis`; None: there are none in them."""
        assert index is not None
        variable = np.searchsorted(self.offsets, np.maximum(index, 0), side="right") - 1
        inner = self.inner[variable]
        place = np.where(index == NONE, 0, index - self.offsets[variable])
        sample, within = np.divmod(place, np.maximum(inner, 1))
        sample, within = np.where(inner > 0, sample, 0), np.where(inner > 0, within, place)
        start = np.where(index == NONE, NONE, self.starts[variable] + within)
        if axis is None:
            if sample.any() or (inner[index != NONE] > 0).any():
                raise NotAlike
            return start
        along = lambda n: np.arange(n).reshape([-1 if k == axis else 1 for k in range(index.ndim)])
        own = np.where(inner > 0, along(self.few), 0)
        if ((sample != own) & (index != NONE)).any() or (start != start.take([0], axis)).any():
            raise NotAlike
        start, inner = start.take([0], axis), inner.take([0], axis)
        return np.where(start == NONE, NONE, start + inner * along(self.size))


def thin(tangent: Tangent) -> Samples | None:
    """The tangent program of a few samples, if it runs along a batch."""
    sizes = Counter(c.shape[0] for c in tangent.components if c.shape)
    if not sizes:
        return None
    size = sizes.most_common(1)[0][0]
    batched = tuple(bool(v.shape) and v.shape[0] == size for v in tangent.sources)
    few = 1 if all(batched) else 2
    if size <= few:
        return None
    try:
        return _Thinning(tangent, size, few, batched).samples()
    except NotAlike:
        return None


class _Thinning:
    def __init__(self, tangent: Tangent, size: int, few: int, batched: tuple[bool, ...]):
        self.whole, self.size, self.few, self.batched = tangent, size, few, batched
        self.axis: dict[Var, int | None] = {}  # of the tangents
        self.small: dict[tuple[Atom, int], Var] = {}
        self.parts: dict[Var, tuple[Atom, int]] = {}

    def part(self, atom: Atom, axis: int) -> Var:
        """A variable for a few samples of a value."""
        if isinstance(atom, Var) and atom in self.axis:
            own = self.axis[atom] == axis
        else:
            own = axis < len(atom.shape) and atom.shape[axis] == self.size
        _must(own)
        key = (atom, axis)
        if key not in self.small:
            self.small[key] = Var(_put(atom.shape, axis, self.few), atom.dtype)
            self.parts[self.small[key]] = key
        return self.small[key]

    def source(self, var: Var, batched: bool) -> Var:
        self.axis[var] = 0 if batched else None
        return self.part(var, 0) if batched else var

    def samples(self) -> Samples:
        tangent, own = self.whole, iter(self.batched)
        entries = tuple(self.source(v, next(own)) for v in tangent.entries)
        taps = tuple(tuple(self.source(v, next(own)) for v in parts) for parts in tangent.taps)
        equations, original = [], {}
        for eqn in tangent.program.equations:
            thinned = self.equation(eqn)
            equations.append(thinned)
            original[thinned] = eqn
        exits: list[Atom] = []
        components: list[Component] = []
        for component, atom, batched in zip(
            tangent.components, tangent.exits, self.batched, strict=False
        ):
            if isinstance(atom, Var) and atom in self.axis:
                _must(self.axis[atom] == (0 if batched else None))
                atom = self.part(atom, 0) if batched else atom
            shape = (self.few, *component.shape[1:]) if batched else component.shape
            exits.append(atom)
            components.append(replace(component, shape=shape))
        shapes = {c.shape for c in tangent.components}
        _must(len({c.shape for c in components}) == len(shapes))  # kinds of units are shapes
        program = replace(tangent.program, equations=tuple(equations))
        few = replace(
            tangent,
            program=program,
            components=tuple(components),
            entries=entries,
            taps=taps,
            exits=tuple(exits),
        )
        return Samples(tangent, few, self.size, self.few, self.batched, original, self.parts)

    def equation(self, eqn: Equation) -> Equation:
        tangents = [isinstance(a, Var) and a in self.axis for a in eqn.inputs]
        if not any(tangents):
            return eqn
        axes = [self.axis.get(a) if isinstance(a, Var) else None for a in eqn.inputs]
        if all(a is None for a in axes):
            repeated, new, sizes = self.added(eqn, tangents)
            return self.resized(eqn, repeated, [new] * len(eqn.outputs), sizes)
        rule = _RULES.get(eqn.name, _elementwise if eqn.name in ELEMENTWISE else None)
        if rule is None or eqn.bodies:
            raise NotAlike
        ins, outs, params = rule(eqn, axes, self.size, self.few)
        _must(all(a in (None, b) for a, b in zip(axes, ins, strict=True)))
        return self.resized(eqn, ins, outs, params)

    def added(self, eqn: Equation, tangents: Sequence[bool]) -> tuple[Axes, int | None, dict]:
        """An axis of the result along which tangents are repeated: that may be the samples'."""
        shape = eqn.outputs[0].shape
        none: Axes = [None] * len(tangents)
        if eqn.name == "broadcast_in_dim":
            dims, own = eqn.params["broadcast_dimensions"], eqn.inputs[0].shape
            along = {d for a, d in enumerate(dims) if own[a] == shape[d]}
        elif eqn.name in ELEMENTWISE:
            read = [a.shape for a, own in zip(eqn.inputs, tangents, strict=True) if own]
            along = {d for s in read for d, n in enumerate(s) if n == shape[d]}
        else:
            return none, None, {}
        new = next((d for d, n in enumerate(shape) if n == self.size and d not in along), None)
        if new is None:
            return none, None, {}
        if eqn.name == "broadcast_in_dim":
            return none, new, {"shape": _put(shape, new, self.few)}
        whole = lambda a: len(a.shape) > new and a.shape[new] == self.size
        return [new if whole(a) else None for a in eqn.inputs], new, {}

    def resized(self, eqn: Equation, ins: Axes, outs: Axes, params: Mapping[str, Any]) -> Equation:
        pairs = list(zip(eqn.outputs, outs, strict=True))
        self.axis.update(pairs)
        return replace(
            eqn,
            inputs=tuple(
                a if axis is None else self.part(a, axis)
                for a, axis in zip(eqn.inputs, ins, strict=True)
            ),
            outputs=tuple(v if axis is None else self.part(v, axis) for v, axis in pairs),
            params={**eqn.params, **params},
        )


# ----------------------------------------------------------------------------------------- rules
# From the axes of samples of the operands (None: no tangent, or a tangent without one) to those of
# all operands and of the results, and the parameters that differ.

Outcome = tuple[Axes, Axes, Mapping[str, Any]]
Rule = Callable[[Equation, list[int | None], int, int], Outcome]


def _put(sizes: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    return (*sizes[:at], value, *sizes[at + 1 :])


def _one(axes: Axes) -> int:
    """The one axis that operands have."""
    some = {a for a in axes if a is not None}
    if len(some) != 1:
        raise NotAlike
    return some.pop()


def _must(condition: bool) -> None:
    if not condition:
        raise NotAlike


def _elementwise(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    axis = _one(axes)
    same = lambda a: not a.shape or a.shape[axis] == 1  # for all samples
    return [None if same(a) else axis for a in eqn.inputs], [axis] * len(eqn.outputs), {}


def _each(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    return axes, axes, {}


def _unary(where: Callable[[Equation, int, int, int], tuple[int, Mapping[str, Any]]]) -> Rule:
    """A rule about the first operand: where its axis goes."""

    def of_first(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
        axis = _one(axes)
        _must(axes[0] == axis)
        out, params = where(eqn, axis, size, few)
        return [axis, *[None] * (len(axes) - 1)], [out] * len(eqn.outputs), params

    return of_first


def _broadcast_in_dim(eqn, axis, size, few):
    out = eqn.params["broadcast_dimensions"][axis]
    return out, {"shape": _put(eqn.params["shape"], out, few)}


def _reshape(eqn, axis, size, few):
    old, new = eqn.inputs[0].shape, eqn.outputs[0].shape
    _must(prod(old) > 0)
    before = prod(old[:axis])
    places = [k for k, n in enumerate(new) if n == size and prod(new[:k]) == before]
    _must(len(places) == 1)
    return places[0], {"new_sizes": _put(new, places[0], few)}


def _slice(eqn, axis, size, few):
    p = eqn.params
    whole = (p["start_indices"][axis], p["limit_indices"][axis]) == (0, size)
    _must(whole and (p["strides"] is None or p["strides"][axis] == 1))
    return axis, {"limit_indices": _put(p["limit_indices"], axis, few)}


def _not_along(name: str) -> Callable:
    def where(eqn, axis, size, few):
        along = eqn.params[name]
        _must(axis not in (along if isinstance(along, (tuple, list)) else (along,)))
        return axis, {}

    return where


def _reduce_sum(eqn, axis, size, few):
    along = eqn.params["axes"]
    _must(axis not in along)
    return axis - sum(a < axis for a in along), {}


def _window(eqn, axis, size, few):
    p = eqn.params
    ones = (p["window_dimensions"][axis], p["window_strides"][axis])
    dilations = [p[k][axis] for k in ("base_dilation", "window_dilation") if p[k]]
    _must(ones == (1, 1) and tuple(p["padding"][axis]) == (0, 0) and set(dilations) <= {1})
    return axis, {}


def _concatenate(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    axis = _one(axes)
    _must(axis != eqn.params["dimension"])
    return [axis] * len(axes), [axis], {}


def _pad(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    axis = _one(axes)
    _must(tuple(eqn.params["padding_config"][axis]) == (0, 0, 0))
    return [axis, None], [axis], {}


def _dot_general(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    contract, batch = eqn.params["dimension_numbers"]
    side, axis = next((k, a) for k, a in enumerate(axes) if a is not None)
    if axis in batch[side]:
        k = list(batch[side]).index(axis)
        return [batch[0][k], batch[1][k]], [k], {}
    _must(axis not in contract[side] and axes[1 - side] is None)
    free = [
        (k, a)
        for k in (0, 1)
        for a in range(len(eqn.inputs[k].shape))
        if a not in contract[k] and a not in batch[k]
    ]
    return axes, [len(batch[0]) + free.index((side, axis))], {}


def _conv(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    dims = eqn.params["dimension_numbers"]
    whole = axes[0] == dims.lhs_spec[0] and axes[1] is None
    _must(whole and eqn.params["batch_group_count"] == 1)
    return axes, [dims.out_spec[0]], {}


def _gather(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    d, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    axis = _one(axes)
    _must(axes[0] == axis)
    if axis in d.operand_batching_dims:
        index = d.start_indices_batching_dims[list(d.operand_batching_dims).index(axis)]
        rest = [k for k in range(len(eqn.outputs[0].shape)) if k not in d.offset_dims]
        return [axis, index], [rest[index]], {}
    _must(sizes[axis] == size and axis not in d.start_index_map)
    inside = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    window = [a for a in range(len(sizes)) if a not in inside]
    return (
        [axis, None],
        [d.offset_dims[window.index(axis)]],
        {"slice_sizes": _put(sizes, axis, few)},
    )


def _dynamic_slice(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    axis = _one(axes)
    sizes = eqn.params["slice_sizes"]
    _must(axes[0] == axis and sizes[axis] == size)
    return [axis, *[None] * (len(axes) - 1)], [axis], {"slice_sizes": _put(sizes, axis, few)}


def _update_slice(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    axis = _one(axes)
    return [axis, axis, *[None] * (len(axes) - 2)], [axis], {}


def _scatter(eqn: Equation, axes: list[int | None], size: int, few: int) -> Outcome:
    d = eqn.params["dimension_numbers"]
    updates = eqn.inputs[2].shape
    inside = {*d.inserted_window_dims, *d.operand_batching_dims}
    window = [a for a in range(len(eqn.inputs[0].shape)) if a not in inside]
    rows = [u for u in range(len(updates)) if u not in d.update_window_dims]
    ways: list[Axes] = [
        [a, None, u]
        for a, u in zip(window, d.update_window_dims, strict=True)
        if a not in d.scatter_dims_to_operand_dims
    ]
    batching = zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True)
    ways += [[a, k, rows[k]] for a, k in batching]
    fits = [w for w in ways if all(b in (None, a) for a, b in zip(w, axes, strict=True))]
    _must(len(fits) == 1)
    return fits[0], [fits[0][0]], {}


_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _unary(_broadcast_in_dim),
    "reshape": _unary(_reshape),
    "transpose": _unary(lambda e, axis, *_: (e.params["permutation"].index(axis), {})),
    "rev": _unary(_not_along("dimensions")),
    "slice": _unary(_slice),
    "reduce_sum": _unary(_reduce_sum),
    "reduce_window_sum": _unary(_window),
    "concatenate": _concatenate,
    "pad": _pad,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "optimization_barrier": _each,
    **dict.fromkeys(CUMULATIVE, _unary(_not_along("axis"))),
    **{f"scatter{joint}{what}": _scatter for joint in "-_" for what in ("add", "mul", "sub")},
    "scatter": _scatter,
}
