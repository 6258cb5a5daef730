"""Control flow written out: loops turn by turn, a choice as both sides and a selection.

A body in which something mixes units stays one equation, which then counts as mixing; so does a
`while`, whose number of turns is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxpr import Equation, Program, Var, bind, evaluate, flatten, trace
from ..ops import ETPPrimitive
from ._kinds import Kind, kind_of


def unrolled(program: Program, consts: Sequence[Any]) -> tuple[Program, tuple[Any, ...]]:
    """The same program without `scan` and `cond`, and the values of its constants."""
    if not any(e.name in ("scan", "cond") for e in program.equations):
        return program, tuple(consts)
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in program.inputs]
    return trace(lambda *inputs: evaluate(program, consts, inputs, _apply), *shapes)


def _apply(eqn: Equation, values: list[Any]) -> list[Any]:
    if eqn.name == "cond" and all(map(_keeps_units_apart, eqn.params["branches"])):
        sides = [_run(branch, values[1:]) for branch in eqn.params["branches"]]
        index = jnp.clip(values[0].astype(int), 0, len(sides) - 1)
        return [
            jax.lax.select_n(jnp.broadcast_to(index, out[0].shape).astype("int32"), *out)
            if len(out) > 1
            else out[0]
            for out in zip(*sides, strict=True)
        ]
    if eqn.name == "scan" and _keeps_units_apart(eqn.params["jaxpr"]):
        return _turn_by_turn(eqn, values)
    return bind(eqn, values)


def _run(body: Any, values: Sequence[Any]) -> list[Any]:
    program, consts = flatten(body)
    return evaluate(program, consts, values, _apply)


def _turn_by_turn(eqn: Equation, values: list[Any]) -> list[Any]:
    p = eqn.params
    first, last = p["num_consts"], p["num_consts"] + p["num_carry"]
    carry, rows = values[first:last], []
    order = range(p["length"])
    for t in reversed(order) if p["reverse"] else order:
        out = _run(p["jaxpr"], [*values[:first], *carry, *(x[t] for x in values[last:])])
        carry = out[: last - first]
        rows.append(out[last - first :])
    rows = rows[::-1] if p["reverse"] else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def _keeps_units_apart(body: Any) -> bool:
    """Whether no mixing equation lies on a path that carries a derivative out of the body."""
    program, _ = flatten(body)
    live = {o for o in program.outputs if isinstance(o, Var) and o.is_inexact}
    for eqn in reversed(program.equations):
        if eqn.name == "stop_gradient" or not any(o in live for o in eqn.outputs):
            continue
        moving = [a for a in eqn.inputs if isinstance(a, Var) and a.is_inexact]
        if eqn.name in ("scan", "cond"):
            inner = eqn.params["branches"] if eqn.name == "cond" else (eqn.params["jaxpr"],)
            mixes = not all(map(_keeps_units_apart, inner))
        else:
            mixes = isinstance(eqn.primitive, ETPPrimitive) or kind_of(eqn, {}) is Kind.MIXES
        if mixes and moving:
            return False
        live.update(moving)
    return True
