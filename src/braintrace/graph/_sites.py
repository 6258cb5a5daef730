"""Sites: every use of an ETP operator in the step, in bodies of control flow too.

An operator inside a `scan` runs once per iteration. Either its iterations are *mapped*, positions
of their own as under `vmap` (a scan that carries nothing, or a weight with a slice per iteration),
or they are more time: all of them move the same trace, and x, y and f gain an axis of iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import NotSupportedError, message
from ..ops import ETPPrimitive, Operator
from ..program import (
    Atom,
    Equation,
    Program,
    Var,
    bind,
    deep_equations,
    guards,
    inner_equations,
    is_traced,
    scan_layout,
    shape_of,
)
from ._reach import bits_of, indices_of, reach
from ._step import Step


@dataclass(frozen=True, eq=False, slots=True)
class Level:
    """A body around an operator: of which equation, and how often it runs (a scan: `length`)."""

    equation: Equation
    branch: int
    length: int | None
    mapped: bool


@dataclass(frozen=True, eq=False)
class Site:
    """An ETP operator in the step, and the parameters its operands depend on."""

    equation: Equation
    operator: Operator
    leaves: Mapping[str, tuple[int, ...]]  # per operand, indices in `step.params`: none, untrained
    varying: frozenset[str]  # operands that read states or inputs
    levels: tuple[Level, ...] = ()
    closed: Equation | None = None  # the control flow around it that the user wants left alone

    @property
    def trained(self) -> bool:
        return any(self.leaves.values())

    @cached_property
    def steady(self) -> bool:
        """Whether dy/dw needs nothing but the input and values computed from parameters."""
        trained = {k for k, leaves in self.leaves.items() if leaves}
        if not self.varying:
            return True
        needed = frozenset().union(*(self.operator.pull_reads[k] for k in trained))
        return not self.varying & (trained | needed)

    @property
    def y(self) -> Var:
        return self.equation.outputs[0]

    @property
    def x(self) -> Any:
        i = self.operator.primitive.x_invar_index
        return None if i is None else self.equation.inputs[i]

    # ------------------------------------------------------------------------------ iterations

    @property
    def _scans(self) -> list[tuple[int, bool]]:
        """The scans around the operator: their length, and whether iterations are mapped."""
        return [(s.length, s.mapped) for s in self.levels if s.length is not None]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Leading axes of what is fed to and seen from the operator, outermost scan first."""
        return tuple(length for length, _ in self._scans)

    @property
    def iterations(self) -> int | None:
        """How often the operator moves one trace within a step; None outside of loops."""
        lengths = [length for length, mapped in self._scans if not mapped]
        return prod(lengths) if lengths else None

    @property
    def time_axes(self) -> tuple[int, ...]:
        """The axes of `lengths` that are more time."""
        return tuple(i for i, (_, mapped) in enumerate(self._scans) if not mapped)

    def outward(self, array: Array) -> Array:
        """From one axis per scan, outermost first, to (iterations, *mapped, ...)."""
        if self.iterations is None:
            return array
        first = jnp.moveaxis(array, self.time_axes, range(len(self.time_axes)))
        return first.reshape((self.iterations, *first.shape[len(self.time_axes) :]))

    def inward(self, array: Array) -> Array:
        """The inverse of `outward`."""
        if self.iterations is None:
            return array
        lengths = tuple(self.lengths[i] for i in self.time_axes)
        split = array.reshape((*lengths, *array.shape[1:]))
        return jnp.moveaxis(split, range(len(lengths)), self.time_axes)


Around = tuple[tuple[Equation, int], ...]  # the bodies around an equation, by branch


@dataclass(frozen=True, eq=False, slots=True)
class Flow:
    """What the values of a step depend on, as masks."""

    trained: Mapping[Var, int]  # parameter leaves
    varying: Mapping[Var, int]  # anything that differs from call to call
    from_slices: Mapping[Var, int]  # slices of the scans in `scan_index`
    from_carries: Mapping[Var, int]  # and what they carry
    scan_index: Mapping[Equation, int]

    def varies(self, atom: Atom, around: Around) -> bool:
        """Whether a value differs from call to call, or with what a loop around it carries."""
        inside = sum(1 << self.scan_index[e] for e, _ in around if e in self.scan_index)
        return bool(bits_of(atom, self.varying) or bits_of(atom, self.from_carries) & inside)


def flow_of(step: Step, unsteady: int) -> Flow:
    """`unsteady` is the mask of program constants whose value may differ from call to call."""
    program = step.program
    trained = reach(program, step.entry_bits(step.params))
    params = {step.entry(p) for p in step.params}
    seeds = {v: 1 for v in program.inputs if v not in params}
    seeds |= {v: 1 for i, v in enumerate(program.consts) if unsteady >> i & 1}
    slices: dict[Var, int] = {}
    carries: dict[Var, int] = {}
    scan_index: dict[Equation, int] = {}
    for eqn in deep_equations(program):
        for body in eqn.bodies:
            inner = zip(body.program.consts, body.values, strict=True)
            seeds |= {v: 1 for v, value in inner if is_traced(value)}
        if eqn.name == "scan":
            scan_index[eqn] = len(scan_index)
            slices |= dict.fromkeys(sliced(eqn), 1 << scan_index[eqn])
            carries |= dict.fromkeys(_evolving(eqn), 1 << scan_index[eqn])
    cases = {eqn: (atom,) for eqn, atom in guards(program).items()}
    read = lambda eqn: cases.get(eqn, eqn.inputs)
    varying = reach(program, seeds, differentiable=False, read=read)
    from_slices = reach(program, slices, differentiable=False, read=read)
    from_carries = reach(program, carries, differentiable=False, read=read)
    return Flow(trained, varying, from_slices, from_carries, scan_index)


def find_sites(step: Step, flow: Flow) -> list[Site]:
    """Every ETP operator of the step, in program order; those of equal layers share an operator."""
    sites = []
    operators: dict[Hashable, Operator] = {}
    for eqn, around in located(step.program):
        varies = partial(flow.varies, around=around)
        primitive = _primitive(eqn, flow.trained, varies)
        if primitive is None:
            continue
        operator = Operator.of(primitive, eqn.params, eqn.inputs, eqn.outputs[0])
        with suppress(TypeError):  # a custom derivative may be of functions without a hash
            operator = operators.setdefault(operator.key, operator)
        masks = {k: bits_of(eqn.inputs[i], flow.trained) for k, i in operator.positions.items()}
        leaves = {k: tuple(indices_of(m)) for k, m in masks.items()}
        varying = {k for k, i in operator.positions.items() if varies(eqn.inputs[i])}
        site = Site(eqn, operator, leaves, frozenset(varying))
        if around and site.trained:
            site = _inside(site, around, flow)
        sites.append(site)
    return sites


def sliced(eqn: Equation) -> tuple[Var, ...]:
    """The inputs of a scan's body that are slices."""
    first, n_carry = scan_layout(eqn.params)
    return eqn.bodies[0].program.inputs[first + n_carry :]


def _evolving(eqn: Equation) -> list[Var]:
    """The carried values of a scan that differ from iteration to iteration."""
    first, n_carry = scan_layout(eqn.params)
    body = eqn.bodies[0].program
    carried = zip(body.inputs[first : first + n_carry], body.outputs[:n_carry], strict=True)
    return [v for v, new in carried if new is not v]


def located(program: Program, around: Around = ()) -> Iterator[tuple[Equation, Around]]:
    """All equations of a program, each with the bodies around it."""
    for eqn in program.equations:
        yield eqn, around
        for k, body in enumerate(eqn.bodies):
            yield from located(body.program, (*around, (eqn, k)))


def _primitive(
    eqn: Equation, trained: Mapping, varies: Callable[[Atom], bool]
) -> ETPPrimitive | None:
    """The operator an equation is; a function with its own derivative around one counts as one."""
    if isinstance(eqn.primitive, ETPPrimitive):
        return eqn.primitive
    if not wraps_operator(eqn) or len(eqn.outputs) != 1:
        return None
    varying = [i for i, a in enumerate(eqn.inputs) if varies(a)]
    weights = [i for i, a in enumerate(eqn.inputs) if i not in varying and bits_of(a, trained)]
    if len(varying) > 1 or not weights:
        return None
    function = lambda *args, **params: bind(eqn, args)[0]
    return ETPPrimitive(
        eqn.name, function, weights=(), x_invar_index=varying[0] if varying else None
    )


def wraps_operator(eqn: Equation) -> bool:
    """Whether an equation is a function with its own derivative that uses an operator."""
    return eqn.name.startswith("custom_") and any(
        isinstance(e.primitive, ETPPrimitive) for e in inner_equations(eqn)
    )


def _inside(site: Site, around: Around, flow: Flow) -> Site:
    """A site with the bodies around it, its mapped iterations in the operator's shapes."""
    eqn, positions, scan_index = site.equation, site.operator.positions, flow.scan_index
    own = {i: bits_of(eqn.inputs[i], flow.from_slices) for i in positions.values()}
    levels = []
    for outer, branch in around:
        if outer.name == "while":
            raise NotSupportedError(_in_while(eqn, outer))
        if outer.name == "cond":
            levels.append(Level(outer, branch, None, False))
            continue
        carries = bool(_evolving(outer))
        has_slices = any(mask >> scan_index[outer] & 1 for mask in own.values())
        apart = has_slices or (not carries and site.x is not None)
        levels.append(Level(outer, branch, outer.params["length"], apart))

    shapes: list[Any] = [shape_of(a) for a in eqn.inputs]
    y: Any = shape_of(site.y)
    mapped = []
    for level in reversed([s for s in levels if s.mapped]):
        bit = scan_index[level.equation]
        grown = [i not in own or bool(own[i] >> bit & 1) for i in range(len(shapes))]
        mapped.append(tuple(0 if g else None for g in grown))
        shapes = [_wider(s, level.length) if g else s for s, g in zip(shapes, grown, strict=True)]
        y = _wider(y, level.length)
    params = dict(eqn.params)
    if mapped:
        params["mapped"] = (*params.get("mapped", ()), *mapped)
    operator = Operator(site.operator.primitive, params, tuple(shapes), y)
    return Site(eqn, operator, site.leaves, site.varying, tuple(levels))


def _wider(shape: Any, length: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((length, *shape.shape), shape.dtype)


def _in_while(eqn: Equation, outer: Equation) -> str:
    return message(
        f"the operator {eqn.name} is inside a while_loop.",
        where=eqn.where() or outer.where(),
        why="how often it runs is decided while it runs: its weight has no trace of a fixed size",
        do="use lax.scan or fori_loop with a fixed number of iterations (one that is not needed "
        "can leave the state as it is), or apply the operator outside of the loop",
    )
