"""The public names, one line each: type checkers read this file, and so does `__init__.py`.

A name is imported on its first use, from the module that stands here. `dir(braintrace)` shows those
that do not come from `compat`.
"""

from . import data as data
from . import nir as nir
from . import nn as nn
from . import rl as rl
from . import rules as rules
from . import show as show
from . import tasks as tasks
from . import verify as verify
from . import wiring as wiring
from ._errors import CompilationError as CompilationError
from ._errors import NonFiniteError as NonFiniteError
from ._errors import NotSupportedError as NotSupportedError
from ._online import Carry as Carry
from ._online import Choice as Choice
from ._online import Online as Online
from ._online import Record as Record
from ._online import choose as choose
from ._online import online as online
from ._version import __version__ as __version__
from .checkpoint import Checkpoint as Checkpoint
from .compat._classes import D_RTRL as D_RTRL
from .compat._classes import DECOLLE as DECOLLE
from .compat._classes import DNI as DNI
from .compat._classes import ES_D_RTRL as ES_D_RTRL
from .compat._classes import KFRTRL as KFRTRL
from .compat._classes import OSTTP as OSTTP
from .compat._classes import OTPE as OTPE
from .compat._classes import OTTT as OTTT
from .compat._classes import RFLO as RFLO
from .compat._classes import RTRL as RTRL
from .compat._classes import STLLR as STLLR
from .compat._classes import UORO as UORO
from .compat._classes import EligibilityTrace as EligibilityTrace
from .compat._classes import EProp as EProp
from .compat._classes import ETraceAlgorithm as ETraceAlgorithm
from .compat._classes import ETraceConfig as ETraceConfig
from .compat._classes import ETraceGraphExecutor as ETraceGraphExecutor
from .compat._classes import ETraceVjpAlgorithm as ETraceVjpAlgorithm
from .compat._classes import ETraceVjpGraphExecutor as ETraceVjpGraphExecutor
from .compat._classes import ETraceVmap as ETraceVmap
from .compat._classes import HiddenGroup as HiddenGroup
from .compat._classes import HiddenParamOpRelation as HiddenParamOpRelation
from .compat._classes import IODimVjpAlgorithm as IODimVjpAlgorithm
from .compat._classes import ModuleInfo as ModuleInfo
from .compat._classes import NoTrace as NoTrace
from .compat._classes import OSTLFeedforward as OSTLFeedforward
from .compat._classes import OSTLRecurrent as OSTLRecurrent
from .compat._classes import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from .compat._classes import PathClassification as PathClassification
from .compat._classes import RandomProjectionVjpAlgorithm as RandomProjectionVjpAlgorithm
from .compat._classes import SequenceDriverMixin as SequenceDriverMixin
from .compat._classes import SnAp as SnAp
from .compat._classes import SyntheticGradient as SyntheticGradient
from .compat._classes import ThreeFactor as ThreeFactor
from .compat._classes import extract_module_info as extract_module_info
from .compat._classes import pp_prop as pp_prop
from .compat._classes import train_synthetic_gradient as train_synthetic_gradient
from .compat._etrace_graph import ETraceGraph as ETraceGraph
from .compat._graph import HiddenPerturbation as HiddenPerturbation
from .compat._graph import add_hidden_perturbation_from_minfo as add_hidden_perturbation_from_minfo
from .compat._graph import add_hidden_perturbation_in_module as add_hidden_perturbation_in_module
from .compat._graph import compile_etrace_graph as compile_etrace_graph
from .compat._graph import find_hidden_groups_from_minfo as find_hidden_groups_from_minfo
from .compat._graph import find_hidden_groups_from_module as find_hidden_groups_from_module
from .compat._graph import (
    find_hidden_param_op_relations_from_minfo as find_hidden_param_op_relations_from_minfo,
)
from .compat._graph import (
    find_hidden_param_op_relations_from_module as find_hidden_param_op_relations_from_module,
)
from .compat._helpers import FixedRandomFeedback as FixedRandomFeedback
from .compat._helpers import GradExpon as GradExpon
from .compat._helpers import KappaFilter as KappaFilter
from .compat._helpers import PresynapticTrace as PresynapticTrace
from .compat._v01 import ConvOp as ConvOp
from .compat._v01 import ElemWiseOp as ElemWiseOp
from .compat._v01 import ElemWiseParam as ElemWiseParam
from .compat._v01 import ETraceOp as ETraceOp
from .compat._v01 import ETraceParam as ETraceParam
from .compat._v01 import FakeElemWiseParam as FakeElemWiseParam
from .compat._v01 import FakeETraceParam as FakeETraceParam
from .compat._v01 import LoraOp as LoraOp
from .compat._v01 import MatMulOp as MatMulOp
from .compat._v01 import NonTempParam as NonTempParam
from .compat._v01 import SpMatMulOp as SpMatMulOp
from .graph import CompilationRecord as CompilationRecord
from .graph import ControlFlowPolicy as ControlFlowPolicy
from .graph import DiagnosticKind as DiagnosticKind
from .graph import DiagnosticLevel as DiagnosticLevel
from .graph import Dropped as Dropped
from .graph import ParameterReport as ParameterReport
from .graph import Silent as Silent
from .lab.comparison import CompareResult as CompareResult
from .lab.comparison import compare as compare
from .learner import Learner as Learner
from .learner import ModuleLearner as ModuleLearner
from .learner import MultiStepData as MultiStepData
from .learner import SingleStepData as SingleStepData
from .learner import compile as compile
from .ops import ETPPrimitive as ETPPrimitive
from .ops import conv as conv
from .ops import einsum as einsum
from .ops import element_wise as element_wise
from .ops import embedding as embedding
from .ops import grouped_matmul as grouped_matmul
from .ops import lora_matmul as lora_matmul
from .ops import matmul as matmul
from .ops import register_primitive as register_primitive
from .ops import sparse_matmul as sparse_matmul
from .report import Advice as Advice
from .report import CompilationReport as CompilationReport
from .report import RuleCost as RuleCost
from .report import Suggestion as Suggestion

__version_info__: tuple[int, ...]
