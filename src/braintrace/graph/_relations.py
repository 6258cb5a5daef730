"""Relations: which weight reaches which state through which operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._jaxpr import Equation, Program, Var, inner_equations
from ..ops import ETPPrimitive, Operator
from ._diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from ._groups import HiddenGroup
from ._reach import bits_of, reach
from ._slots import Slots
from ._step import Path, Step


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """An ETP operator in the step, and the parameters its operands are made of.

    `leaves[key]` are the parameter leaves (positions in `step.params`) of that operand, none for
    an operand that is not trained; `varying` are the operands that read states or inputs.
    """

    equation: Equation
    operator: Operator
    leaves: Mapping[str, tuple[int, ...]]
    varying: frozenset[str]

    @property
    def trained(self) -> bool:
        return any(self.leaves.values())

    @property
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


@dataclass(frozen=True, eq=False, slots=True)
class HiddenParamOpRelation:
    """A weight, the operator that consumes it, and the states its output reaches."""

    index: int
    site: Site
    slots: Slots
    keys: tuple[str, ...]
    hidden_groups: tuple[HiddenGroup, ...]
    connected_hidden_paths: tuple[Path, ...]
    trainable_paths: Mapping[str, Path]
    trainable_leaf_indices: Mapping[str, int]
    path_classification: Mapping[Path, str]
    trainable_param_states: Mapping[str, Any]

    @property
    def operator(self) -> Operator:
        """The operator bound to its shapes."""
        return self.site.operator

    @property
    def primitive(self) -> ETPPrimitive:
        return self.site.operator.primitive

    @property
    def eqn_params(self) -> Mapping[str, Any]:
        return self.site.equation.params

    @property
    def x_var(self) -> Any:
        return self.site.x

    @property
    def y_var(self) -> Var:
        return self.site.y

    @property
    def trainable_vars(self) -> Mapping[str, Any]:
        at = self.site.operator.positions
        return {k: self.site.equation.inputs[i] for k, i in at.items()}

    @property
    def weight_path(self) -> Path:
        """Path of the first trained parameter."""
        return next(iter(self.trainable_paths.values()))

    path = weight_path
    x = x_var
    y = y_var


HiddenParamOpRelation.__module__ = "braintrace"


def find_sites(step: Step, unsteady: int) -> list[Site]:
    """Every ETP operator of the step, in program order.

    `unsteady` is the mask of program constants whose value may differ from call to call.
    """
    program = step.program
    trained = reach(program, {step.entry(p): 1 << i for i, p in enumerate(step.params)})
    params = {step.entry(p) for p in step.params}
    unsteady_vars = {v: 1 for v in program.inputs if v not in params}
    unsteady_vars |= {v: 1 for i, v in enumerate(program.consts) if unsteady >> i & 1}
    moving = reach(program, unsteady_vars, differentiable=False)
    sites = []
    for eqn in program.equations:
        if not isinstance(eqn.primitive, ETPPrimitive):
            continue
        operator = Operator.of(eqn.primitive, eqn.params, eqn.inputs, eqn.outputs[0])
        masks = {k: bits_of(eqn.inputs[i], trained) for k, i in operator.positions.items()}
        leaves = {k: _bits(m) for k, m in masks.items()}
        varying = {k for k, i in operator.positions.items() if bits_of(eqn.inputs[i], moving)}
        sites.append(Site(eqn, operator, leaves, frozenset(varying)))
    return sites


def _bits(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def hidden_operators(program: Program) -> list[CompilationRecord]:
    """Records for ETP operators inside bodies that the compiler does not look into."""
    out = []
    for eqn in program.equations:
        names = sorted(
            {
                e.primitive.name
                for e in inner_equations(eqn)
                if isinstance(e.primitive, ETPPrimitive)
            }
        )
        out += [
            CompilationRecord(
                DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW,
                DiagnosticLevel.WARNING,
                f"{name} inside {eqn.name} ({eqn.where()}) has no eligibility trace; its weight "
                "keeps the exact gradient within the step. Move the operator out to trace it.",
                primitive=name,
            )
            for name in names
        ]
    return out
