"""Leaky states behind an operator: a read-out that filters after its weight, s' = k s + c op(z, W).

The same function is op(r, c W) with r' = k r + z where k is one number: then nothing between z and
the loss crosses an operator from step to step. Looked for on the step itself: the walk follows s
and the operator's output through equations that are linear in both, whose other factors depend on
no state and no input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..program import Atom, Const, Equation, Program, Var, evaluate, is_traced, prune
from ._links import Links
from ._reach import bits_of, indices_of, reach
from ._sites import Site
from ._step import Step

_LINEAR = frozenset(("add", "sub", "neg", "convert_element_type", "reshape", "broadcast_in_dim"))


@dataclass(frozen=True, slots=True)
class Leak:
    """A leaky state behind an operator: its number, and the factors that make its decay."""

    leaf: int
    factors: tuple[Atom, ...]
    trained: bool  # whether a parameter is among what the factors are computed from


def leaky_readouts(step: Step, sites: Sequence[Site], links: Links) -> dict[Equation, Leak]:
    """The operators that read other units and whose output enters a leaky state, and no other."""
    program = step.program
    params = {step.entry(leaf) for leaf in step.params}
    varying = reach(
        program, {v: 1 for v in program.inputs if v not in params}, differentiable=False
    )
    used = reach(program, {v: 1 for v in params}, differentiable=False)
    out = {}
    for s in sites:
        eqn = s.equation
        reads = s.x is not None and bits_of(s.x, links.from_leaves)
        reached = indices_of(links.through[eqn])
        if s.levels or not reads or eqn in links.cut_entries or len(reached) != 1:
            continue
        (k,) = reached
        leaf = step.hidden[k]
        remembers = bits_of(step.exit(leaf), reach(program, {step.entry(leaf): 1}))
        found = _followed(program, {step.entry(leaf), s.y}, varying)
        if (
            not remembers
            or step.exit(leaf) not in found
            or bits_of(s.x, links.from_leaves) >> k & 1
        ):
            continue
        factors = found[step.exit(leaf)]
        out[eqn] = Leak(k, factors, any(bits_of(a, used) for a in factors))
    return out


def _followed(
    program: Program, seeds: Collection[Var], varying: Mapping[Var, int]
) -> dict[Atom, tuple[Atom, ...]]:
    """The values that are linear in the seeds, each with the factors met on the way."""
    found: dict[Atom, tuple[Atom, ...]] = {v: () for v in seeds}
    # s' = add(mul(k, s), mul(c, y)): from the seeds s and y, `mul(k, s)` is found with the factor
    # k, `mul(c, y)` with c, and their sum with both. tanh(s) is curved, and so is what reads it.
    curved: set[Atom] = set()
    for eqn in program.equations:
        if any(o in found for o in eqn.outputs):
            continue
        of = [a for a in eqn.inputs if a in found]
        if any(a in curved for a in eqn.inputs):
            curved.update(eqn.outputs)
            continue
        if not of:
            continue
        rest = [a for a in eqn.inputs if a not in found]
        scaled = eqn.name == "mul" or (eqn.name == "div" and eqn.inputs[0] in found)
        if scaled and len(of) == 1 and not any(bits_of(a, varying) for a in rest):
            found[eqn.outputs[0]] = (*found[of[0]], *rest)
        elif eqn.name in _LINEAR:
            found[eqn.outputs[0]] = tuple(f for a in of for f in found[a])
        else:
            curved.update(eqn.outputs)
    return found


def decay_equations(step: Step, leak: Leak) -> tuple[list[Equation], Atom]:
    """The decay of a leaky state, computed in the step: what becomes of ones in its place.

    What is added to the state counts as zero: `s' = k * s + c * y` of s = 1 and y = 0 is k.
    """
    program, leaf = step.program, step.hidden[leak.leaf]
    entry, factors = step.entry(leaf), set(leak.factors)
    equations = list(prune(program, [a for a in leak.factors if isinstance(a, Var)]).equations)
    ones: dict[Atom, Atom] = {entry: Const(np.ones(entry.shape, entry.dtype))}
    zero = lambda a: Const(np.zeros(a.shape, a.dtype))
    for eqn in prune(program, [step.exit(leaf)]).equations:
        if ones.keys().isdisjoint(eqn.inputs):
            continue
        inputs = tuple(ones.get(a, a if a in factors else zero(a)) for a in eqn.inputs)
        (out,) = eqn.outputs
        of_ones = ones[out] = Var(out.shape, out.dtype)
        equations.append(replace(eqn, inputs=inputs, outputs=(of_ones,)))
    return equations, ones[step.exit(leaf)]


def decay_of(step: Step, consts: Sequence[Any], leak: Leak) -> np.ndarray | None:
    """The decay of a leaky state, one number per element; None if it is not known in advance."""
    program = step.program
    equations, decay = decay_equations(step, leak)
    used = {a for e in equations for a in e.inputs}
    pairs = zip(program.consts, consts, strict=True)
    if leak.trained or any(is_traced(c) for v, c in pairs if v in used):
        return None
    of_constants = Program(program.consts, (), tuple(equations), (decay,))
    return np.asarray(evaluate(of_constants, consts, ())[0])
