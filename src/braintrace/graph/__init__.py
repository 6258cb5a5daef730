"""Analyses of a step: what reaches what, element by element."""

from ._certificate import Dropped as Dropped
from ._certificate import ParameterReport as ParameterReport
from ._certificate import Traces as Traces
from ._certificate import certify as certify
from ._certificate import unused as unused
from ._diagnostics import CompilationRecord as CompilationRecord
from ._diagnostics import DiagnosticKind as DiagnosticKind
from ._diagnostics import DiagnosticLevel as DiagnosticLevel
from ._graph import Graph as Graph
from ._graph import analyse as analyse
from ._groups import HiddenGroup as HiddenGroup
from ._perturb import HiddenPerturbation as HiddenPerturbation
from ._reach import bits_of as bits_of
from ._reach import numbers_of as numbers_of
from ._reach import reach as reach
from ._reach import strongly_connected as strongly_connected
from ._relations import HiddenParamOpRelation as HiddenParamOpRelation
from ._report import CompilationReport as CompilationReport
from ._slots import MOST_ENTRIES as MOST_ENTRIES
from ._slots import Slots as Slots
from ._step import Leaf as Leaf
from ._step import Step as Step
from ._step import split_cotangents as split_cotangents
from ._tangent import Pushed as Pushed
from ._while import bind_reversible as bind_reversible
