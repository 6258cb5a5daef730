"""Relations: which weight reaches which state through which operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .._published import published
from ..ops import ETPPrimitive, Operator
from ._coordinates import Mapped
from ._groups import HiddenGroup
from ._sites import Site
from ._slots import Slots
from ._step import Path


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
    # Weights that are no linear functions of parameters; None where not element by element.
    mapped: Mapping[str, Mapped | None] = field(default_factory=dict)

    @property
    def is_weight(self) -> bool:
        """Whether the output is the weight itself, element by element: it has no other trace."""
        op = self.operator
        if op.record is not None or len(self.keys) != 1:
            return False
        (key,) = self.keys
        shape = tuple(op.shapes[key].shape)
        return op.y.shape == shape and op.ties[key] == tuple((a, a) for a in range(len(shape)))

    @property
    def operator(self) -> Operator:
        """The operator bound to its shapes."""
        return self.site.operator

    @property
    def primitive(self) -> ETPPrimitive:
        return self.site.operator.primitive

    @property
    def weight_path(self) -> Path:
        """Path of the first trained parameter."""
        return next(iter(self.trainable_paths.values()))

    path = weight_path

    def __getattr__(self, name: str) -> Any:
        return published(self, name)
