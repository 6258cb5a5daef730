"""Control flow unrolled: loops by iteration, a `cond` as all its branches and a selection.

Operators in a body stay operators, one use per iteration or branch; `origin` tells which uses are
copies of one equation. An operator without a trained operand is plain computation. A `while` stays
one equation: its number of iterations is not a constant.

In a branch that is not active an operator reads zeros, and nothing that goes wrong there (NaN)
reaches a derivative: what enters the branch is selected by whether it is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace.ops import ETPPrimitive
from braintrace.program import (
    Atom,
    Const,
    Equation,
    Program,
    Var,
    flatten,
    guards,
    inner_equations,
    is_inexact,
    scan_layout,
    trace,
)


@dataclass(frozen=True, eq=False, slots=True)
class Unrolled:
    """A program without `scan` and `cond`, and the values of its constants.

    `origin`: per equation the one it is a copy of; `trainable`: what has a derivative by
    parameters; `steady`: what depends on parameters and constants only.
    """

    program: Program
    consts: tuple[Any, ...]
    origin: dict[Equation, Equation]
    trainable: set[Any]
    steady: set[Any]


def unroll(program: Program, consts: Sequence[Any], params: Iterable[Var] = ()) -> Unrolled:
    """Unroll a program whose inputs `params` are the parameters."""
    new = _Unroller(params)
    outputs = new.run(new.with_consts(program, consts), program.inputs)
    flat = Program(tuple(new.consts), program.inputs, tuple(new.equations), tuple(outputs))
    return Unrolled(flat, tuple(new.values), new.origin, new.trainable, new.steady)


def calls_operator(eqn: Equation) -> bool:
    """Whether an equation is a function with its own derivative around an operator."""
    return eqn.name.startswith("custom_") and any(
        isinstance(e.primitive, ETPPrimitive) for e in inner_equations(eqn)
    )


class _Unroller:
    def __init__(self, params: Iterable[Var]):
        params = list(params)
        self.consts: list[Var] = []
        self.values: list[Any] = []
        self.equations: list[Equation] = []
        self.origin: dict[Equation, Equation] = {}
        self.trainable: set[Any] = {v for v in params if v.is_inexact}
        self.steady: set[Any] = set(params)
        self.bodies: dict[tuple[Equation, int], Program] = {}

    def with_consts(self, program: Program, consts: Sequence[Any]) -> Program:
        self.consts += program.consts
        self.values += consts
        self.steady.update(program.consts)
        return program

    def body(self, eqn: Equation, k: int, jaxpr: Any) -> Program:
        if (eqn, k) not in self.bodies:
            self.bodies[eqn, k] = self.with_consts(*flatten(jaxpr))
        return self.bodies[eqn, k]

    # ------------------------------------------------------------------------------- equations

    def run(
        self, program: Program, inputs: Sequence[Atom], active: Atom | None = None
    ) -> list[Atom]:
        env: dict[Var, Atom] = {
            v: Const(np.asarray(a.value, v.dtype)) if isinstance(a, Const) else a
            for v, a in zip(program.inputs, inputs, strict=True)
        }

        def read(a: Atom) -> Atom:
            return env.get(a, a) if isinstance(a, Var) else a

        passed_through = guards(program)
        for eqn in program.equations:
            if eqn in passed_through and self.is_steady(read(passed_through[eqn])):
                env[eqn.outputs[0]] = read(passed_through[eqn])
                continue
            outs = self.write(eqn, [read(a) for a in eqn.inputs], active)
            env.update(zip(eqn.outputs, outs, strict=True))
        return [read(o) for o in program.outputs]

    def write(self, eqn: Equation, inputs: list[Atom], active: Atom | None) -> Sequence[Atom]:
        if eqn.name == "scan":
            return self.iterations(eqn, inputs, active)
        if eqn.name == "cond" and not eqn.effects:
            return self.branches(eqn, inputs, active)
        x: int | None = None
        if operator := isinstance(eqn.primitive, ETPPrimitive):
            x = eqn.primitive.x_invar_index
            if not any(a in self.trainable for i, a in enumerate(inputs) if i != x):
                shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in eqn.inputs]
                plain = jax.make_jaxpr(eqn.primitive.apply(eqn.params))(*shapes)
                return self.run(self.body(eqn, 0, plain), inputs, active)
        elif operator := calls_operator(eqn):
            x = next(iter(entries(inputs, self.steady)), None)
        if active is not None:
            if operator and x is not None:
                inputs[x] = self.masked(active, inputs[x])
            elif not operator and not all(self.is_steady(a) for a in inputs):
                inputs = [self.guarded(active, a) if a in self.trainable else a for a in inputs]
        return self.add(eqn, inputs)

    def add(self, eqn: Equation, inputs: Sequence[Atom]) -> tuple[Var, ...]:
        outputs = tuple(Var(v.shape, v.dtype) for v in eqn.outputs)
        new = replace(eqn, inputs=tuple(inputs), outputs=outputs, bodies=())
        self.equations.append(new)
        self.origin[new] = eqn
        if all(self.is_steady(a) for a in inputs):
            self.steady.update(outputs)
        if eqn.name != "stop_gradient" and any(a in self.trainable for a in inputs):
            self.trainable.update(v for v in outputs if v.is_inexact)
        return outputs

    def is_steady(self, atom: Atom) -> bool:
        return isinstance(atom, Const) or atom in self.steady

    def emit(self, fun: Callable[..., Any], *atoms: Atom) -> Atom:
        """Add the equations of a plain function of one result."""
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in atoms]
        return self.run(self.with_consts(*trace(fun, *shapes)), atoms)[0]

    # ------------------------------------------------------------------------------- structure

    def iterations(self, eqn: Equation, inputs: list[Atom], active: Atom | None) -> list[Atom]:
        p = eqn.params
        first, n_carry = scan_layout(p)
        last = first + n_carry
        body = self.body(eqn, 0, p["jaxpr"])
        carry, rows = inputs[first:last], []
        order = range(p["length"])
        for t in reversed(order) if p["reverse"] else order:
            row = lambda x, t=t: lax.index_in_dim(x, t, keepdims=False)
            xs = [self.emit(row, a) for a in inputs[last:]]
            outs = self.run(body, [*inputs[:first], *carry, *xs], active)
            carry = outs[:n_carry]
            rows.append(outs[n_carry:])
        if not rows:
            empty = lambda v: self.emit(lambda: jnp.zeros(v.shape, v.dtype))
            return [*carry, *(empty(v) for v in eqn.outputs[n_carry:])]
        rows = rows[::-1] if p["reverse"] else rows
        stack = lambda *column: jnp.stack(column)
        return [*carry, *(self.emit(stack, *column) for column in zip(*rows, strict=True))]

    def branches(self, eqn: Equation, inputs: list[Atom], active: Atom | None) -> list[Atom]:
        branches = eqn.params["branches"]
        last = len(branches) - 1
        index = self.emit(lambda i: jnp.clip(i.astype("int32"), 0, last), inputs[0])
        results = []
        for k, branch in enumerate(branches):
            here = self.emit(lambda i, k=k: i == k, index)
            if active is not None:
                here = self.emit(jnp.logical_and, active, here)
            enter = lambda a, here=here: a if self.is_steady(a) else self.guarded(here, a)
            results.append(self.run(self.body(eqn, k, branch), [*map(enter, inputs[1:])], here))
        return [self.emit(lax.select_n, index, *outs) for outs in zip(*results, strict=True)]

    def guarded(self, active: Atom, atom: Atom) -> Atom:
        """The same value, without a derivative where it is not read."""
        if not is_inexact(atom.dtype):
            return atom
        return self.emit(lambda t, v: lax.select_n(t, lax.stop_gradient(v), v), active, atom)

    def masked(self, active: Atom, atom: Atom) -> Atom:
        return self.emit(lambda t, v: lax.select_n(t, jnp.zeros_like(v), v), active, atom)


def entries(inputs: Sequence[Atom], steady: set[Any]) -> list[int]:
    """The operands that carry derivatives of something other than parameters."""
    return [
        i for i, a in enumerate(inputs) if isinstance(a, Var) and a.is_inexact and a not in steady
    ]
