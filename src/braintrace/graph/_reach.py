"""Reachability between named things of a step: which value can depend on which source.

Sets of sources are bit masks, of the values inside bodies of control flow too. The differentiable
walk stops at functions with derivative zero and at integers and booleans; the data walk does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from ..program import Atom, Equation, Passed, Program, Var, passed

FLAT = frozenset(("stop_gradient", "sign", "round", "floor", "ceil"))  # their derivative is zero


def reach(
    program: Program,
    seeds: Mapping[Var, int],
    *,
    differentiable: bool = True,
    through: Callable[[Equation], bool] = lambda eqn: True,
    read: Callable[[Equation], Sequence[Atom]] = lambda eqn: eqn.inputs,
) -> dict[Var, int]:
    """For every value, the bits of the seeds it depends on.

    A seed keeps its own bits besides what reaches it; `through(eqn)` False stops there; `read(eqn)`
    are the inputs that count.
    """
    walk = _Walk(dict(seeds), differentiable, through, read)
    walk.program(program)
    return walk.bits


@dataclass(slots=True)
class _Walk:
    bits: dict[Var, int]
    smooth: bool
    through: Callable[[Equation], bool]
    read: Callable[[Equation], Sequence[Atom]]

    def of(self, atoms: Iterable[Atom]) -> int:
        mask = 0
        for atom in atoms:
            if isinstance(atom, Var) and (not self.smooth or atom.is_inexact):
                mask |= self.bits.get(atom, 0)
        return mask

    def add(self, out: Var, mask: int) -> bool:
        """Add bits to a value; returns whether any is new."""
        if not mask or (self.smooth and not out.is_inexact):
            return False
        old = self.bits.get(out, 0)
        self.bits[out] = old | mask
        return old | mask != old

    def join(self, passed: Passed) -> bool:
        pairs = [pair for values, own in passed for pair in zip(values, own, strict=True)]
        return any([self.add(v, self.of([a])) for a, v in pairs])

    def program(self, program: Program) -> None:
        for eqn in program.equations:
            if not self.through(eqn) or (self.smooth and eqn.name in FLAT):
                continue
            if eqn.bodies:
                self.control(eqn)
            elif mask := self.of(self.read(eqn)):
                for out in eqn.outputs:
                    self.add(out, mask)

    def control(self, eqn: Equation) -> None:
        inside, behind = passed(eqn)
        self.join(inside)
        again = True
        while again:
            for body in eqn.bodies:
                self.program(body.program)
            again = self.join(inside)
        self.join(behind)


def bits_of(atom: Atom, bits: Mapping[Var, int]) -> int:
    """The mask of an atom; constants depend on nothing."""
    return bits.get(atom, 0) if isinstance(atom, Var) else 0


def union_of(masks: Iterable[int]) -> int:
    """The bits that are set in any of the masks."""
    return reduce(or_, masks, 0)


def indices_of(mask: int) -> list[int]:
    """The indices of the bits set in a mask."""
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def closure(mask: int, edges: Sequence[int]) -> int:
    """The nodes that are reached from those of a mask; `edges[i]` masks the successors."""
    before = 0
    while before != mask:
        before, mask = mask, mask | union_of(edges[i] for i in indices_of(mask))
    return mask


def strongly_connected(edges: Sequence[int]) -> list[int]:
    """Mask of each node's strongly connected component; `edges[i]` masks the successors."""
    to = [(i, j) for i, mask in enumerate(edges) for j in indices_of(mask)]
    pairs = np.array(to, int).reshape(-1, 2)
    graph = sparse.csr_matrix((np.ones(len(pairs)), tuple(pairs.T)), shape=(len(edges),) * 2)
    _, label = csgraph.connected_components(graph, connection="strong")
    return [sum(1 << int(j) for j in np.flatnonzero(label == own)) for own in label]
