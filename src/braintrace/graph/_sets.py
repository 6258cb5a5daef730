"""Sets of source numbers, one per element of a value: an integer array with one more axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NONE = -1
MOST_SOURCES = 1 << 24  # of the sets of one variable; larger ones count as mixing

Sources = np.ndarray | None
Result = list[np.ndarray] | str


def union(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Sets of sources per element: sorted, without doubles, as narrow as possible."""
    first = arrays[0]
    if all(a is first or (a.shape == first.shape and np.array_equal(a, first)) for a in arrays):
        if first.shape[-1] <= 1:
            return first
    both = np.sort(np.concatenate(arrays, axis=-1), axis=-1)[..., ::-1]
    if both.shape[-1] > 1:
        double = np.concatenate(
            [np.zeros((*both.shape[:-1], 1), bool), both[..., 1:] == both[..., :-1]], axis=-1
        )
        both = np.sort(np.where(double, NONE, both), axis=-1)[..., ::-1]
    width = int((both != NONE).sum(-1).max(initial=0))
    return both[..., :width]


def joined(array: np.ndarray, axes: Sequence[int], keep: bool = False) -> np.ndarray:
    """One set for all elements along the axes; `keep` leaves them with size one."""
    axes = sorted(a % (array.ndim - 1) for a in axes)
    rest = [a for a in range(array.ndim - 1) if a not in axes]
    moved = array.transpose([*rest, *axes, array.ndim - 1])
    head = moved.shape[: len(rest)]
    width = int(np.prod(moved.shape[len(rest) :], dtype=np.int64))
    out = union([moved.reshape((*head, width))])
    if keep:
        out = out.reshape(
            (*(1 if a in axes else array.shape[a] for a in range(array.ndim - 1)), out.shape[-1])
        )
    return out
