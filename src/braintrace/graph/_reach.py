"""Reachability between named things of a step: which value can depend on which source.

Sets of sources are bit masks. The differentiable walk stops at `stop_gradient` and at integers and
booleans; the data walk does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .._jaxpr import Atom, Equation, Program, Var


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
    bits: dict[Var, int] = dict(seeds)
    for eqn in program.equations:
        if not through(eqn) or (differentiable and eqn.name == "stop_gradient"):
            continue
        mask = 0
        for atom in read(eqn):
            if isinstance(atom, Var) and (not differentiable or atom.is_inexact):
                mask |= bits.get(atom, 0)
        if mask:
            for out in eqn.outputs:
                if not differentiable or out.is_inexact:
                    bits[out] = bits.get(out, 0) | mask
    return bits


def bits_of(atom: Atom, bits: Mapping[Var, int]) -> int:
    """The mask of an atom; constants depend on nothing."""
    return bits.get(atom, 0) if isinstance(atom, Var) else 0


def strongly_connected(edges: Sequence[int]) -> list[int]:
    """Mask of each node's strongly connected component; `edges[i]` masks the successors."""
    n = len(edges)
    closure = [edges[i] | (1 << i) for i in range(n)]
    for k in range(n):
        for i in range(n):
            if closure[i] >> k & 1:
                closure[i] |= closure[k]
    return [
        sum(1 << j for j in range(n) if closure[i] >> j & 1 and closure[j] >> i & 1)
        for i in range(n)
    ]
