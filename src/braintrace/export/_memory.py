"""Places in memory for arrays that are not all there at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ._nodes import Node


@dataclass(frozen=True, slots=True)
class Layout:
    """Where arrays lie, in elements of one block per type.

    `sizes` are the elements of the blocks, `live` the bytes of the most that is there at one time.
    """

    starts: dict[Node, int]
    sizes: dict[np.dtype, int]
    live: int

    @property
    def nbytes(self) -> int:
        return sum(n * dtype.itemsize for dtype, n in self.sizes.items())


def laid_out(times: Mapping[Node, int]) -> Layout:
    """Large arrays first, each at the lowest place that is free while it is there.

    Args:
        times: for each array the set of times at which it is there, as the bits of a number.
    """
    starts: dict[Node, int] = {}
    sizes: dict[np.dtype, int] = {}
    for node in sorted(times, key=lambda n: (-n.size, n.number)):
        start = 0
        others = [o for o in starts if o.dtype == node.dtype and times[o] & times[node]]
        for other in sorted(others, key=starts.__getitem__):
            if start + node.size <= starts[other]:
                break
            start = max(start, starts[other] + other.size)
        starts[node] = start
        sizes[node.dtype] = max(sizes.get(node.dtype, 0), start + node.size)
    last = max((t.bit_length() for t in times.values()), default=0)
    live = (sum(n.nbytes for n, t in times.items() if t >> k & 1) for k in range(last))
    return Layout(starts, sizes, max(live, default=0))
