"""Control flow written out: loops turn by turn, a choice as all its sides and a selection.

Operators in a body stay operators, one use per turn or side; `origin` tells which uses are copies
of one equation. An operator without a trained operand is plain computation. A `while` stays one
equation, its number of turns is not known.

In a side that is not taken an operator sees zeros, and nothing that goes wrong there (NaN) reaches
a derivative: what enters the side is selected by whether it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace._control import guards
from braintrace._jaxpr import (
    Atom,
    Const,
    Equation,
    Program,
    Var,
    flatten,
    inner_equations,
    is_inexact,
    scan_layout,
    trace,
)
from braintrace.ops import ETPPrimitive


@dataclass(frozen=True, eq=False, slots=True)
class Written:
    """A program without `scan` and `cond`, and the values of its constants.

    `origin`: per equation the one it is a copy of; `learns`: what has a derivative by parameters;
    `steady`: what depends on parameters and constants only.
    """

    program: Program
    consts: tuple[Any, ...]
    origin: dict[Equation, Equation]
    learns: set[Any]
    steady: set[Any]


def written_out(program: Program, consts: Sequence[Any], params: Iterable[Var] = ()) -> Written:
    """Write out a program whose inputs `params` are the parameters."""
    writer = _Writer(params)
    outputs = writer.run(writer.known(program, consts), program.inputs)
    flat = Program(tuple(writer.consts), program.inputs, tuple(writer.equations), tuple(outputs))
    return Written(flat, tuple(writer.values), writer.origin, writer.learns, writer.steady)


def calls_operator(eqn: Equation) -> bool:
    """Whether an equation is a function with its own derivative around an operator."""
    return eqn.name.startswith("custom_") and any(
        isinstance(e.primitive, ETPPrimitive) for e in inner_equations(eqn)
    )


class _Writer:
    def __init__(self, params: Iterable[Var]):
        params = list(params)
        self.consts: list[Var] = []
        self.values: list[Any] = []
        self.equations: list[Equation] = []
        self.origin: dict[Equation, Equation] = {}
        self.learns: set[Any] = {v for v in params if v.is_inexact}
        self.steady: set[Any] = set(params)
        self.bodies: dict[tuple[Equation, int], Program] = {}

    def known(self, program: Program, consts: Sequence[Any]) -> Program:
        self.consts += program.consts
        self.values += consts
        self.steady.update(program.consts)
        return program

    def body(self, eqn: Equation, k: int, jaxpr: Any) -> Program:
        if (eqn, k) not in self.bodies:
            self.bodies[eqn, k] = self.known(*flatten(jaxpr))
        return self.bodies[eqn, k]

    # ------------------------------------------------------------------------------- equations

    def run(
        self, program: Program, inputs: Sequence[Atom], taken: Atom | None = None
    ) -> list[Atom]:
        env: dict[Var, Atom] = {
            v: Const(np.asarray(a.value, v.dtype)) if isinstance(a, Const) else a
            for v, a in zip(program.inputs, inputs, strict=True)
        }

        def read(a: Atom) -> Atom:
            return env.get(a, a) if isinstance(a, Var) else a

        seen_through = guards(program)
        for eqn in program.equations:
            if eqn in seen_through and self.is_steady(read(seen_through[eqn])):
                env[eqn.outputs[0]] = read(seen_through[eqn])
                continue
            outs = self.write(eqn, [read(a) for a in eqn.inputs], taken)
            env.update(zip(eqn.outputs, outs, strict=True))
        return [read(o) for o in program.outputs]

    def write(self, eqn: Equation, inputs: list[Atom], taken: Atom | None) -> Sequence[Atom]:
        if eqn.name == "scan":
            return self.turns(eqn, inputs, taken)
        if eqn.name == "cond" and not eqn.effects:
            return self.sides(eqn, inputs, taken)
        x: int | None = None
        if operator := isinstance(eqn.primitive, ETPPrimitive):
            x = eqn.primitive.x_invar_index
            if not any(a in self.learns for i, a in enumerate(inputs) if i != x):
                shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in eqn.inputs]
                plain = jax.make_jaxpr(eqn.primitive.apply(eqn.params))(*shapes)
                return self.run(self.body(eqn, 0, plain), inputs, taken)
        elif operator := calls_operator(eqn):
            x = next(iter(entries(inputs, self.steady)), None)
        if taken is not None:
            if operator and x is not None:
                inputs[x] = self.masked(taken, inputs[x])
            elif not operator and not all(self.is_steady(a) for a in inputs):
                inputs = [self.guarded(taken, a) if a in self.learns else a for a in inputs]
        return self.add(eqn, inputs)

    def add(self, eqn: Equation, inputs: Sequence[Atom]) -> tuple[Var, ...]:
        outputs = tuple(Var(v.shape, v.dtype) for v in eqn.outputs)
        new = Equation(
            eqn.primitive,
            tuple(inputs),
            outputs,
            eqn.params,
            eqn.source,
            eqn.effects,
            eqn.callers,
        )
        self.equations.append(new)
        self.origin[new] = eqn
        if all(self.is_steady(a) for a in inputs):
            self.steady.update(outputs)
        if eqn.name != "stop_gradient" and any(a in self.learns for a in inputs):
            self.learns.update(v for v in outputs if v.is_inexact)
        return outputs

    def is_steady(self, atom: Atom) -> bool:
        return isinstance(atom, Const) or atom in self.steady

    def emit(self, fun: Callable[..., Any], *atoms: Atom) -> Atom:
        """Write what a plain function of one result does."""
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in atoms]
        return self.run(self.known(*trace(fun, *shapes)), atoms)[0]

    # ------------------------------------------------------------------------------- structure

    def turns(self, eqn: Equation, inputs: list[Atom], taken: Atom | None) -> list[Atom]:
        p = eqn.params
        first, n_carry = scan_layout(p)
        last = first + n_carry
        body = self.body(eqn, 0, p["jaxpr"])
        carry, rows = inputs[first:last], []
        order = range(p["length"])
        for t in reversed(order) if p["reverse"] else order:
            row = lambda x, t=t: lax.index_in_dim(x, t, keepdims=False)
            xs = [self.emit(row, a) for a in inputs[last:]]
            outs = self.run(body, [*inputs[:first], *carry, *xs], taken)
            carry = outs[:n_carry]
            rows.append(outs[n_carry:])
        if not rows:
            empty = lambda v: self.emit(lambda: jnp.zeros(v.shape, v.dtype))
            return [*carry, *(empty(v) for v in eqn.outputs[n_carry:])]
        rows = rows[::-1] if p["reverse"] else rows
        stack = lambda *column: jnp.stack(column)
        return [*carry, *(self.emit(stack, *column) for column in zip(*rows, strict=True))]

    def sides(self, eqn: Equation, inputs: list[Atom], taken: Atom | None) -> list[Atom]:
        branches = eqn.params["branches"]
        last = len(branches) - 1
        index = self.emit(lambda i: jnp.clip(i.astype("int32"), 0, last), inputs[0])
        found = []
        for k, branch in enumerate(branches):
            here = self.emit(lambda i, k=k: i == k, index)
            if taken is not None:
                here = self.emit(jnp.logical_and, taken, here)
            enter = lambda a, here=here: a if self.is_steady(a) else self.guarded(here, a)
            found.append(self.run(self.body(eqn, k, branch), [*map(enter, inputs[1:])], here))
        return [self.emit(lax.select_n, index, *outs) for outs in zip(*found, strict=True)]

    def guarded(self, taken: Atom, atom: Atom) -> Atom:
        """The same value, without a derivative where it is not read."""
        if not is_inexact(atom.dtype):
            return atom
        return self.emit(lambda t, v: lax.select_n(t, lax.stop_gradient(v), v), taken, atom)

    def masked(self, taken: Atom, atom: Atom) -> Atom:
        return self.emit(lambda t, v: lax.select_n(t, jnp.zeros_like(v), v), taken, atom)


def entries(inputs: Sequence[Atom], steady: set[Any]) -> list[int]:
    """The operands that carry derivatives of something other than parameters."""
    return [
        i for i, a in enumerate(inputs) if isinstance(a, Var) and a.is_inexact and a not in steady
    ]
