"""Products and convolutions: which elements of the varying operand each result reads.

A result reads all elements along the contracted axes, but for those that meet a zero of the other
operand that is there at compile time (a diagonal, a permutation, one-hot rows). An equation that
reads one element per result moves it; one that takes each element to one result is a sum; what
does neither mixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..program import Equation
from ._sets import NONE, Facts, empty, joined, nonzero, padded, rearranged, union, windows


@dataclass(frozen=True, eq=False, slots=True)
class Contraction:
    """What a product does to the elements of its varying operand."""

    reads: int  # how many of them a result reads at most
    fans: bool  # whether one goes to several results
    table: np.ndarray | None = None  # (batch, result, read): contracted places, None for all

    @property
    def sums(self) -> bool:
        return self.reads > 1 and not self.fans

    @property
    def mixes(self) -> bool:
        return self.reads > 1 and self.fans


def contraction(eqn: Equation, side: int, facts: Facts) -> Contraction:
    """What a `dot_general` does to its varying operand `side`."""
    contract, batch, free = _axes(eqn)
    other = eqn.inputs[1 - side].shape
    where = nonzero(facts[1 - side])
    if where is None:
        return Contraction(
            prod(other[a] for a in contract[1 - side]), any(other[a] > 1 for a in free[1 - side])
        )
    order = (batch[1 - side], free[1 - side], contract[1 - side])
    where = where.transpose([a for axes in order for a in axes])
    where = where.reshape([prod(other[a] for a in axes) for axes in order])
    # `M @ a`, M = [[1, 0, 1], [0, 1, 0]] known by where it is zero: (batch 1, result 2, read 3)
    #
    #     count     [2, 1]                      how many places of a each result reads
    #     places    [[0, 2], [1, 0]]            these first (argsort of False before True)
    #     table     [[0, 2], [1, NONE]]         and NONE for the rest
    #     fans      [1, 1, 1] results per place, none above 1: it is a sum, and does not mix
    count = where.sum(-1)
    reads = int(count.max(initial=0))
    places = np.argsort(~where, axis=-1, kind="stable")[..., :reads]
    table = np.where(np.arange(reads) < count[..., None], places, NONE)
    return Contraction(reads, bool((where.sum(1) > 1).any()), table)


def _axes(eqn: Equation) -> tuple[Any, Any, list[list[int]]]:
    contract, batch = eqn.params["dimension_numbers"]
    free = [
        [i for i in range(len(a.shape)) if i not in contract[k] and i not in batch[k]]
        for k, a in enumerate(eqn.inputs)
    ]
    return contract, batch, free


def product(eqn: Equation, array: np.ndarray, side: int, table: np.ndarray | None) -> np.ndarray:
    """The sets of a `dot_general`, from its operand `side`."""
    contract, batch, free = _axes(eqn)
    order = (batch[side], free[side], contract[side])
    head, own, along = ([array.shape[a] for a in axes] for axes in order)
    operand = array.transpose([*(a for axes in order for a in axes), array.ndim - 1])
    operand = operand.reshape((prod(head), prod(own), prod(along), array.shape[-1]))
    if table is None:
        sets = joined(operand, [2], keep=True)
        other = [1] * len(free[1 - side])
    else:
        sets = operand[np.arange(len(table))[:, None, None], :, np.maximum(table, 0)]
        sets = np.where((table == NONE)[..., None, None], NONE, sets)
        sets = sets.transpose(0, 3, 1, 2, 4)  # batch, own, result, read, sources
        sets = union([sets.reshape((*sets.shape[:3], -1))])
        other = [eqn.inputs[1 - side].shape[a] for a in free[1 - side]]
    sets = sets.transpose(0, 2, 1, 3) if side else sets
    wide = [*head, *(other + own if side else own + other), sets.shape[-1]]
    return np.broadcast_to(sets.reshape(wide), (*eqn.outputs[0].shape, sets.shape[-1]))


def kernel(eqn: Equation, facts: Facts) -> Contraction:
    """What a `conv_general_dilated` does to its varying image."""
    dims, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] != 1:
        return Contraction(2, True)
    shape = [eqn.inputs[1].shape[a] for a in dims.rhs_spec]
    where = nonzero(facts[1])
    where = np.ones(shape, bool) if where is None else where.transpose(dims.rhs_spec)
    reads = int(where.reshape(shape[0], -1).sum(1).max(initial=0))
    channels_read = where.any(tuple(range(2, where.ndim))).reshape(groups, -1, shape[1]).sum(1)
    p = eqn.params
    sizes = zip(dims.out_spec[2:], shape[2:], p["window_strides"], p["rhs_dilation"], strict=True)
    # Windows overlap, so that a place of the image goes to several results, if a kernel of k places
    # reaches as far as where the next one begins: (k - 1) * dilation >= stride. In pooling they
    # do not: k = stride.
    overlap = any(d > 1 for d in p["lhs_dilation"]) or any(
        eqn.outputs[0].shape[a] > 1 and (k - 1) * d >= s for a, k, s, d in sizes
    )
    return Contraction(reads, overlap or bool((channels_read > 1).any()))


def convolved(eqn: Equation, array: np.ndarray, facts: Facts | None) -> np.ndarray:
    """The sets of a convolution: the elements under its kernel, in all channels of the input.

    With `facts` about its operands those are left out that meet a zero of the kernel.
    """
    p = eqn.params
    dims = p["dimension_numbers"]
    size = [eqn.inputs[1].shape[a] for a in dims.rhs_spec]
    if p["batch_group_count"] != 1:
        array = joined(array, [dims.lhs_spec[0]], keep=True)
        array = np.broadcast_to(array, (*eqn.inputs[0].shape, array.shape[-1]))
    moved = array.transpose([*dims.lhs_spec, array.ndim - 1])  # batch, channel, space, sources
    if facts is None:
        moved, where, first = joined(moved, [1], keep=True), np.ones((1, 1, *size[2:]), bool), [0]
    else:
        mask = nonzero(facts[1])
        where = np.ones(size, bool) if mask is None else mask.transpose(dims.rhs_spec)
        group = size[0] // p["feature_group_count"]
        first = np.arange(size[0]) // group * size[1]  # the first channel of each result's group
    config = [(0, 0, 0), (0, 0, 0)] + [
        (lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], p["lhs_dilation"], strict=True)
    ]
    wide = rearranged(moved, lambda a: padded(a, config))
    shape = tuple(eqn.outputs[0].shape[a] for a in dims.out_spec)
    parts = []
    taps = np.argwhere(where.any(0))
    places = windows(taps[:, 1:], p["rhs_dilation"], p["window_strides"], shape[2:])
    for (channel, *offset), at in zip(taps, places, strict=True):
        part = wide[(slice(0, shape[0]), slice(None), *at)][:, np.asarray(first) + channel]
        reads = where[(slice(None), channel, *offset)].reshape(1, -1, *[1] * (part.ndim - 2))
        parts.append(np.where(reads, part, NONE))
    sets = union(parts) if parts else empty(shape)
    sets = np.broadcast_to(sets, (*shape, sets.shape[-1]))
    return sets.transpose([*np.argsort(dims.out_spec), sets.ndim - 1])
