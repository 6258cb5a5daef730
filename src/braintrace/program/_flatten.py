"""From the jaxprs of JAX to programs: calls that mean no more than their equations are inlined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ._canonical import INLINED, canonical
from ._jax import Jaxpr, JaxprEqn, SourceInfo, core, open_jaxpr, side_effects
from ._primitives import DerivedPrimitive
from ._records import Atom, Body, Const, Equation, Params, Program, Var, is_inexact, shape_of
from ._rewriting import Rewriting, Rule, close, prune

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
    program = Program(tuple(flat.consts), inputs, tuple(flat.to.equations), outputs)
    return program, tuple(flat.values)


def write(to: Rewriting, function: Callable, *atoms: Any, rule: Rule | None = None) -> list[Atom]:
    """The results of a function of these trees of atoms; its equations may be rewritten, too."""
    inner, at = close(*trace(function, *jax.tree.map(shape_of, atoms))), to.at
    to.same.update(zip(inner.inputs, to.read(jax.tree.leaves(atoms)), strict=True))
    for eqn in inner.equations:
        eqn = replace(eqn, source=at.source, callers=at.callers)
        to.take(eqn, rule or (lambda to, eqn: None))
    to.at = at
    return list(to.read(inner.outputs))


@dataclass(slots=True)
class _Flattener:
    to: Rewriting = field(default_factory=Rewriting)
    consts: list[Var] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    zeros: dict[Atom, Const] = field(default_factory=dict)

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
            env.update(zip(eqn.outvars, self.to.take(flat, canonical), strict=True))
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
