"""Random numbers: threefry, as a formula of four words.

A key is two words k, a `Pair`, and `threefry(k, n)` is two words that look like chance:

    fold_in(k, n)       threefry(k, (0, n))              a key
    split(k)[i]         threefry(k, (0, i))              a key
    bits(k)[i]          a ^ b of threefry(k, (0, i))     a word; (a, b) if it has 64 bits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from ..program import Params
from ._nodes import Node, Nodes, Pair, Piece, Shape

WORD = np.dtype(np.uint32)
Drawing: TypeAlias = Callable[[Nodes, Params, Sequence[Any]], Sequence[Node | Pair]]


def _hashed(nodes: Nodes, key: Pair, high: Node, low: Node) -> Pair:
    args = [key.re, key.im, high, low]
    return Pair(*(nodes.map(f"threefry{k}", WORD, args) for k in (0, 1)))


def _numbered(nodes: Nodes, keys: Pair, shape: Shape) -> Pair:
    """For every key an array of hashed numbers 0, 1, 2, ..."""
    lead = keys.re.shape
    full = (*lead, *shape)
    numbers = nodes.const(np.arange(prod(shape), dtype=WORD).reshape(shape))
    low = nodes.broadcast(numbers, full, range(len(lead), len(full)))
    spread = Pair(*(nodes.broadcast(a, full, range(len(lead))) for a in (keys.re, keys.im)))
    return _hashed(nodes, spread, nodes.const(WORD.type(0)), low)


def _cast(nodes: Nodes, a: Node, dtype: Any) -> Node:
    return a if a.dtype == dtype else nodes.map("cast", dtype, [a])


def _split(nodes: Nodes, params: Params, values: Sequence[Any]) -> Sequence[Pair]:
    return [_numbered(nodes, values[0], tuple(params["shape"]))]


def _fold_in(nodes: Nodes, params: Params, values: Sequence[Any]) -> Sequence[Pair]:
    keys, number = values
    return [_hashed(nodes, keys, nodes.const(WORD.type(0)), _cast(nodes, number, WORD))]


def _bits(nodes: Nodes, params: Params, values: Sequence[Any]) -> Sequence[Node]:
    width = params["bit_width"]
    dtype = np.dtype(f"uint{width}")
    found = _numbered(nodes, values[0], tuple(params["shape"]))
    if width < 64:
        return [_cast(nodes, nodes.map("xor", WORD, [found.re, found.im]), dtype)]
    high, low = (_cast(nodes, a, dtype) for a in (found.re, found.im))
    high = nodes.map("shift_left", dtype, [high, nodes.const(dtype.type(32))])
    return [nodes.map("or", dtype, [high, low])]


def _seed(nodes: Nodes, params: Params, values: Sequence[Any]) -> Sequence[Pair]:
    (seed,) = values
    high = nodes.broadcast(nodes.const(WORD.type(0)), seed.shape, ())
    if seed.dtype.itemsize == 8:
        shift = nodes.const(seed.dtype.type(32))
        high = _cast(nodes, nodes.map("shift_right_logical", seed.dtype, [seed, shift]), WORD)
    return [Pair(high, _cast(nodes, seed, WORD))]


def _wrap(nodes: Nodes, params: Params, values: Sequence[Any]) -> Sequence[Pair]:
    (words,) = values
    lead = words.shape[:-1]
    none = [0] * len(lead)
    parts = (nodes.slice(words, [*none, k], [*lead, k + 1]) for k in (0, 1))
    return [Pair(*(nodes.reshape(part, lead) for part in parts))]


def _unwrap(nodes: Nodes, params: Params, values: Sequence[Any]) -> Sequence[Node]:
    (key,) = values
    shape = (*key.re.shape, 2)
    none, one = [0] * len(key.re.shape), (1,) * len(shape)
    pieces = [
        (nodes.reshape(a, (*a.shape, 1)), Piece((*none, k), one))
        for k, a in enumerate((key.re, key.im))
    ]
    return [nodes.write(nodes.node("empty", shape, WORD), pieces)]


def _threefry(nodes: Nodes, params: Params, values: Sequence[Any]) -> Sequence[Node]:
    first, second, high, low = values
    found = _hashed(nodes, Pair(first, second), high, low)
    return [found.re, found.im]


RANDOM: dict[str, Drawing] = {
    "random_bits": _bits,
    "random_fold_in": _fold_in,
    "random_seed": _seed,
    "random_split": _split,
    "random_unwrap": _unwrap,
    "random_wrap": _wrap,
    "threefry2x32": _threefry,
}
