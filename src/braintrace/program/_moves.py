"""Moves, done on arrays of anything: of numbers, of tiles, of the sources of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ._records import Equation, Params

Move = Callable[[Params, Sequence[np.ndarray]], np.ndarray]


def moved(eqn: Equation, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """What an equation of `MOVES` makes of these arrays; the sizes are those of its parameters."""
    return MOVES[eqn.name](eqn.params, arrays)


def _broadcast_in_dim(p: Params, arrays: Sequence[np.ndarray]) -> np.ndarray:
    sizes = [1] * len(p["shape"])
    for n, d in zip(arrays[0].shape, p["broadcast_dimensions"], strict=True):
        sizes[d] = n
    return np.broadcast_to(arrays[0].reshape(sizes), p["shape"])


def _slice(p: Params, arrays: Sequence[np.ndarray]) -> np.ndarray:
    strides = p["strides"] or (1,) * len(p["start_indices"])
    return arrays[0][tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


MOVES: dict[str, Move] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda p, arrays: np.concatenate(arrays, p["dimension"]),
    "reshape": lambda p, arrays: arrays[0].reshape(p["new_sizes"]),
    "rev": lambda p, arrays: np.flip(arrays[0], p["dimensions"]),
    "slice": _slice,
    "transpose": lambda p, arrays: arrays[0].transpose(p["permutation"]),
}
