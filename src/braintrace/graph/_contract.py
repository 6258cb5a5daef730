"""Sums of products: which elements of the varying operand each result reads.

Rules take the numbers of the elements of an operand and make a *table* of them, an axis longer than
the result: the numbers that each result reads, NONE where there are fewer. Of a product those are
missing that meet a zero of the other operand that is there at compile time (a diagonal, a
permutation, one-hot rows). Where results read the same the table is a broadcast view.
"""

from __future__ import annotations

import numpy as np

from ..program import Equation
from ._sets import (
    MOST_SOURCES,
    NONE,
    Facts,
    joined,
    nonzero,
    padded,
    rearranged,
    union,
    windows,
)


def product(eqn: Equation, side: int, facts: Facts, numbers: np.ndarray) -> np.ndarray:
    """What the results of a `dot_general` read of operand `side`."""
    contract, batch = eqn.params["dimension_numbers"]
    free = [
        [i for i in range(len(a.shape)) if i not in contract[k] and i not in batch[k]]
        for k, a in enumerate(eqn.inputs)
    ]
    other, axes = eqn.inputs[1 - side].shape, (batch[side], free[side], contract[side])
    head, own, along = ([numbers.shape[a] for a in of] for of in axes)
    flat = tuple(int(np.prod(n)) for n in (head, own, along))
    table = numbers.transpose([a for of in axes for a in of]).reshape(flat)[:, :, None]
    other_free, where = [other[a] for a in free[1 - side]], nonzero(facts[1 - side])
    rest = [1] * len(other_free)
    if where is not None:
        order = (batch[1 - side], free[1 - side], contract[1 - side])
        where = where.transpose([a for of in order for a in of])
        where = where.reshape(flat[0], int(np.prod(other_free)), flat[2])
        # `M @ a`, M = [[1, 0, 1], [0, 1, 0]] known by where it is zero: (batch 1, result 2, read 3)
        #
        #     count     [2, 1]                      how many places of a each result reads
        #     places    [[0, 2], [1, 0]]            these first (argsort of False before True)
        #     read      [[0, 2], [1, NONE]]         and NONE for the rest
        #
        # What mixes is not worth a table of all results: they count as reading everything.
        count = where.sum(-1)
        reads = int(count.max(initial=0))
        if reads <= 1 or (where.sum(1) <= 1).all():
            places = np.argsort(~where, axis=-1, kind="stable")[:, None, :, :reads]
            table = np.take_along_axis(table, places, -1)
            table = np.where(np.arange(reads) < count[:, None, :, None], table, NONE)
            rest = other_free
    table = table.swapaxes(1, 2) if side else table
    wide = (*head, *(rest + own if side else own + rest), table.shape[-1])
    return np.broadcast_to(table.reshape(wide), (*eqn.outputs[0].shape, table.shape[-1]))


def convolved(eqn: Equation, side: int, facts: Facts, numbers: np.ndarray) -> np.ndarray | None:
    """What the results of a convolution read of the image: what is under the kernel."""
    p = eqn.params
    dims, groups = p["dimension_numbers"], p["feature_group_count"]
    if side or p["batch_group_count"] != 1:
        return None
    size = [eqn.inputs[1].shape[a] for a in dims.rhs_spec]
    shape = tuple(eqn.outputs[0].shape[a] for a in dims.out_spec)
    image = numbers.transpose(dims.lhs_spec)[..., None]  # batch, channel, space, reads
    where = nonzero(facts[1])
    known = np.ones(size, bool) if where is None else where.transpose(dims.rhs_spec)
    # Two images of four places, kernels of two: result j reads places j and j + 1, of all channels
    # or, in groups or where zeros of the kernel are known, of those of its group that it reads.
    few = int(known.any(0).sum()) * int(np.prod(shape)) <= MOST_SOURCES
    if (where is None and groups == 1) or not few:
        image, known, first = joined(image, [1], keep=True), np.ones((1, 1, *size[2:]), bool), [0]
    else:
        first = np.arange(size[0]) // (size[0] // groups) * size[1]  # of the group of each result
    config = [(0, 0, 0), (0, 0, 0)] + [
        (lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], p["lhs_dilation"], strict=True)
    ]
    wide = rearranged(image, lambda a: padded(a, config))
    taps, parts = np.argwhere(known.any(0)), [np.full((1, 1, *shape[2:], 1), NONE)]
    places = windows(taps[:, 1:], p["rhs_dilation"], p["window_strides"], shape[2:])
    for (channel, *offset), at in zip(taps, places, strict=True):
        part = wide[(slice(0, shape[0]), slice(None), *at)][:, np.asarray(first) + channel]
        reads = known[(slice(None), channel, *offset)].reshape(1, -1, *[1] * (part.ndim - 2))
        parts.append(np.where(reads, part, NONE))
    sets = union([np.broadcast_to(a, (*parts[-1].shape[:-1], a.shape[-1])) for a in parts])
    sets = np.broadcast_to(sets, (*shape, sets.shape[-1]))
    return sets.transpose([*np.argsort(dims.out_spec), sets.ndim - 1])
