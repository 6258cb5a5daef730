"""What the compiler decided and why: one record per decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class DiagnosticLevel(StrEnum):
    """How much a decision matters to the gradient."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class DiagnosticKind(StrEnum):
    """The kinds of decision the compiler records."""

    RELATION_INCLUDED = "relation_included"
    RELATION_EXCLUDED_NO_PARAMSTATE = "relation_excluded_no_paramstate"
    RELATION_EXCLUDED_NON_TEMPORAL = "relation_excluded_non_temporal"
    RELATION_EXCLUDED_SHAPE_MISMATCH = "relation_excluded_shape_mismatch"
    RELATION_EXCLUDED_WEIGHT_TO_WEIGHT = "relation_excluded_weight_to_weight"
    RELATION_EXCLUDED_NO_OPERATOR = "relation_excluded_no_operator"
    RELATION_EXCLUDED_TIME_VARYING_WEIGHT = "relation_excluded_time_varying_weight"
    RELATION_PARTIAL_PATH = "relation_partial_path"
    TRAINABLE_INVAR_NOT_PARAMSTATE = "trainable_invar_not_paramstate"
    PRIMITIVE_INSIDE_CONTROL_FLOW = "primitive_inside_control_flow"
    HIDDEN_GROUP_MERGED = "hidden_group_merged"
    STATE_MISMATCH = "state_mismatch"
    PARAMETER_UNUSED = "parameter_unused"
    PARAMETER = "parameter"
    WEIGHT_REPLICATED = "weight_replicated"


@dataclass(frozen=True, slots=True)
class CompilationRecord:
    """One decision of the compiler: what, how important, and about which weight and states."""

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: str | None = None
    weight_path: tuple | None = None
    hidden_paths: tuple[tuple, ...] = ()
    context: dict[str, Any] | None = field(default=None, compare=False)
