"""What each result of a linear primitive reads: one incidence rule per primitive.

Data movement is executed on the arrays of source indices themselves; an element-wise primitive
takes the union, and so does a slice or a gather at an index that varies: it may read any place
along the axis. For `a` with the sets [[0], [1]] and `b` with [[2], [3]]:

    rev(a)             [[1], [0]]           a + b             [[2, 0], [3, 1]]
    a[i:i+1]           [[1, 0]]             pad(a, (1, 0))    [[NONE], [0], [1]]
    diag(c) @ a        [[0], [1]]           M @ a             [[1, 0], [1, 0]]

What that means for units follows from two numbers, the `width` of an equation: how many elements
a result reads, and whether one goes to several results. Of sums and products they are those of a
table: the numbers of the elements that each result reads, which is a broadcast view where results
read the same.

    rev, pad, diag(c) @ a    reads 1               moves elements
    reduce_sum(a)            reads 2, no fan-out   a sum: it depends on where its results go
    M @ a                    reads 2, fans out     mixes elements

What mixes is not computed unless it is followed. *Facts* about an operand are
what the analysis knows of its value at compile time: integers, where a floating value is zero, or
nothing (None).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from ..program import (
    CUMULATIVE,
    ELEMENTWISE,
    MOVES,
    ZERO_AT_ZERO,
    Atom,
    Const,
    Equation,
    Program,
    bind,
    flatten,
    is_inexact,
    lines,
    moved,
)
from ._contract import convolved, product
from ._sets import (
    NONE,
    TOO_MANY,
    Fact,
    Facts,
    Nonzero,
    Result,
    Sources,
    combined,
    empty,
    joined,
    nonzero,
    padded,
    rearranged,
    too_many,
    union,
    windows,
)

_EXACT = 1 << 24  # float32 counts so far
_MOST_SOLVED = 64  # elements that an equation of a solve may join
_MOST_FOLDED = 1 << 22  # elements of an array that is worth computing at compile time
Rule = Callable[[Equation, list[Sources], Facts], Result]
Table = Callable[[Equation, int, Facts, np.ndarray], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Width:
    """How many elements a result reads, whether one goes to several, and what to call it."""

    reads: float
    fans: bool
    why: str


def width(eqn: Equation, arrays: list[Sources], facts: Facts) -> Width:
    """The width of an equation with these varying operands."""
    if eqn.name in _TABLES:
        tables = [table for _, table in _tables(eqn, arrays, facts)]
        reads, fans = np.inf, True
        if all(t is not None for t in tables):
            reads = max(t.shape[-1] for t in tables)
            fans = eqn.name not in _POOLING and any(map(_fans, tables))
        return Width(reads, fans, _MIXES.get(eqn.name, _OTHER if fans else _SUM).format(eqn.name))
    if eqn.name in ELEMENTWISE or eqn.name in _RULES:
        return Width(1, False, "")
    return Width(np.inf, True, _MIXES.get(eqn.name, _OTHER).format(eqn.name))


def _tables(eqn: Equation, arrays: list[Sources], facts: Facts) -> Iterator[tuple[np.ndarray, Any]]:
    """The sets of every varying operand, and which of its elements each result reads."""
    for side, (array, a) in enumerate(zip(arrays, eqn.inputs, strict=True)):
        if array is not None:
            numbers = np.arange(prod(a.shape)).reshape(a.shape)
            yield array, _TABLES[eqn.name](eqn, side, facts, numbers)


def _once(table: np.ndarray) -> np.ndarray:
    """The rows of a table without those that a broadcast repeats: [[0, 1]] of [[0, 1], [0, 1]]."""
    return table[tuple(slice(None) if stride else slice(0, 1) for stride in table.strides[:-1])]


def _fans(table: np.ndarray) -> bool:
    """Whether an element is read by several results."""
    once = _once(table)
    read = once[once != NONE]
    return bool(len(read)) and (once.shape != table.shape or bool(np.bincount(read).max() > 1))


def _summed(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """The union of the sets that each result reads."""
    out = []
    for array, table in _tables(eqn, arrays, facts):
        if table is None:
            return _everything(eqn, arrays, facts)
        once, m = _once(table), array.shape[-1]
        flat = array.reshape(prod(array.shape[:-1]), m)
        rows = np.concatenate([flat, np.full((1, m), NONE)])  # the last is what NONE stands for
        sets = union([rows[once].reshape((*once.shape[:-1], once.shape[-1] * m))])
        out.append(np.broadcast_to(sets, (*table.shape[:-1], sets.shape[-1])))
    return [union(out)]


def incidence(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """What each result reads; of an equation without a rule, everything."""
    default = _elementwise if eqn.name in ELEMENTWISE else _everything
    return _RULES.get(eqn.name, default)(eqn, arrays, facts)


def _everything(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    sources = [np.unique(a[a != NONE]) for a in arrays if a is not None]
    all_of_them = np.unique(np.concatenate(sources))
    return [np.broadcast_to(all_of_them, (*v.shape, len(all_of_them))) for v in eqn.outputs]


def _elementwise(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    shape = eqn.outputs[0].shape
    return [union([np.broadcast_to(a, (*shape, a.shape[-1])) for a in arrays if a is not None])]


def _moved(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    return _joint(eqn, arrays, lambda *parts: moved(eqn, parts))


def _pad(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    def move(array: np.ndarray, filler: np.ndarray) -> np.ndarray:
        wide = padded(array, eqn.params["padding_config"])
        return np.where(wide == NONE, filler, wide)

    return _joint(eqn, arrays, move)


def _joint(eqn: Equation, arrays: list[Sources], move: Callable[..., np.ndarray]) -> Result:
    """The sets of all operands, moved into one array."""
    return [combined(arrays, [a.shape for a in eqn.inputs], move)]


def _window(eqn: Equation, side: int, facts: Facts, numbers: np.ndarray) -> np.ndarray | None:
    """Pooling: each result reads the elements of its window."""
    if side:
        return None
    p = eqn.params
    ones = (1,) * len(p["window_dimensions"])
    dilation, inner = p["base_dilation"] or ones, p["window_dilation"] or ones
    config = [(lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], dilation, strict=True)]
    wide = padded(numbers, config)
    offsets = np.ndindex(*p["window_dimensions"])
    at = windows(offsets, inner, p["window_strides"], eqn.outputs[0].shape)
    return union([wide[part][..., None] for part in at])


def _along(axis: Callable[[Equation], int]) -> Table:
    """The results read all places along an axis of the last operand."""

    def rule(eqn: Equation, side: int, facts: Facts, numbers: np.ndarray) -> np.ndarray | None:
        if side < len(eqn.inputs) - 1:
            return None
        read = np.moveaxis(numbers, axis(eqn), -1)
        return np.broadcast_to(np.expand_dims(read, axis(eqn)), (*numbers.shape, read.shape[-1]))

    return rule


def _triangular(eqn: Equation, side: int, facts: Facts, numbers: np.ndarray) -> np.ndarray | None:
    """A solve by a diagonal matrix divides each element by a scalar."""
    where = nonzero(facts[0])
    where = np.ones(eqn.inputs[0].shape, bool) if where is None else where
    if side and not (np.tril(where, -1) if eqn.params["lower"] else np.triu(where, 1)).any():
        return numbers[..., None]
    behind = 2 if eqn.params["left_side"] else 1
    return _along(lambda e: len(e.outputs[0].shape) - behind)(eqn, side, facts, numbers)


def _solve(eqn: Equation, side: int, facts: Facts, numbers: np.ndarray) -> np.ndarray | None:
    """Of `x` with `matvec(x) = b`, those elements of b that `matvec` links to it."""
    # `A x = b` with A = [[2, 1, 0], [1, 2, 0], [0, 0, 3]] known by where it is zero: the function
    # `x -> A x` takes sources [[0], [1], [2]] to [[0, 1], [0, 1], [2]]. Its inverse links whatever
    # A links in any number of steps, so labels are connected components, [0, 0, 1]: x0 and x1 read
    # b0 and b1, x2 reads b2 alone.
    n, matvec = eqn.params["const_lengths"].matvec, eqn.params["jaxprs"].matvec
    if len(eqn.outputs) > 1 or side < len(eqn.inputs) - 1:
        return None
    size, constants = numbers.size, [None] * n
    sets = _body(matvec, [*constants, numbers[..., None]], [*facts[:n], None], _MOST_SOLVED)
    if isinstance(sets, str):
        return None
    read = sets[0].reshape(size, -1)
    row, slot = np.nonzero(read != NONE)
    pairs = (np.ones(len(row), bool), (row, read[row, slot]))
    graph = sparse.csr_matrix(pairs, shape=(size, size))
    n, label = csgraph.connected_components(graph, directed=False)
    joint = _collect(label, np.arange(size)[:, None], n, (n,))
    return joint[label].reshape((*numbers.shape, joint.shape[-1]))


def _body(jaxpr: Any, arrays: Sequence[Sources], facts: Sequence[Fact], most: int = 1) -> Result:
    """The sets of a function in which no result reads more than `most` elements of another."""
    program, values = flatten(jaxpr)
    known: dict[Atom, Fact] = dict(zip(program.inputs, facts, strict=True))
    known.update(zip(program.consts, values, strict=True))
    pairs = zip(program.inputs, arrays, strict=True)
    sets: dict[Atom, np.ndarray] = {v: a for v, a in pairs if a is not None}
    return sets_of(program, sets, known, most)


def sets_of(
    program: Program, sets: dict[Atom, np.ndarray], facts: dict[Atom, Fact], most: int
) -> Result:
    """The sets of the outputs of a program without control flow; or why one reads too many."""
    for eqn in program.equations:
        read = [sets.get(a) for a in eqn.inputs]
        about = [a.value if isinstance(a, Const) else facts.get(a) for a in eqn.inputs]
        if all(a is None for a in read):
            facts.update(zip(eqn.outputs, fold(eqn, about), strict=True))
            continue
        what = width(eqn, read, about)
        outs = what.why if what.reads > most else incidence(eqn, read, about)
        if isinstance(outs, str):
            return outs
        sets.update(zip(eqn.outputs, outs, strict=True))
    return [sets.get(o, empty(o.shape)) for o in program.outputs]


def _sharded(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """`shard_map`: the function of each device, on its parts of the arrays."""
    p, mesh = eqn.params, dict(eqn.params["mesh"].shape)

    def part(spec: Any, place: dict[str, int], shape: tuple[int, ...]) -> tuple[slice, ...]:
        out = []
        for axis, n in enumerate(shape):
            names = spec[axis] if axis < len(spec) else None
            names = () if names is None else names if isinstance(names, tuple) else (names,)
            size = n // prod([mesh[k] for k in names])
            at = 0
            for k in names:
                at = at * mesh[k] + place[k]
            out.append(slice(at * size, (at + 1) * size))
        return tuple(out)

    outs: list[list[np.ndarray]] = [[] for _ in eqn.outputs]
    # Four units on a mesh {"d": 2}: device 0 has the sets of units 0 and 1, device 1 those of 2 and
    # 3. The function is followed on each, and what its results read is put where the device leaves
    # them, NONE elsewhere; the union over devices is the set of the whole array.
    for index in np.ndindex(*mesh.values()):
        place = dict(zip(mesh, index, strict=True))
        here = [
            None if a is None else a[part(spec, place, a.shape[:-1])]
            for a, spec in zip(arrays, p["in_specs"], strict=True)
        ]
        sets = _body(p["jaxpr"], here, [None] * len(here))
        if isinstance(sets, str):
            return f"{sets} in a shard_map"
        for out, of_device, var, spec in zip(outs, sets, eqn.outputs, p["out_specs"], strict=True):
            whole = np.full((*var.shape, of_device.shape[-1]), NONE)
            whole[part(spec, place, var.shape)] = of_device
            out.append(whole)
    return [union(out) for out in outs]


def fold(eqn: Equation, facts: Facts) -> Facts:
    """Facts about the results of an equation without tangents.

    Integers that depend on nothing are computed: the indices of gathers, slices and rolls. About
    floating values the fact is where they are zero.
    """
    nothing: Facts = [None] * len(eqn.outputs)
    if eqn.effects or eqn.bodies or any(v.size > _MOST_FOLDED for v in eqn.outputs):
        return nothing
    if any(is_inexact(v.dtype) for v in eqn.outputs):
        return _zeros(eqn, facts) if any(k is not None for k in facts) else nothing
    plain = all(jax.dtypes.issubdtype(v.dtype, np.integer) or v.dtype == bool for v in eqn.outputs)
    if not plain or any(k is None or isinstance(k, Nonzero) for k in facts):
        return nothing
    with jax.ensure_compile_time_eval():
        return [np.asarray(o) for o in bind(eqn, facts)]


def _zeros(eqn: Equation, facts: Facts) -> Facts:
    """A value that is not zero counts as one source, and a result that reads it may not be zero."""
    # `W * mask`, mask = [[1, 0], [0, 1]], of which only the mask is known: masks = [None, mask], a
    # product is zero where a factor is, so `where` is the mask. `mask @ mask` by the incidence rule
    # with one source 0 where the mask may be other than zero, NONE where it is not:
    #
    #     arrays    [[0, NONE], [NONE, 0]]  of the left operand; the right one counts by its facts
    #     sets      (0, 0) reads {0}, (0, 1) reads nothing: that element is zero for certain
    #
    # which is how a diagonal made of `eye`, masks and products is recognised in `M @ h`.
    masks = [nonzero(k) for k in facts]
    shape = eqn.outputs[0].shape
    if eqn.name in ("mul", "div"):  # 0 / b is 0
        some = [f for f in (masks if eqn.name == "mul" else masks[:1]) if f is not None]
        where = [np.broadcast_to(np.logical_and.reduce(np.broadcast_arrays(*some)), shape)]
    elif eqn.name in ELEMENTWISE and eqn.name not in ZERO_AT_ZERO:
        return [None]
    elif eqn.name in ELEMENTWISE and eqn.name != "select_n" and any(f is None for f in masks):
        return [None] * len(eqn.outputs)
    else:
        every = eqn.name in ELEMENTWISE
        arrays: list[Sources] = [
            np.where(True if f is None else f, 0, NONE)[..., None]
            * np.ones((*a.shape, 1), np.int64)
            if every or is_inexact(a.dtype)
            else None
            for a, f in zip(eqn.inputs, masks, strict=True)
        ]
        if eqn.name in ("dot_general", "select_n"):
            arrays[1 if eqn.name == "dot_general" else 0] = None
        what = width(eqn, arrays, facts)
        sets = what.why if what.reads > 1 and what.fans else incidence(eqn, arrays, facts)
        if isinstance(sets, str):
            return [None] * len(eqn.outputs)
        where = [(m != NONE).any(-1) for m in sets]
    return [None if w.all() else Nonzero(w) for w in where]


# A place that varies may be any place along its axes: there the sets are joined, and any place, say
# the first, reads and writes the same.


def _indexed(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """Gathers and slices: run them on the source indices."""
    array, full, sizes = arrays[0], eqn.inputs[0].shape, eqn.params["slice_sizes"]
    assert array is not None
    varying = [a for a, k in enumerate(facts[1:]) if k is None]
    if eqn.name == "gather" and varying:
        varying = eqn.params["dimension_numbers"].start_index_map
    if axes := [a for a in varying if sizes[a] != full[a]]:
        array = joined(array, axes, keep=True)
    if too_many(eqn.outputs[0].shape, array.shape[-1]):
        return f"{eqn.name} {TOO_MANY}"
    if "fill_value" in eqn.params:  # what is read outside the array is no element of it
        eqn = replace(eqn, params={**eqn.params, "fill_value": NONE})
    places = _places(eqn, facts, slice(1, None))
    return [rearranged(array, lambda a: _run(eqn, [np.broadcast_to(a, full), *places]))]


def _places(eqn: Equation, facts: Facts, at: slice) -> list[np.ndarray]:
    """The places that operands `at` say, the first where that varies."""
    pairs = zip(eqn.inputs[at], facts[at], strict=True)
    return [np.full(a.shape, 0 if k is None else k, a.dtype) for a, k in pairs]


def _overwrite(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """`scatter` and `dynamic_update_slice`."""
    update = 1 if eqn.name == "dynamic_update_slice" else 2
    if any(k is None for k in facts[_INDICES[update]]):
        return _write_anywhere(eqn, arrays, facts, update)

    def write(operand: np.ndarray, updates: np.ndarray) -> np.ndarray:
        values: list[Any] = [operand, *facts[1:]]
        values[update] = updates
        return _run(eqn, values)

    shapes = [eqn.inputs[0].shape, eqn.inputs[update].shape]
    return [combined([arrays[0], arrays[update]], shapes, write)]


_INDICES = {1: slice(2, None), 2: slice(1, 2)}  # where the places are, by where the updates are


# A write at an unknown place i of `a` (sources 0, 1, 2) with the update u (source 3), one element:
#
#     sets       [[3]]                  the updates, joined over all that may go to one place
#     landing    [[3], [3], [3]]        written at the first place, joined along the varying axis
#                                       and repeated: every place may hold it
#     result     [[0, 3], [1, 3], [2, 3]]    or what was there before
#
# With updates of shape (2, n) at two unknown rows of (k, n), axis 0 varies and axis 1 stays in
# place: the two rows are joined element by element, and so are the k rows where they may land.
def _write_anywhere(eqn: Equation, arrays: list[Sources], facts: Facts, update: int) -> Result:
    operand, updates = arrays[0], arrays[update]
    parts = [] if operand is None else [operand]
    if updates is not None:
        shape, written = eqn.outputs[0].shape, eqn.inputs[update].shape
        # Along a line of the table of axes every place is written, with the update at that place.
        lines_of = [line for line in lines(eqn) if line.alike]
        varying = {*range(len(shape))} - {line.result for line in lines_of}
        joint = {*range(len(written))} - {line.operands[update] for line in lines_of}
        if update == 1:
            varying = joint = {a for a in varying if facts[2 + a] is None}
        sets = joined(updates, [*joint], keep=True)
        sets = np.broadcast_to(sets, (*written, sets.shape[-1]))
        alone: list[Sources] = [None] * len(arrays)
        alone[update] = sets
        about, at = list(facts), _INDICES[update]
        about[at] = _places(eqn, facts, at)
        landing = joined(np.asarray(_overwrite(eqn, alone, about)[0]), [*varying], keep=True)
        parts.append(np.broadcast_to(landing, (*shape, landing.shape[-1])))
    return [union(parts)]


def _accumulate(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """`scatter_add` at constant places: an element reads its own sources and those added to it."""
    operand, _, updates = arrays
    indices = facts[1]
    shape = eqn.outputs[0].shape
    size = prod(shape)
    if indices is None:
        params = {**eqn.params, "update_jaxpr": None, "update_consts": ()}
        plain = replace(eqn, primitive=jax.lax.scatter_p, params=params)
        return _write_anywhere(plain, arrays, facts, 2)
    parts = [] if operand is None else [operand]
    if updates is not None:
        # The transpose of a scatter is a gather: it tells where each update lands (0: nowhere).
        with jax.ensure_compile_time_eval():
            zeros = jax.numpy.zeros(shape, "float32")
            update = jax.ShapeDtypeStruct(eqn.inputs[2].shape, "float32")
            gather = jax.linear_transpose(lambda u: bind(eqn, [zeros, indices, u])[0], update)
            target = np.full(eqn.inputs[2].shape, NONE)
            index = np.arange(1, size + 1).reshape(shape)
            # The gather of the numbers 1, 2, 3, ... says where each update goes to. It runs in
            # float32, exact up to 2**24, so numbers of larger arrays go through digit by digit.
            for digit in range(1 + size // _EXACT):
                places = (index // _EXACT**digit % _EXACT).astype("float32")
                target += np.asarray(gather(places)[0]).astype(np.int64) * _EXACT**digit
        parts.append(_collect(target.reshape(-1), updates.reshape(target.size, -1), size, shape))
    return [union(parts)]


def _collect(target: np.ndarray, sources: np.ndarray, size: int, shape: tuple) -> np.ndarray:
    """Sets of sources per element, from the elements where rows of sources land."""
    # Rows 0, 1, 2 with sources 5, 6, 7 that land at elements 1, 0, 1:
    #
    #     target * end + source      1 * 8 + 5, 0 * 8 + 6, 1 * 8 + 7     a pair as one number,
    #     unique                     6, 13, 15                           sorted, without doubles
    #     at, source                 [0, 1, 1], [6, 5, 7]
    #     rank                       [0, 0, 1]    the place of each among those of its element
    #     out                        [[6, NONE], [5, 7]]
    row, slot = np.nonzero((sources != NONE) & (target[:, None] != NONE))
    end = int(sources.max(initial=0)) + 1
    at, source = np.divmod(np.unique(target[row] * end + sources[row, slot]), end)
    rank = np.arange(len(at)) - np.searchsorted(at, at)
    out = np.full((size, int(rank.max(initial=-1)) + 1), NONE)
    out[at, rank] = source
    return out.reshape((*shape, out.shape[-1]))


def _each(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """Several values passed on side by side."""
    pairs = zip(arrays, eqn.outputs, strict=True)
    return [empty(v.shape) if a is None else a for a, v in pairs]


def _select(eqn: Equation, arrays: list[Sources], facts: Facts) -> Result:
    """A selection by a constant reads one side only."""
    which = facts[0]
    if which is None:
        return _elementwise(eqn, arrays, facts)
    shape = eqn.outputs[0].shape
    index = np.broadcast_to(np.asarray(which, int), shape)[None]
    select = lambda *cases: np.take_along_axis(np.stack(cases), index, 0)[0]
    return [combined(arrays[1:], [shape] * (len(arrays) - 1), select)]


def _run(eqn: Equation, values: list[Any]) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        out = bind(eqn, [jax.numpy.asarray(v) for v in values])[0]
    return np.maximum(np.asarray(out).astype(np.int64), NONE)  # a fill value of any sign is NONE


NO_FORWARD = "custom_vjp_call has a backward rule that is not linear, and no forward derivative"
_SUM, _OTHER = "{} adds up units", "{} mixes elements"
_MIXES = {
    "dot_general": "a matrix product mixes units",
    "conv_general_dilated": "a convolution mixes units",
    "custom_vjp_call": NO_FORWARD,
}

# Windows may overlap. Of a maximum an element is chosen, and each result is looked at like a sum's.
_POOLING = ("reduce_window_sum", "select_and_gather_add")
# Sums and products by what each result reads of one of the operands; None for everything.
_TABLES: dict[str, Table] = {
    "reduce_sum": lambda e, side, facts, numbers: joined(numbers[..., None], e.params["axes"]),
    **dict.fromkeys(_POOLING, _window),
    "dot_general": product,
    "conv_general_dilated": convolved,
    "triangular_solve": _triangular,
    "tridiagonal_solve": _along(lambda e: len(e.outputs[0].shape) - 2),
    "custom_linear_solve": _solve,
    **dict.fromkeys(CUMULATIVE, _along(lambda e: e.params["axis"])),
}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(_TABLES, _summed),
    "pad": _pad,
    "gather": _indexed,
    "dynamic_slice": _indexed,
    "scatter": _overwrite,
    "optimization_barrier": _each,
    "device_put": _each,
    "select_n": _select,
    "dynamic_update_slice": _overwrite,
    "shard_map": _sharded,
    **{f"scatter{joint}{what}": _accumulate for joint in "-_" for what in ("add", "mul", "sub")},
}
