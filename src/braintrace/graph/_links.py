"""Who reaches whom within a step: states, operators, and the recurrent entries of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from ..program import Atom, Equation, Var
from ._groups import HiddenGroup
from ._reach import bits_of, closure, indices_of, reach, strongly_connected, union_of
from ._sites import Site
from ._step import Step


@dataclass(frozen=True, eq=False, slots=True)
class Links:
    """Reachability of one step, as masks; by value, or by the equation of a trained operator."""

    from_leaves: dict[Var, int]  # hidden leaves whose entry it depends on
    direct: dict[Equation, int]  # leaves that its output reaches without crossing other operators
    through: dict[Equation, int]  # and with; what enters a traced weight is part of that weight
    blockers: dict[Equation, tuple[Site, ...]]  # the trained sites it feeds
    cut_entries: dict[Equation, int]  # leaves that enter it through a recurrent connection
    plain: dict[Var, int]  # parameter leaves it depends on otherwise than as an operator's weight
    plain_use: dict[Atom, Equation]  # where it is first read in this way
    x_positions: dict[Equation, int | None]  # which operand is its input


def find_links(step: Step, trained: Sequence[Site], groups: Sequence[HiddenGroup]) -> Links:
    program = step.program
    from_leaves = reach(program, step.entry_bits(step.hidden))
    ys = {s.y: 1 << i for i, s in enumerate(trained)}
    sites = {s.equation: s for s in trained}

    def read(eqn: Equation) -> Sequence[Atom]:
        # The gradient of a traced weight is carried on to all that it is computed from.
        s = sites.get(eqn)
        if s is None or not s.steady or s.closed is not None:
            return eqn.inputs
        return jax.tree.leaves(s.operator.recorded(eqn.inputs))

    from_ys = reach(program, ys, read=read)
    from_ys_direct = reach(program, ys, through=lambda e: e not in sites)

    direct = {s.equation: step.reached(from_ys_direct, i) for i, s in enumerate(trained)}
    through = {s.equation: step.reached(from_ys, i) for i, s in enumerate(trained)}
    blockers = {
        s.equation: tuple(
            o for o in trained if any(bits_of(a, from_ys_direct) >> i & 1 for a in read(o.equation))
        )
        for i, s in enumerate(trained)
    }

    # Two layers h and g with `h' = f(h R + g V)` and `g' = k(g + h U)`; groups 0 = {h}, 1 = {g}:
    #
    #     members      [0b01, 0b10]    the leaves of each group
    #     reads        [0b11, 0b11]    which leaves the new states of a group depend on
    #     same_loop    [0b11, 0b11]    h feeds g and g feeds h: one component
    #     U            h enters, g is fed, and g is in the loop of h: the entry of h is cut there
    #
    # Without V, g feeds nothing: same_loop [0b01, 0b10], and the loss on g reaches h through U.
    # Recurrent entries: a group that reaches itself again through the operator.
    members = [sum(1 << leaf for leaf in g.leaves) for g in groups]
    exits = [[step.exit(step.hidden[k]) for k in g.leaves] for g in groups]
    reads = [union_of(bits_of(out, from_leaves) for out in outs) for outs in exits]
    successors = [sum(1 << j for j, r in enumerate(reads) if r & mask) for mask in members]
    same_loop = strongly_connected(successors)
    cut_entries: dict[Equation, int] = {}
    for s in trained:
        entering = 0 if s.x is None else bits_of(s.x, from_leaves)
        fed = sum(1 << j for j, m in enumerate(members) if m & through[s.equation])
        pairs = zip(members, same_loop, strict=True)
        if mask := union_of(m for m, loop in pairs if entering & m and fed & loop):
            cut_entries[s.equation] = mask
    x_positions = {s.equation: s.operator.primitive.x_invar_index for s in trained}
    plain, use = _plain(step, trained)
    return Links(from_leaves, direct, through, blockers, cut_entries, plain, use, x_positions)


def _plain(step: Step, trained: Sequence[Site]) -> tuple[dict[Var, int], dict[Atom, Equation]]:
    operators = {s.equation: s for s in trained}

    def read(eqn: Equation) -> Sequence[Atom]:
        site = operators.get(eqn)
        return eqn.inputs if site is None else jax.tree.leaves(site.operator.recorded(eqn.inputs))

    use: dict[Atom, Equation] = {}
    for eqn in step.program.equations:
        for atom in read(eqn):
            use.setdefault(atom, eqn)
    return reach(step.program, step.entry_bits(step.params), read=read), use


def influenced(step: Step, links: Links) -> tuple[tuple[int, ...], ...]:
    """Per parameter leaf, the hidden leaves that it reaches at this step or at a later one."""
    bits = reach(step.program, step.entry_bits(step.params))
    readers = [step.reached(links.from_leaves, k) for k in range(len(step.hidden))]
    reached = [closure(step.reached(bits, i), readers) for i in range(len(step.params))]
    return tuple(tuple(indices_of(mask)) for mask in reached)
