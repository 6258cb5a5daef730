"""From the jaxprs of JAX to programs: calls that mean no more than their equations are inlined."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ._canonical import INLINED, rewritten
from ._jax import Jaxpr, JaxprEqn, SourceInfo, core, open_jaxpr, side_effects
from ._primitives import DerivedPrimitive
from ._records import Atom, Body, Const, Equation, Params, Program, Var, is_inexact, shape_of

CUSTOM_DERIVATIVE = {"custom_jvp_call", "custom_vjp_call"}
# Where a zero is a place that stays empty, not a number that may be another one at the next call.
_KEEPS_ZEROS = {"broadcast_in_dim", "pad", "select_n"}


def trace(fun: Callable, *args: Any) -> tuple[Program, tuple[Any, ...]]:
    """Trace `fun` on trees of arrays; returns the program and its closed-over values."""
    return flatten(jax.make_jaxpr(fun)(*args))


def flatten(
    closed: core.ClosedJaxpr, callers: tuple[SourceInfo, ...] = ()
) -> tuple[Program, tuple[Any, ...]]:
    """Inline every call of a closed jaxpr; returns the program and its closed-over values.

    Floating literals count as closed-over values: two traces that differ in them alone are the
    same program, but for the zeros that arrays are filled up with. `callers` are the source lines
    around it.
    """
    flat = _Flattener()
    inputs = tuple(_fresh(v) for v in open_jaxpr(closed).invars)
    outputs = flat.inline(closed, inputs, callers)
    program = Program(tuple(flat.consts), inputs, tuple(flat.equations), outputs)
    return program, tuple(flat.values)


class _Flattener:
    def __init__(self):
        self.consts: list[Var] = []
        self.values: list[Any] = []
        self.equations: list[Equation] = []
        self.zeros: dict[Atom, Const] = {}

    def constant(self, var: Var, value: Any) -> Var:
        self.consts.append(var)
        self.values.append(value)
        return var

    def literal(self, aval: Any, value: Any) -> Atom:
        if not is_inexact(aval.dtype):
            return Const(value)
        array = np.asarray(value, aval.dtype)
        var = self.constant(Var(tuple(aval.shape), aval.dtype), array)
        if not array.any():
            self.zeros[var] = Const(array)
        return var

    def inline(
        self, closed: Any, inputs: Sequence[Atom], callers: tuple[SourceInfo, ...]
    ) -> tuple[Atom, ...]:
        jaxpr = open_jaxpr(closed)
        consts = zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True)
        env: dict[Any, Atom] = {v: self.constant(_fresh(v), value) for v, value in consts}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Atom:
            return self.literal(atom.aval, atom.val) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(read(a) for a in eqn.invars)
            outer = (eqn.source_info, *callers)
            if eqn.primitive.name in INLINED:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                env.update(zip(eqn.outvars, self.inline(inner, inputs, outer), strict=True))
                continue
            outputs = tuple(_fresh(v) for v in eqn.outvars)
            if eqn.primitive.name in _KEEPS_ZEROS:
                inputs = tuple(self.zeros.get(a, a) for a in inputs)
            flat = Equation(
                eqn.primitive,
                inputs,
                outputs,
                eqn.params,
                eqn.source_info,
                side_effects(eqn),
                callers,
                tuple(_body(j, outer) for j in _bodies(eqn)),
            )
            equations, results = rewritten(flat) or ([flat], outputs)
            self.equations += equations
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(read(a) for a in jaxpr.outvars)


def _bodies(eqn: JaxprEqn) -> Sequence[core.ClosedJaxpr]:
    p = eqn.params
    if eqn.primitive.name == "cond":
        return p["branches"]
    if eqn.primitive.name == "scan":
        return (p["jaxpr"],)
    return (p["cond_jaxpr"], p["body_jaxpr"]) if eqn.primitive.name == "while" else ()


def _body(closed: core.ClosedJaxpr, callers: tuple[SourceInfo, ...]) -> Body:
    program, values = flatten(closed, callers)
    return Body(prune(program), values)


def _fresh(var: Any) -> Var:
    return Var(tuple(var.aval.shape), var.aval.dtype)


def inlined(eqn: Equation) -> tuple[Program, tuple[Any, ...]] | None:
    """The program that an equation stands for where nothing is differentiated, if it is a call."""
    if isinstance(eqn.primitive, DerivedPrimitive):
        return trace(eqn.primitive.apply(eqn.params), *(shape_of(a) for a in eqn.inputs))
    if eqn.name not in CUSTOM_DERIVATIVE:
        return None
    inner: Any = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    return flatten(inner)


def inner_jaxprs(params: Params) -> Iterator[Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(open_jaxpr(item), "eqns"):
                yield open_jaxpr(item)


def inner_equations(eqn: Equation | JaxprEqn) -> Iterator[JaxprEqn]:
    """All JAX equations nested anywhere inside an equation's parameters."""
    for jaxpr in inner_jaxprs(eqn.params):
        for inner in jaxpr.eqns:
            yield inner
            yield from inner_equations(inner)


def reads_named_axis(eqn: Equation | JaxprEqn) -> bool:
    """Whether an equation joins what a `vmap` with a name maps, like `psum`."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return any(isinstance(a, str) for a in (axes if isinstance(axes, tuple) else (axes,)))


def cannot_be_mapped(eqn: Equation) -> bool:
    """Whether an equation calls Python in a way that has no `vmap`."""
    calls: list[Any] = [eqn, *inner_equations(eqn)]
    return any(
        e.primitive.name == "pure_callback" and e.params.get("vmap_method") is None for e in calls
    )


def close(program: Program, values: Sequence[Any]) -> Program:
    """The program with the arrays that tracing brought along as its literals."""
    literal: dict[Var, Const] = {v: Const(c) for v, c in zip(program.consts, values, strict=True)}

    def sub(atom: Atom) -> Atom:
        return literal.get(atom, atom) if isinstance(atom, Var) else atom

    equations = tuple(replace(e, inputs=tuple(sub(a) for a in e.inputs)) for e in program.equations)
    return Program((), program.inputs, equations, tuple(sub(o) for o in program.outputs))


def prune(program: Program, outputs: Sequence[Atom] | None = None) -> Program:
    """Drop the equations that the outputs (or other `outputs`) do not need.

    Equations with side effects stay unless other outputs are asked for.
    """
    results = program.outputs if outputs is None else tuple(outputs)
    needed = {o for o in results if isinstance(o, Var)}
    equations: list[Equation] = []
    for eqn in reversed(program.equations):
        if any(o in needed for o in eqn.outputs) or (eqn.effects and outputs is None):
            equations.append(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
    return Program(program.consts, program.inputs, tuple(reversed(equations)), results)


def section(
    program: Program, inputs: Sequence[Var], outputs: Sequence[Atom], fixed: Collection[Var] = ()
) -> Program:
    """The part of a program between some of its variables; what else it reads are its constants.

    What depends on the inputs through `fixed` variables only is constant as well.
    """
    varying = set(inputs)
    equations = []
    for eqn in program.equations:
        varies = any(isinstance(a, Var) and a in varying for a in eqn.inputs)
        if varies and not all(o in fixed for o in eqn.outputs):
            equations.append(eqn)
            varying.update(eqn.outputs)
    part = prune(Program((), tuple(inputs), tuple(equations), ()), outputs)
    read = [a for eqn in part.equations for a in eqn.inputs] + list(outputs)
    consts = dict.fromkeys(a for a in read if isinstance(a, Var) and a not in varying)
    return replace(part, consts=tuple(consts))
