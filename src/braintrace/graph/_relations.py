"""Relations: which weight reaches which state through which operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._jaxpr import Var
from ..ops import ETPPrimitive, Operator
from ._groups import HiddenGroup
from ._sites import Site
from ._slots import Slots
from ._step import Path


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
