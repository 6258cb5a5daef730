"""The operators of a written-out step, and what depends on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from braintrace._jaxpr import Equation, Program, Var, bind, trace
from braintrace.graph import Kinds, folded_equations, replaced
from braintrace.ops import ETPPrimitive

from ._unroll import Written, calls_operator, entries


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """A use of an ETP operator with a trained operand, or a custom derivative around one.

    `x_at`: the operand that is its input, `factors`: others that are no weights; `steady`: its
    weights are the same at every step.
    """

    equation: Equation
    trained: tuple[int, ...]
    x_at: int | None
    steady: bool
    factors: tuple[int, ...] = ()

    @property
    def y(self) -> Var:
        return self.equation.outputs[0]


def find_operators(written: Written) -> list[Operator]:
    """The operators in program order."""
    learns, steady, out = written.learns, written.steady, []
    for eqn in written.program.equations:
        if isinstance(eqn.primitive, ETPPrimitive):
            at, factors = eqn.primitive.x_invar_index, eqn.primitive.factor_invars
            weights = {i: a for i, a in enumerate(eqn.inputs) if i not in (at, *factors)}
            trained = tuple(i for i, a in weights.items() if a in learns)
            varying = {i for i, a in weights.items() if isinstance(a, Var) and a not in steady}
            if trained:
                fixed = not varying & {*trained, *_read_by_derivative(eqn, trained)}
                out.append(Operator(eqn, trained, at, fixed, factors))
        elif calls_operator(eqn):
            # Its weights are the operands of parameters only; more than one other, or more than
            # one result, and it is no operator but an equation that mixes.
            moving = entries(eqn.inputs, steady)
            trained = tuple(i for i, a in enumerate(eqn.inputs) if a in learns and i not in moving)
            if trained and len(moving) <= 1 and len(eqn.outputs) == 1:
                out.append(Operator(eqn, trained, moving[0] if moving else None, True))
    return out


def fold(written: Written, entries: Sequence[Var], exits: Sequence[Any]) -> Written:
    """The same program, where operators with a varying factor of their weights are one operator
    with it (see `graph._fold`); `entries` and `exits` are those of the states."""
    program, learns, steady = written.program, written.learns, written.steady
    unsteady = [o for o in find_operators(written) if not o.steady]
    chosen = {o.equation for o in unsteady if reach(program, [o.y]) & set(exits)}
    entered = reach(program, entries)
    kinds = Kinds(
        trained=lambda a: a in learns,
        varies=lambda a: isinstance(a, Var) and a not in steady,
        entered=lambda a: a in entered,
    )
    new = folded_equations(program, chosen, kinds)
    origin = written.origin | {e: written.origin[old] for old, e in new.items()}
    return replace(written, program=replaced(program, new), origin=origin)


def reach(program: Program, sources: Sequence[Var]) -> set[Any]:
    """The values that depend on the sources along paths that carry a derivative."""
    found: set[Any] = set(sources)
    for eqn in program.equations:
        if eqn.name == "stop_gradient":
            continue
        if any(a in found and a.is_inexact for a in eqn.inputs if isinstance(a, Var)):
            found.update(v for v in eqn.outputs if v.is_inexact)
    return found


def _read_by_derivative(eqn: Equation, trained: Sequence[int]) -> set[int]:
    """The operands whose value the derivative by the trained operands reads."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in eqn.inputs]

    def pushed(*values):
        def moved(*weights):
            full = list(values[: len(shapes)])
            for i, w in zip(trained, weights, strict=True):
                full[i] = w
            return bind(eqn, full)[0]

        point = tuple(values[i] for i in trained)
        return jax.jvp(moved, point, values[len(shapes) :])[1]

    program, _ = trace(pushed, *shapes, *(shapes[i] for i in trained))
    found = {v: {i} for i, v in enumerate(program.inputs[: len(shapes)])}
    for e in program.equations:
        read = set().union(*(found.get(a, ()) for a in e.inputs if isinstance(a, Var)))
        found.update((out, read) for out in e.outputs)
    out = program.outputs[0]
    return found.get(out, set()) if isinstance(out, Var) else set()
