"""Relations: which weight reaches which state through which operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .._errors import NotSupportedError
from ..ops import ETPPrimitive, Operator
from ..program import (
    Array,
    Jaxpr,
    JaxprEqn,
    JaxVar,
    Literal,
    Params,
    Program,
    bind_forward,
    equation_of,
    evaluate,
    jaxpr_of,
    operand_of,
    variable,
)
from ._groups import HiddenGroup
from ._operands import operand_equations
from ._sites import Site
from ._slots import Slots
from ._step import Path
from ._views import Followed, arranged, not_apart


class PathClassification(StrEnum):
    """How an operator's output reaches a state within a step.

    Directly, through other trained operators only, or both ways.
    """

    ALL_DIRECT = "all_direct"
    ALL_THROUGH_OTHER_ETP = "all_through_other_etp"
    MIXED = "mixed"


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
    path_classification: Mapping[Path, PathClassification]
    trainable_param_states: Mapping[str, Any]

    @property
    def operator(self) -> Operator:
        """The operator bound to its shapes."""
        return self.site.operator

    @property
    def primitive(self) -> ETPPrimitive:
        return self.site.operator.primitive

    @property
    def eqn_params(self) -> Params:
        return self.site.equation.params

    @property
    def weight_path(self) -> Path:
        """Path of the first trained parameter."""
        return next(iter(self.trainable_paths.values()))

    path = weight_path

    @property
    def x_var(self) -> JaxVar | Literal | None:
        """Variable of the operator's input, None if it has none."""
        return None if self.site.x is None else operand_of(self.site.x)

    @property
    def y_var(self) -> JaxVar:
        """Variable of the operator's output."""
        return variable(self.site.y)

    x, y = x_var, y_var

    @property
    def trainable_vars(self) -> Mapping[str, JaxVar | Literal]:
        """Variables of the operator's weights."""
        at = self.site.operator.positions
        return {k: operand_of(self.site.equation.inputs[i]) for k, i in at.items()}

    @property
    def trainable_processing_chains(self) -> Mapping[str, tuple[JaxprEqn, ...]]:
        """For each weight, the equations that compute it from parameters, in order."""
        program = self._followed.step.program
        return {
            key: tuple(map(equation_of, operand_equations(program, self.site, key)))
            for key in self.trainable_paths
        }

    @property
    def y_to_hidden_group_jaxprs(self) -> list[Jaxpr]:
        """For each hidden group, a jaxpr from the operator's output to the group's new states.

        Raises:
            NotSupportedError: the operator, or the end of a path, is inside control flow.
        """
        return [jaxpr_of(part) for part in self._tails]

    def y_to_hidden_groups(
        self, y: Array, const_vals: Mapping[JaxVar, Array], concat_hidden_vals: bool = True
    ) -> list[Array] | list[list[Array]]:
        """The new states of each hidden group for an output of the operator.

        Args:
            y: the output.
            const_vals: what else the step computed, by variable.
            concat_hidden_vals: whether a group's states come as one array.
        """
        tails = zip(self.hidden_groups, self._tails, strict=True)
        states = [(g, evaluate(t, arranged(t, const_vals), [y], bind_forward)) for g, t in tails]
        return (
            [g.concat_hidden(v) for g, v in states]
            if concat_hidden_vals
            else [v for _, v in states]
        )

    @property
    def _followed(self) -> Followed:
        return self.hidden_groups[0].followed

    @property
    def _tails(self) -> list[Program]:
        if self.site.levels:
            raise NotSupportedError(not_apart(self.site.equation, "the operator itself"))
        followed = self._followed
        i = next(i for i, s in enumerate(followed.sites) if s.equation is self.site.equation)
        sources = frozenset(followed.tangent.tap_sources(i))
        return [followed.between([self.site.y], sources, g.leaves) for g in self.hidden_groups]
