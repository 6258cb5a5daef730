"""The weights of an operator as functions of the parameters, from inside bodies too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from ..program import (
    Atom,
    Body,
    Const,
    Equation,
    Program,
    Rewriting,
    Var,
    evaluate,
    guards,
    prune,
)
from ._sites import Level, Site, sliced


def operand_atoms(site: Site) -> list[Atom]:
    """The values of the step itself from which the site's steady operands are computed."""
    return _wanted(site)[-1]


def _wanted(site: Site) -> list[list[Atom]]:
    """What the steady operands are computed from: at the operator, then one body further out."""
    at = site.operator.positions
    # `scan(lambda c, x: (c + x @ (a * W), None), ...)` with W and a from outside: at the operator
    # `a * W`, one body further out the two inputs of the body that it is made of, W and a.
    wanted: list[list[Atom]] = [[site.equation.inputs[at[k]] for k in at if k not in site.varying]]
    for level in reversed(site.levels):
        wanted.append([outer for _, outer in _needed(level, wanted[-1])])
    return wanted


def operands(site: Site, values: Sequence[Any]) -> dict[str, Any]:
    """The steady operands from the values of `operand_atoms`; stacked over mapped iterations."""
    keys = [k for k in site.operator.positions if k not in site.varying]
    passed = [(v, ()) for v in values]  # a value, and the levels at whose iterations it differs
    for level, atoms in zip(site.levels, reversed(_wanted(site)[:-1]), strict=True):
        passed = _enter(level, atoms, passed, site.levels)
    return {k: value for k, (value, _) in zip(keys, passed, strict=True)}


def operand_equations(program: Program, site: Site, key: str) -> list[Equation]:
    """The equations that compute one operand; those of bodies around the operator come last."""
    atoms: list[Atom] = [site.equation.inputs[site.operator.positions[key]]]
    out: list[Equation] = []
    for level in reversed(site.levels):
        out = [*computing(_program(level), atoms).equations, *out]
        atoms = [outer for _, outer in _needed(level, atoms)]
    return [*computing(program, atoms).equations, *out]


def _program(level: Level) -> Program:
    return level.equation.bodies[level.branch].program


def _needed(level: Level, atoms: Sequence[Atom]) -> list[tuple[Var, Atom]]:
    """Inputs of a body that some of its values are computed from, and what is passed there."""
    eqn, part = level.equation, computing(_program(level), atoms)
    passed, read = eqn.inputs[1:] if eqn.name == "cond" else eqn.inputs, {*part.read}
    return [(v, a) for v, a in zip(part.inputs, passed, strict=True) if v in read]


def _enter(
    level: Level, atoms: Sequence[Atom], passed: Sequence[tuple], order: Sequence[Level]
) -> list[tuple]:
    """Values inside a body from those passed to it."""
    part, body = computing(_program(level), atoms), level.equation.bodies[level.branch]
    slices = set(sliced(level.equation)) if level.length is not None else set()
    inputs = [
        (v, value, (*levels, level) if v in slices else levels)
        for (v, _), (value, levels) in zip(_needed(level, atoms), passed, strict=True)
    ]
    out = []
    for atom in part.outputs:
        one = prune(part, [atom])
        read = {*one.read}
        read_inputs = [i for i in inputs if i[0] in read]
        levels = tuple(m for m in order if any(m in ls for _, _, ls in read_inputs))

        fun = partial(_computed, one, body, [v for v, _, _ in read_inputs])
        for m in reversed(levels):
            fun = jax.vmap(fun, in_axes=[0 if m in ls else None for _, _, ls in read_inputs])
        value = fun(*(v for _, v, _ in read_inputs)) if read_inputs else fun()
        out.append((atom.value if isinstance(atom, Const) else value, levels))
    return out


def _computed(part: Program, body: Body, variables: Sequence[Var], *values: Any) -> Any:
    """What a part of a body computes from the values of the inputs that it reads."""
    bound = dict(zip(variables, values, strict=True))
    return evaluate(part, body.values, [bound.get(v) for v in part.inputs])[0]


def computing(program: Program, atoms: Sequence[Atom]) -> Program:
    """The part of a program that computes some of its values, guards replaced by the value.

    For what is computed from parameters: there, a guard has nothing to test.
    """
    plain, to = _unguarded(program)
    return prune(plain, to.read(atoms))


@lru_cache(maxsize=256)
def _unguarded(program: Program) -> tuple[Program, Rewriting]:
    """The program with guards (see `guards`) replaced by the value, and what stands for what."""
    guarded, to = guards(program), Rewriting()
    for eqn in program.equations:
        to.take(eqn, lambda to, eqn: [guarded[eqn]] if eqn in guarded else None)
    return replace(program, equations=tuple(to.equations)), to
