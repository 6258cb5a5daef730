"""Programs made of others: parts of them, and some equations in the place of others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax

from ._records import Atom, Const, Equation, Params, Program, Var


@dataclass(slots=True)
class Rewriting:
    """The equations of a new program so far, and what stands in it for values of the old one.

    What is added has the line of `at`, the equation in whose place it stands.
    """

    equations: list[Equation] = field(default_factory=list)
    same: dict[Atom, Atom] = field(default_factory=dict)
    at: Equation = field(init=False)

    def read(self, atoms: Iterable[Atom]) -> tuple[Atom, ...]:
        """What stands for these values."""
        return tuple(self.same.get(a, a) for a in atoms)

    def take(self, eqn: Equation, rule: Rule) -> Sequence[Atom]:
        """Write what the rule has in the place of an equation, or itself if that is None."""
        self.at = eqn
        outs = rule(self, eqn)
        if outs is None:
            return self.put(eqn)
        self.same.update(zip(eqn.outputs, self.read(outs), strict=True))
        return outs

    def put(self, eqn: Equation) -> Sequence[Atom]:
        """The results of this equation of the old program, with what its operands are now."""
        inputs = self.read(eqn.inputs)
        self.equations.append(eqn if inputs == eqn.inputs else replace(eqn, inputs=inputs))
        return eqn.outputs

    def apply(
        self,
        primitive: Any,
        operands: Sequence[Atom],
        shape: Iterable[int],
        params: Params,
        dtype: Any = None,
    ) -> Var:
        """The result of one more equation; by default of the type of its first operand."""
        out = Var(tuple(shape), operands[0].dtype if dtype is None else dtype)
        source, callers = self.at.source, self.at.callers
        self.put(Equation(primitive, tuple(operands), (out,), params, source, callers=callers))
        return out

    def reshape(self, a: Atom, shape: Sequence[int]) -> Atom:
        params = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
        same = tuple(a.shape) == tuple(shape)
        return a if same else self.apply(lax.reshape_p, [a], shape, params)

    def slice(self, a: Atom, axis: int, start: int, stop: int) -> Atom:
        first, last = [0] * len(a.shape), list(a.shape)
        first[axis], last[axis] = int(start), int(stop)
        shape = [e - s for s, e in zip(first, last, strict=True)]
        params = {"start_indices": tuple(first), "limit_indices": tuple(last), "strides": None}
        return a if shape == list(a.shape) else self.apply(lax.slice_p, [a], shape, params)

    def transpose(self, a: Atom, order: Sequence[int]) -> Atom:
        params = {"permutation": tuple(order)}
        same = tuple(order) == tuple(range(len(order)))
        shape = [a.shape[k] for k in order]
        return a if same else self.apply(lax.transpose_p, [a], shape, params)


# What is in the place of an equation: the atoms of its results, None to leave it as it is.
Rule = Callable[[Rewriting, Equation], Sequence[Atom] | None]


Results = Callable[[Rewriting], Sequence[Atom]]


def rewritten(program: Program, rule: Rule, results: Results | None = None) -> Program:
    """The program with other equations, without those that nothing needs any more.

    With `results` also with other outputs.
    """
    to = Rewriting()
    for eqn in program.equations:
        to.take(eqn, rule)
    outputs = program.outputs if results is None else results(to)
    if to.equations == list(program.equations):
        return program
    return prune(replace(program, equations=tuple(to.equations), outputs=to.read(outputs)))


def close(program: Program, values: Sequence[Any]) -> Program:
    """The program with the arrays that tracing brought along as its literals."""
    to = Rewriting(same=dict(zip(program.consts, map(Const, values), strict=True)))
    for eqn in program.equations:
        to.put(eqn)
    return Program((), program.inputs, tuple(to.equations), to.read(program.outputs))


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
    consts = dict.fromkeys(a for a in part.read if isinstance(a, Var) and a not in varying)
    return replace(part, consts=tuple(consts))
