"""Control flow written out: loops turn by turn, a choice as both sides and a selection.

A body in which something mixes what depends on states or operators stays one equation, which then
counts as mixing; so does a `while`, whose number of turns is not known. An operator inside a body
has no trace: it is written out as plain computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxpr import Equation, Program, Var, bind, evaluate, flatten, scan_layout, trace
from ..ops import ETPPrimitive
from ._kinds import Kind, kind_of


def unrolled(
    program: Program, consts: Sequence[Any], states: Iterable[Var]
) -> tuple[Program, tuple[Any, ...]]:
    """The same program without `scan` and `cond`, and the values of its constants.

    `states` are the inputs that remember; what depends on them or on an operator moves.
    """
    if not any(e.name in ("scan", "cond") for e in program.equations):
        return program, tuple(consts)
    moving = set(states)
    for eqn in program.equations:
        if isinstance(eqn.primitive, ETPPrimitive) or _moves(eqn, moving):
            moving.update(v for v in eqn.outputs if v.is_inexact)

    def apply(eqn: Equation, values: list[Any]) -> list[Any]:
        flags = [isinstance(a, Var) and a in moving for a in eqn.inputs]
        return _written_out(eqn, values) if _keeps_units_apart(eqn, flags) else bind(eqn, values)

    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in program.inputs]
    return trace(lambda *inputs: evaluate(program, consts, inputs, apply), *shapes)


def _moves(eqn: Equation, moving: set[Var]) -> bool:
    smooth = eqn.name != "stop_gradient"
    return smooth and any(isinstance(a, Var) and a.is_inexact and a in moving for a in eqn.inputs)


def _written_out(eqn: Equation, values: list[Any]) -> list[Any]:
    if isinstance(eqn.primitive, ETPPrimitive):
        return [eqn.primitive.apply(eqn.params)(*values)]
    if eqn.name == "cond":
        sides = [_run(branch, values[1:]) for branch in eqn.params["branches"]]
        index = jnp.clip(values[0].astype("int32"), 0, len(sides) - 1)
        return [
            jax.lax.select_n(jnp.broadcast_to(index, out[0].shape), *out)
            for out in zip(*sides, strict=True)
        ]
    return _turn_by_turn(eqn, values) if eqn.name == "scan" else bind(eqn, values)


def _run(body: Any, values: Sequence[Any]) -> list[Any]:
    program, consts = flatten(body)
    return evaluate(program, consts, values, _written_out)


def _turn_by_turn(eqn: Equation, values: list[Any]) -> list[Any]:
    p = eqn.params
    first, n_carry = scan_layout(p)
    last = first + n_carry
    carry, rows = values[first:last], []
    order = range(p["length"])
    for t in reversed(order) if p["reverse"] else order:
        out = _run(p["jaxpr"], [*values[:first], *carry, *(x[t] for x in values[last:])])
        carry = out[: last - first]
        rows.append(out[last - first :])
    rows = rows[::-1] if p["reverse"] else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _keeps_units_apart(eqn: Equation, flags: list[bool]) -> bool:
    """Whether a `cond` or `scan` mixes nothing that moves; `flags` tell which inputs do."""
    if eqn.name == "cond":
        return all(_apart(branch, flags[1:]) is not None for branch in eqn.params["branches"])
    if eqn.name != "scan":
        return False
    first, n_carry = scan_layout(eqn.params)
    while True:
        out = _apart(eqn.params["jaxpr"], flags)
        if out is None:
            return False
        carry = [a or b for a, b in zip(flags[first : first + n_carry], out, strict=False)]
        if carry == flags[first : first + n_carry]:
            return True
        flags = [*flags[:first], *carry, *flags[first + n_carry :]]


def _apart(body: Any, flags: list[bool]) -> list[bool] | None:
    """Which outputs of a body move; None if something that moves is mixed on the way there."""
    program, _ = flatten(body)
    live = {o for o in program.outputs if isinstance(o, Var) and o.is_inexact}
    for eqn in reversed(program.equations):
        if eqn.name != "stop_gradient" and any(o in live for o in eqn.outputs):
            live.update(a for a in eqn.inputs if isinstance(a, Var) and a.is_inexact)
    moving = {v for v, f in zip(program.inputs, flags, strict=True) if f and v.is_inexact}
    for eqn in program.equations:
        if not _moves(eqn, moving) or not any(o in live for o in eqn.outputs):
            continue
        if eqn.name in ("cond", "scan"):
            inner = [isinstance(a, Var) and a in moving for a in eqn.inputs]
            mixes = not _keeps_units_apart(eqn, inner)
        else:
            mixes = isinstance(eqn.primitive, ETPPrimitive) or kind_of(eqn, {}) is Kind.MIXES
        if mixes:
            return None
        moving.update(v for v in eqn.outputs if v.is_inexact)
    return [isinstance(o, Var) and o in moving for o in program.outputs]
