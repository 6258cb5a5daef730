"""Places in memory for arrays that are not all there at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ._nodes import Node

ROUNDS = 16  # without a better layout, then the best so far is taken


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
    """Places for arrays, types apart.

    Args:
        times: for each array the set of times at which it is there, as the bits of a number.
    """
    starts: dict[Node, int] = {}
    sizes: dict[np.dtype, int] = {}
    for dtype in sorted({node.dtype for node in times}, key=str):
        nodes = sorted((n for n in times if n.dtype == dtype), key=lambda n: (-n.size, n.number))
        placed = _placed(nodes, times)
        starts |= placed
        sizes[dtype] = _height(placed)
    return Layout(starts, sizes, max(_in_use(times, lambda n: n.nbytes), default=0))


def _placed(nodes: list[Node], times: Mapping[Node, int]) -> dict[Node, int]:
    """Each array at the lowest place that is free while it is there; large arrays choose first.

    That may leave gaps. So what reaches highest chooses first in another round, until no place is
    wasted, or nothing was won for some rounds. Four elements, of which two are there at any time:

        times       a 3   b 1   c 2, 3   d 1, 2
        round one   a 0   b 0   c 1      d 2       d meets b at 0 and c at 1
        round two   d 0   a 0   b 1      c 1
    """
    beside = {n: [o for o in nodes if times[o] & times[n]] for n in nodes}
    least = max(_in_use({n: times[n] for n in nodes}, lambda n: n.size), default=0)
    best: dict[Node, int] | None = None
    left = ROUNDS
    while left:
        left -= 1
        starts: dict[Node, int] = {}
        for node in nodes:
            start = 0
            for other in sorted((o for o in beside[node] if o in starts), key=starts.__getitem__):
                if start + node.size <= starts[other]:
                    break
                start = max(start, starts[other] + other.size)
            starts[node] = start
        height = _height(starts)
        if best is None or height < _height(best):
            best, left = starts, ROUNDS
        if height == least:
            break
        nodes = sorted(nodes, key=lambda n: starts[n] + n.size < height)  # keeps the order else
    assert best is not None
    return best


def _height(starts: Mapping[Node, int]) -> int:
    return max((start + node.size for node, start in starts.items()), default=0)


def _in_use(times: Mapping[Node, int], size: Callable[[Node], int]) -> Iterator[int]:
    """What is there at each time."""
    last = max((t.bit_length() for t in times.values()), default=0)
    return (sum(size(n) for n, t in times.items() if t >> k & 1) for k in range(last))
