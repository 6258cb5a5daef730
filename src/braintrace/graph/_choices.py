"""Slices, gathers and scatters at an index that varies: any place along the axis may be read.

Along the axes whose index is constant, or that are taken whole, elements stay where they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._jaxpr import Equation
from ._sets import NONE, Sources, joined, union


def any_slice(eqn: Equation, array: np.ndarray, facts: list[Any]) -> list[np.ndarray]:
    """`dynamic_slice(operand, *starts)`."""
    shape = eqn.outputs[0].shape
    at, varying = _part(facts[1:], eqn.inputs[0].shape, shape)
    picked = joined(array, varying, keep=True)[at]
    return [np.broadcast_to(picked, (*shape, picked.shape[-1]))]


def _part(starts: list[Any], full: tuple, part: tuple) -> tuple[tuple[slice, ...], list[int]]:
    """Where a part of an array may be: slices, and the axes along which its start varies."""
    at, varying = [], []
    for axis, (start, n, m) in enumerate(zip(starts, full, part, strict=True)):
        if n != m and start is None:
            at.append(slice(None))
            varying.append(axis)
        else:
            first = 0 if n == m else int(np.clip(int(start), 0, n - m))
            at.append(slice(first, first + m))
    return tuple(at), varying


def any_update(eqn: Equation, arrays: list[Sources], facts: list[Any]) -> list[np.ndarray]:
    """`dynamic_update_slice(operand, update, *starts)`."""
    shape = eqn.outputs[0].shape
    operand, update = arrays[:2]
    parts = [] if operand is None else [operand]
    if update is not None:
        at, varying = _part(facts[2:], shape, eqn.inputs[1].shape)
        update = joined(update, varying, keep=True)
        wide = np.full((*shape, update.shape[-1]), NONE)
        wide[at] = update
        parts.append(wide)
    return [union(parts)]


def any_gathered(eqn: Equation, array: np.ndarray, facts: list[Any]) -> list[np.ndarray]:
    """`gather(operand, indices)`."""
    d, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.outputs[0].shape
    full = eqn.inputs[0].shape
    array = joined(array, [a for a in d.start_index_map if sizes[a] != full[a]], keep=True)
    window = [
        a
        for a in range(array.ndim - 1)
        if a not in d.collapsed_slice_dims and a not in d.operand_batching_dims
    ]
    array = array[
        tuple(
            slice(None) if a in d.operand_batching_dims else slice(0, sizes[a])
            for a in range(array.ndim - 1)
        )
    ]
    # The result's axes that are no offsets are those of the indices, in order.
    rows = [o for o in range(len(shape)) if o not in d.offset_dims]
    wide = [1] * len(shape)
    order, place = [], []
    for a, i in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        order.append(a)
        place.append(rows[i])
    for a, o in zip(window, d.offset_dims, strict=True):
        order.append(a)
        place.append(o)
    rest = [a for a in range(array.ndim - 1) if a not in order]
    moved = array.transpose([*order, *rest, array.ndim - 1])
    moved = moved.reshape((*moved.shape[: len(order)], moved.shape[-1]))  # the rest has size one
    for k, o in enumerate(place):
        wide[o] = moved.shape[k]
    moved = moved.transpose([*np.argsort(place), moved.ndim - 1])
    return [np.broadcast_to(moved.reshape((*wide, moved.shape[-1])), (*shape, moved.shape[-1]))]


def any_scattered(eqn: Equation, arrays: list[Sources], facts: list[Any]) -> list[np.ndarray]:
    """`scatter(operand, indices, updates)` and its adding form."""
    operand, _, updates = arrays
    parts = [] if operand is None else [operand]
    if updates is not None:
        parts.append(_landing(eqn, updates))
    return [union(parts)]


def _landing(eqn: Equation, updates: np.ndarray) -> np.ndarray:
    d, shape = eqn.params["dimension_numbers"], eqn.outputs[0].shape
    rows = [u for u in range(updates.ndim - 1) if u not in d.update_window_dims]
    window = [
        a
        for a in range(len(shape))
        if a not in d.inserted_window_dims and a not in d.operand_batching_dims
    ]
    to: dict[int, int] = dict(zip(window, d.update_window_dims, strict=True))
    for a, i in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
        to[a] = rows[i]
    placed = d.scatter_dims_to_operand_dims
    fixed = {a: u for a, u in to.items() if a not in placed or updates.shape[u] == shape[a]}
    loose = [u for u in range(updates.ndim - 1) if u not in fixed.values()]
    array = joined(updates, loose) if loose else updates
    left = [u for u in range(updates.ndim - 1) if u not in loose]
    axes = sorted(fixed)
    array = array.transpose([*(left.index(fixed[a]) for a in axes), array.ndim - 1])
    size = [array.shape[axes.index(a)] if a in fixed else 1 for a in range(len(shape))]
    array = array.reshape((*size, array.shape[-1]))
    out = np.full((*shape, array.shape[-1]), NONE)
    at = tuple(slice(0, size[a]) if a in fixed else slice(None) for a in range(len(shape)))
    out[at] = array
    return out
