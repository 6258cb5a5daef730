"""Which axes of an operator's output are axes of its weight.

An output axis `a` is *tied* to a weight axis `b` when y[..., i_a, ...] reads only weights with
i_b = i_a. Ties come from one walk over the operator's program that carries, for every axis of
every value, the weight axis it runs along (or None). What is not in the table drops all
ties, which is always sound: the trace is then merely larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..program import ELEMENTWISE, Atom, Equation, Var, trace

# Per axis of a value: the weight axis it runs along. A value that does not read the weight: None.
Axes = tuple[int | None, ...]


def tied_axes(fun: Callable, args: tuple[Any, ...], index: int) -> tuple[tuple[int, int], ...]:
    """Pairs (output axis, axis of operand `index`) tied in `fun`; each axis at most once."""
    program, _ = trace(fun, *args)
    env: dict[Var, Axes] = {}
    source = program.inputs[index]
    env[source] = tuple(range(len(source.shape)))

    def read(atom: Atom) -> Axes | None:
        return env.get(atom) if isinstance(atom, Var) else None

    for eqn in program.equations:
        axes = [read(a) for a in eqn.inputs]
        if all(a is None for a in axes):
            continue
        rule = _RULES.get(eqn.name, _elementwise if eqn.name in ELEMENTWISE else _unknown)
        for out in eqn.outputs:
            env[out] = rule(eqn, out, axes)

    pairs: list[tuple[int, int]] = []
    for y_axis, w_axis in enumerate(read(program.outputs[0]) or ()):
        if w_axis is not None and all(w_axis != w for _, w in pairs):
            pairs.append((y_axis, w_axis))
    return tuple(pairs)


def _unknown(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    return (None,) * len(out.shape)


def _agree(rows: list[Axes | None], rank: int) -> Axes:
    dependent = [r for r in rows if r is not None]
    if any(len(r) != rank for r in dependent):
        return (None,) * rank
    return tuple(c[0] if len(set(c)) == 1 else None for c in zip(*dependent, strict=True))


def _elementwise(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    # An operand axis of size 1 may be broadcast without an equation of its own.
    rows: list[Axes | None] = []
    for atom, row in zip(eqn.inputs, axes, strict=True):
        if row is not None and len(row) == len(out.shape):
            sizes = zip(row, atom.shape, out.shape, strict=True)
            row = tuple(a if n == m else None for a, n, m in sizes)
        rows.append(row)
    return _agree(rows, len(out.shape))


def _broadcast_in_dim(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    source = axes[0] or ()
    result: list[int | None] = [None] * len(out.shape)
    for i, o in enumerate(eqn.params["broadcast_dimensions"]):
        if eqn.inputs[0].shape[i] == out.shape[o]:
            result[o] = source[i]
    return tuple(result)


def _reshape(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    # An axis survives when the sizes before it have the same product on both sides.
    shape, source = eqn.inputs[0].shape, axes[0] or ()
    start = {int(np.prod(shape[:i])): i for i, n in enumerate(shape) if n != 1}
    result: list[int | None] = []
    for o, n in enumerate(out.shape):
        i = start.get(int(np.prod(out.shape[:o])))
        result.append(source[i] if i is not None and n != 1 and shape[i] == n else None)
    return tuple(result)


def _drop(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    dropped = eqn.params["axes"]
    return tuple(a for i, a in enumerate(axes[0] or ()) if i not in dropped)


def _slice(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    if axes[0] is None:  # only the place depends on the weight
        return _unknown(eqn, out, axes)
    shape = eqn.inputs[0].shape
    return tuple(a if n == m else None for a, n, m in zip(axes[0], shape, out.shape, strict=True))


def _gather(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    # Whatever the indices are, an axis that is taken whole stays what it is.
    if axes[0] is None:
        return _unknown(eqn, out, axes)
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    taken = [i for i in range(len(sizes)) if i not in gone]
    result: list[int | None] = [None] * len(out.shape)
    for o, i in zip(dims.offset_dims, taken, strict=True):
        result[o] = axes[0][i] if sizes[i] == eqn.inputs[0].shape[i] else None
    return tuple(result)


def _concatenate(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    merged = list(_agree(axes, len(out.shape)))
    merged[eqn.params["dimension"]] = None
    return tuple(merged)


def _dot_general(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    # The output axes are: batch axes, free axes of the left, free axes of the right.
    contract, batch = eqn.params["dimension_numbers"]
    ranks = [len(a.shape) for a in eqn.inputs]
    free = [
        [i for i in range(n) if i not in (*c, *b)]
        for n, c, b in zip(ranks, contract, batch, strict=True)
    ]
    rows: list[Axes | None] = []
    for side, source in enumerate(axes):
        if source is not None:
            left, right = ([source[i] if s == side else None for i in free[s]] for s in (0, 1))
            rows.append((*(source[i] for i in batch[side]), *left, *right))
    return _agree(rows, len(out.shape))


def _conv(eqn: Equation, out: Var, axes: list[Axes | None]) -> Axes:
    if axes[0] is not None or eqn.params["batch_group_count"] != 1:
        return _unknown(eqn, out, axes)
    dims = eqn.params["dimension_numbers"]
    result: list[int | None] = [None] * len(out.shape)
    result[dims.out_spec[1]] = (axes[1] or ())[dims.rhs_spec[0]]
    return tuple(result)


_RULES: dict[str, Callable[[Equation, Var, list[Axes | None]], Axes]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": lambda e, out, axes: tuple((axes[0] or ())[p] for p in e.params["permutation"]),
    "reshape": _reshape,
    "slice": _slice,
    "dynamic_slice": _slice,
    "gather": _gather,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _drop),
}
