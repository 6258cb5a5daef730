"""Along which axes an equation treats the places alike, and apart from each other.

A *line* of an equation is an axis of its results, with the axis of each operand that it runs along:
the results at place i of the line read those operands at their place i only, and the operands
without such an axis wherever they like. For matrices `x` and `w`

    x @ w           (0, None) -> 0: a row of the result reads a row of x, and all of w
                    (None, 1) -> 1: a column reads a column of w, and all of x
    x + b[None]     (0, None) -> 0 and (1, 1) -> 1
    x.sum(0)        (1,) -> 0
    x.reshape(2, 3, 4), of x: (6, 4)      (1,) -> 2

If `alike`, the same is computed at each place, so that of fewer places it is the same equation:
`parameters` are then those of n places. This table is all that the passes know of axes: which are
those of a weight (`ops/_ties`), of samples (`graph/_samples`), of repeated values
(`engine/_repeats`), of units in a kernel (`kernel/_tiles`). What is not in it has no lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from ._canonical import CONTROL, CUMULATIVE, ELEMENTWISE, REDUCTIONS, SCATTERS
from ._records import Equation, Params


class Line(NamedTuple):
    """An axis of the results, and of the operands that it runs along."""

    operands: tuple[int | None, ...]
    result: int
    alike: bool = True


def lines(eqn: Equation) -> list[Line]:
    """The lines of an equation, at most one per axis of its results."""
    rule = _elementwise if eqn.name in ELEMENTWISE else _RULES.get(eqn.name)
    return [] if rule is None else list(rule(eqn))


def parameters(eqn: Equation, line: Line, n: int) -> Params:
    """The parameters of an equation of n places along a line that is alike."""
    name, of_result = _SIZES.get(eqn.name, ("", False))
    axis = line.result if of_result else line.operands[0]
    if not name or axis is None:
        return eqn.params
    sizes = list(eqn.params[name])
    if sizes[axis] == (eqn.outputs if of_result else eqn.inputs)[0].shape[axis]:
        sizes[axis] = n  # of a gather from one place of a batch it stays one
    return {**eqn.params, name: tuple(sizes)}


# Parameters that are sizes along the axes of the result, or else of the first operand.
_SIZES = {
    "broadcast_in_dim": ("shape", True),
    "iota": ("shape", True),
    "reshape": ("new_sizes", True),
    "slice": ("limit_indices", False),
    "gather": ("slice_sizes", False),
    "dynamic_slice": ("slice_sizes", False),
}


# --------------------------------------------------------------------------------------- the table


def _elementwise(eqn: Equation) -> Iterator[Line]:
    """An operand of one place, or without axes, is read at all of them."""
    for d, n in enumerate(eqn.outputs[0].shape):
        yield Line(tuple(d if a.shape and a.shape[d] == n else None for a in eqn.inputs), d)


def _first(eqn: Equation, axis: int | None, result: int) -> Line:
    """A line along the first operand; the others are read at all places."""
    return Line((axis, *(None for _ in eqn.inputs[1:])), result)


def _broadcast_in_dim(eqn: Equation) -> Iterator[Line]:
    axis = {d: a for a, d in enumerate(eqn.params["broadcast_dimensions"])}
    for d, n in enumerate(eqn.outputs[0].shape):
        a = axis.get(d)
        yield _first(eqn, a if a is not None and eqn.inputs[0].shape[a] == n else None, d)


def _iota(eqn: Equation) -> Iterator[Line]:
    ndim = len(eqn.outputs[0].shape)
    yield from (Line((), d) for d in range(ndim) if d != eqn.params["dimension"])


def _transpose(eqn: Equation) -> Iterator[Line]:
    yield from (_first(eqn, a, d) for d, a in enumerate(eqn.params["permutation"]))


def _reshape(eqn: Equation) -> Iterator[Line]:
    # In the order of the elements an axis stays what it is if as many lie before it, and in it:
    # of (2, 3, 4) reshaped to (6, 4), the last one, which 6 = 2 * 3 elements lie before.
    old, new = eqn.inputs[0].shape, eqn.outputs[0].shape
    axis = {prod(old[:a]): a for a, n in enumerate(old) if n != 1}
    for d, n in enumerate(new):
        at = axis.get(prod(new[:d]))
        if n == 1:
            yield _first(eqn, None, d)
        elif at is not None and old[at] == n and 0 not in new:
            yield _first(eqn, at, d)


def _slice(eqn: Equation) -> Iterator[Line]:
    p = eqn.params
    strides = p["strides"] or [1] * len(p["start_indices"])
    ranges = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    for d, (n, cut) in enumerate(zip(eqn.inputs[0].shape, ranges, strict=True)):
        if cut == (0, n, 1):
            yield _first(eqn, d, d)


def _pad(eqn: Equation) -> Iterator[Line]:
    for d, config in enumerate(eqn.params["padding_config"]):
        if tuple(config) == (0, 0, 0):
            yield _first(eqn, d, d)


def _except(parameter: str) -> Callable[[Equation], Iterator[Line]]:
    """All operands and results have the same axes; along some of them places meet."""

    def rule(eqn: Equation) -> Iterator[Line]:
        ndim = len(eqn.outputs[0].shape)
        named = eqn.params.get(parameter, ndim - 1)
        met = named if isinstance(named, tuple | list) else (named,)
        yield from (Line((d,) * len(eqn.inputs), d) for d in range(ndim) if d not in met)

    return rule


def _reduction(eqn: Equation) -> Iterator[Line]:
    left = [a for a in range(len(eqn.inputs[0].shape)) if a not in eqn.params["axes"]]
    yield from (_first(eqn, a, d) for d, a in enumerate(left))


def _window(eqn: Equation) -> Iterator[Line]:
    p = eqn.params
    for d, n in enumerate(p["window_dimensions"]):
        dilations = {p[k][d] for k in ("base_dilation", "window_dilation") if p[k]}
        if (n, p["window_strides"][d], *p["padding"][d]) == (1, 1, 0, 0) and dilations <= {1}:
            yield Line((d,) * len(eqn.inputs), d)


def _leading(behind: Callable[[Equation], int]) -> Callable[[Equation], Iterator[Line]]:
    """A function of the last axes, mapped over those before them."""

    def rule(eqn: Equation) -> Iterator[Line]:
        ndim = len(eqn.outputs[0].shape) - behind(eqn)
        yield from (Line((d,) * len(eqn.inputs), d) for d in range(ndim))

    return rule


def _triangular_solve(eqn: Equation) -> Iterator[Line]:
    """Of right sides that are columns, or rows, each is solved for alone."""
    yield from _leading(lambda eqn: 2)(eqn)
    apart = len(eqn.outputs[0].shape) - (1 if eqn.params["left_side"] else 2)
    yield Line((None, apart), apart)


def _dot_general(eqn: Equation) -> Iterator[Line]:
    # The axes of the result: those of the batch, the free ones of the left, those of the right.
    contracted, (left, right) = eqn.params["dimension_numbers"]
    yield from (Line(pair, d) for d, pair in enumerate(zip(left, right, strict=True)))
    d = len(left)
    for side, batch in enumerate((left, right)):
        for a in range(len(eqn.inputs[side].shape)):
            if a not in contracted[side] and a not in batch:
                yield Line((None, a) if side else (a, None), d)
                d += 1


def _conv(eqn: Equation) -> Iterator[Line]:
    p, dims = eqn.params, eqn.params["dimension_numbers"]
    if p["batch_group_count"] == 1:
        yield Line((dims.lhs_spec[0], None), dims.out_spec[0])
        # In groups, a channel of the result reads channels of the image that others do not.
        alike = p["feature_group_count"] == 1
        yield Line((None, dims.rhs_spec[0]), dims.out_spec[1], alike)


def _dynamic_slice(eqn: Equation) -> Iterator[Line]:
    # Where it takes a whole axis, JAX moves the start to 0.
    for d, n in enumerate(eqn.params["slice_sizes"]):
        if n == eqn.inputs[0].shape[d]:
            yield _first(eqn, d, d)


def _dynamic_update_slice(eqn: Equation) -> Iterator[Line]:
    array, update, *starts = eqn.inputs
    anywhere = (None,) * len(starts)
    for d, n in enumerate(array.shape):
        alike = update.shape[d] == n  # else only some places read the update
        yield Line((d, d if alike else None, *anywhere), d, alike)


def _gather(eqn: Equation) -> Iterator[Line]:
    """Rows of the result belong to rows of indices; what is behind them, to axes of the array."""
    p, d = eqn.params, eqn.params["dimension_numbers"]
    array, indices = eqn.inputs
    rows = [r for r in range(len(eqn.outputs[0].shape)) if r not in d.offset_dims]
    of_batch = dict(zip(d.start_indices_batching_dims, d.operand_batching_dims, strict=True))
    for k in range(len(indices.shape) - 1):
        yield Line((of_batch.get(k), k), rows[k])
    gone = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    window = [a for a in range(len(array.shape)) if a not in gone]
    for a, r in zip(window, d.offset_dims, strict=True):
        if p["slice_sizes"][a] == array.shape[a]:
            yield Line((a, None), r)


def _scatter(eqn: Equation) -> Iterator[Line]:
    d = eqn.params["dimension_numbers"]
    array, _, updates = eqn.inputs
    rows = [u for u in range(len(updates.shape)) if u not in d.update_window_dims]
    for a, k in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
        yield Line((a, k, rows[k]), a)
    gone = {*d.inserted_window_dims, *d.operand_batching_dims}
    window = [a for a in range(len(array.shape)) if a not in gone]
    update = dict(zip(window, d.update_window_dims, strict=True))
    for a in {*window, *d.inserted_window_dims}:
        alike = a in update and updates.shape[update[a]] == array.shape[a]
        yield Line((a, None, update[a] if alike else None), a, alike)


_RULES: dict[str, Callable[[Equation], Iterator[Line]]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "cholesky": _leading(lambda eqn: 2),
    "concatenate": _except("dimension"),
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": _leading(lambda eqn: len(eqn.params["fft_lengths"])),
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _except("dimensions"),
    "select_and_gather_add": _window,
    "slice": _slice,
    "sort": _except("dimension"),
    "top_k": _except("axis"),
    "transpose": _transpose,
    "triangular_solve": _triangular_solve,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(CUMULATIVE, _except("axis")),
    **dict.fromkeys(SCATTERS, _scatter),
}
CANONICAL = ELEMENTWISE | CONTROL | _RULES.keys()  # what passes know, of all primitives
