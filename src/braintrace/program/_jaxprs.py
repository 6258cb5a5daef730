"""Programs as jaxprs of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax

from ._jax import Jaxpr, JaxprEqn, JaxVar, Literal, ShapedArray, core, new_equation, open_jaxpr
from ._records import Atom, Equation, Program, Var

_variables: WeakKeyDictionary[Var, JaxVar] = WeakKeyDictionary()


def variable(var: Var) -> JaxVar:
    """The JAX variable that stands for a variable of a program: always the same one."""
    if var not in _variables:
        _variables[var] = JaxVar(ShapedArray(var.shape, var.dtype))
    return _variables[var]


def jaxpr_of(program: Program) -> Jaxpr:
    """A program as a jaxpr of JAX, over `variable`s."""
    blank = open_jaxpr(jax.make_jaxpr(lambda: ())())
    consts = [variable(v) for v in program.consts]
    equations = [equation_of(eqn) for eqn in program.equations]
    # JAX >= 0.11 takes as constants only what has a value: shapes stand for them.
    held = {"consts": [v.aval for v in consts]} if hasattr(blank, "consts") else {}
    return blank.replace(
        constvars=consts,
        invars=[variable(v) for v in program.inputs],
        outvars=[operand_of(o) for o in program.outputs],
        eqns=equations,
        effects={e for eqn in equations for e in eqn.effects},
        **held,
    )


def closed_jaxpr_of(program: Program, consts: Sequence[Any]) -> core.ClosedJaxpr:
    """A program and the values of its constants as a closed jaxpr of JAX."""
    return core.ClosedJaxpr(jaxpr_of(program), consts)


def equation_of(eqn: Equation) -> JaxprEqn:
    """An equation as one of JAX, over `variable`s."""
    inputs, outputs = [operand_of(a) for a in eqn.inputs], [variable(v) for v in eqn.outputs]
    return new_equation(inputs, outputs, eqn.primitive, eqn.params, set(eqn.effects), eqn.source)


def operand_of(atom: Atom) -> JaxVar | Literal:
    """The JAX variable or literal that stands for an atom."""
    if isinstance(atom, Var):
        return variable(atom)
    return Literal(atom.value, ShapedArray(atom.shape, atom.dtype))
