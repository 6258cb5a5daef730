"""Leaky states behind an operator: a read-out that filters after its weight, s' = k s + c op(z, W).

The same function is op(r, c W) with r' = k r + z where k is one number: then nothing between z and
the loss crosses an operator from step to step. Looked for on the step itself: the walk follows s
and the operator's output through equations that are linear in both, whose other factors depend on
no state and no input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..program import (
    Array,
    Atom,
    Equation,
    Program,
    Var,
    bind_quietly,
    close,
    evaluate,
    is_traced,
    prune,
    shape_of,
    trace,
)
from ._links import Links
from ._reach import bits_of, indices_of, reach
from ._sites import Site
from ._step import Step

_LINEAR = frozenset(("add", "sub", "neg", "convert_element_type", "reshape", "broadcast_in_dim"))


def leaky_readouts(step: Step, sites: Sequence[Site], links: Links) -> dict[Equation, int]:
    """The operators that read other units and whose output enters one state, a leaky one: which."""
    program = step.program
    params = {step.entry(leaf) for leaf in step.params}
    seeds = {v: 1 for v in program.inputs if v not in params}
    varying = reach(program, seeds, differentiable=False)
    out = {}
    for s in sites:
        eqn = s.equation
        read = 0 if s.x is None else bits_of(s.x, links.from_leaves)
        reached = indices_of(links.through[eqn])
        if s.levels or not read or eqn in links.cut_entries or len(reached) != 1:
            continue
        (k,) = reached
        leaf = step.hidden[k]
        remembers = bits_of(step.exit(leaf), reach(program, {step.entry(leaf): 1}))
        found = _followed(program, {step.entry(leaf), s.y}, varying)
        if remembers and step.exit(leaf) in found and not read >> k & 1:
            out[eqn] = k
    return out


def _followed(program: Program, seeds: Collection[Var], varying: Mapping[Var, int]) -> set[Atom]:
    """The values that are linear in the seeds, with factors that do not vary."""
    # s' = add(mul(k, s), mul(c, y)): of the seeds s and y, both products are linear, and so is
    # their sum. tanh(s) is curved, and so is what reads it.
    found, curved = set[Atom](seeds), set[Atom]()
    for eqn in program.equations:
        rest = [a for a in eqn.inputs if a not in found]
        flat = curved.isdisjoint(eqn.inputs)
        if (flat and len(rest) == len(eqn.inputs)) or not found.isdisjoint(eqn.outputs):
            continue
        scaled = eqn.name == "mul" or (eqn.name == "div" and eqn.inputs[0] in found)
        scaled = scaled and len(rest) == 1 and not bits_of(rest[0], varying)
        (found if flat and (scaled or eqn.name in _LINEAR) else curved).update(eqn.outputs)
    return found


def decay(step: Step, k: int, consts: Sequence[Any], inputs: Sequence[Any]) -> Array:
    """The decay of a leaky state, a number per element: of `s' = k * s + c * y` the k.

    It is the derivative of s' by s, and reads no state and no input.
    """
    leaf = step.hidden[k]
    at, program = leaf.position, prune(step.program, [step.exit(leaf)])
    put = lambda s: [*inputs[:at], s, *inputs[at + 1 :]]
    new = lambda s: evaluate(program, consts, put(s), bind_quietly)[0]
    return jax.jvp(new, (inputs[at],), (jnp.ones_like(inputs[at]),))[1]


def decay_of(step: Step, consts: Sequence[Any], k: int) -> np.ndarray | None:
    """The decay of a leaky state; None if it is trained, or not known in advance."""
    shapes = ([shape_of(v) for v in of] for of in (step.program.consts, step.program.inputs))
    program = close(*trace(partial(decay, step, k), *shapes))
    program = prune(program, program.outputs)
    used = {*program.read}
    values = dict(zip(program.inputs, consts, strict=False))
    if any(v in used and (v not in values or is_traced(values[v])) for v in program.inputs):
        return None
    return np.asarray(evaluate(program, (), [values.get(v) for v in program.inputs])[0])
