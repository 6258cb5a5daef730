"""The operators of an unrolled step, and what depends on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from braintrace.graph import Kinds, folded_equations, replaced
from braintrace.ops import ETPPrimitive
from braintrace.program import Equation, Program, Var, bind, trace

from ._unroll import Unrolled, calls_operator, entries


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


def operators_of(unrolled: Unrolled) -> list[Operator]:
    """The operators in program order."""
    trainable, steady, out = unrolled.trainable, unrolled.steady, []
    for eqn in unrolled.program.equations:
        if isinstance(eqn.primitive, ETPPrimitive):
            at, factors = eqn.primitive.x_invar_index, eqn.primitive.factor_invars
            weights = {i: a for i, a in enumerate(eqn.inputs) if i not in (at, *factors)}
            trained = tuple(i for i, a in weights.items() if a in trainable)
            varying = {i for i, a in weights.items() if isinstance(a, Var) and a not in steady}
            if trained:
                fixed = not varying & {*trained, *_read_by_derivative(eqn, trained)}
                out.append(Operator(eqn, trained, at, fixed, factors))
        elif calls_operator(eqn):
            # Its weights are the operands of parameters only; more than one other, or more than
            # one result, and it is no operator but an equation that mixes.
            inputs = entries(eqn.inputs, steady)
            trained = tuple(
                i for i, a in enumerate(eqn.inputs) if a in trainable and i not in inputs
            )
            if trained and len(inputs) <= 1 and len(eqn.outputs) == 1:
                out.append(Operator(eqn, trained, inputs[0] if inputs else None, True))
    return out


def fold(unrolled: Unrolled, entries: Sequence[Var], exits: Sequence[Any]) -> Unrolled:
    """The same program, where operators with a varying factor of their weights are one operator
    with it (see `graph._fold`); `entries` and `exits` are those of the states."""
    program, trainable, steady = unrolled.program, unrolled.trainable, unrolled.steady
    unsteady = [o for o in operators_of(unrolled) if not o.steady]
    reaching = {o.equation for o in unsteady if reach(program, [o.y]) & set(exits)}
    entered = reach(program, entries)
    kinds = Kinds(
        trained=lambda a: a in trainable,
        varies=lambda a: isinstance(a, Var) and a not in steady,
        entered=lambda a: a in entered,
    )
    new = folded_equations(program, reaching, kinds)
    origin = unrolled.origin | {e: unrolled.origin[old] for old, e in new.items()}
    return replace(unrolled, program=replaced(program, new), origin=origin)


def reach(program: Program, sources: Sequence[Var]) -> set[Any]:
    """The values that depend on the sources along paths that carry a derivative."""
    values: set[Any] = set(sources)
    for eqn in program.equations:
        if eqn.name == "stop_gradient":
            continue
        if any(a in values and a.is_inexact for a in eqn.inputs if isinstance(a, Var)):
            values.update(v for v in eqn.outputs if v.is_inexact)
    return values


def tangent_program(
    eqn: Equation, places: Sequence[int], bind: Callable[[Equation, list[Any]], Any] = bind
) -> tuple[Program, Any]:
    """The derivative of an equation by the operands at some places: a program of all operands and
    then of the tangents of these."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in eqn.inputs]

    def pushed(*values):
        point, tangents = list(values[: len(shapes)]), values[len(shapes) :]

        def outputs(*operands):
            replacing = dict(zip(places, operands, strict=True))
            return bind(eqn, [replacing.get(i, a) for i, a in enumerate(point)])

        return jax.jvp(outputs, tuple(point[i] for i in places), tangents)[1]

    return trace(pushed, *shapes, *(shapes[i] for i in places))


def _read_by_derivative(eqn: Equation, trained: Sequence[int]) -> set[int]:
    """The operands whose value the derivative by the trained operands reads."""
    program, _ = tangent_program(eqn, trained)
    operands = {v: {i} for i, v in enumerate(program.inputs[: len(eqn.inputs)])}
    for e in program.equations:
        read = set().union(*(operands.get(a, ()) for a in e.inputs if isinstance(a, Var)))
        operands.update((out, read) for out in e.outputs)
    out = program.outputs[0]
    return operands.get(out, set()) if isinstance(out, Var) else set()
