"""The public names, one line each; `braintrace` has them from the first use of one on."""

from . import data as data
from . import nir as nir
from . import nn as nn
from . import rules as rules
from . import show as show
from . import tasks as tasks
from . import verify as verify
from ._errors import CompilationError as CompilationError
from ._errors import NotSupportedError as NotSupportedError
from ._online import Carry as Carry
from ._online import Online as Online
from ._online import online as online
from .frontend import ETraceGraph as ETraceGraph
from .frontend import ModuleInfo as ModuleInfo
from .frontend import add_hidden_perturbation_from_minfo as add_hidden_perturbation_from_minfo
from .frontend import add_hidden_perturbation_in_module as add_hidden_perturbation_in_module
from .frontend import compile_etrace_graph as compile_etrace_graph
from .frontend import extract_module_info as extract_module_info
from .frontend import find_hidden_groups_from_minfo as find_hidden_groups_from_minfo
from .frontend import find_hidden_groups_from_module as find_hidden_groups_from_module
from .frontend import (
    find_hidden_param_op_relations_from_minfo as find_hidden_param_op_relations_from_minfo,
)
from .frontend import (
    find_hidden_param_op_relations_from_module as find_hidden_param_op_relations_from_module,
)
from .graph import CompilationRecord as CompilationRecord
from .graph import ControlFlowPolicy as ControlFlowPolicy
from .graph import DiagnosticKind as DiagnosticKind
from .graph import DiagnosticLevel as DiagnosticLevel
from .graph import Dropped as Dropped
from .graph import HiddenGroup as HiddenGroup
from .graph import HiddenParamOpRelation as HiddenParamOpRelation
from .graph import HiddenPerturbation as HiddenPerturbation
from .graph import ParameterReport as ParameterReport
from .graph import PathClassification as PathClassification
from .graph import Silent as Silent
from .lab.comparison import CompareResult as CompareResult
from .lab.comparison import compare as compare
from .learner import D_RTRL as D_RTRL
from .learner import DECOLLE as DECOLLE
from .learner import DNI as DNI
from .learner import ES_D_RTRL as ES_D_RTRL
from .learner import KFRTRL as KFRTRL
from .learner import OSTTP as OSTTP
from .learner import OTPE as OTPE
from .learner import OTTT as OTTT
from .learner import RFLO as RFLO
from .learner import RTRL as RTRL
from .learner import STLLR as STLLR
from .learner import UORO as UORO
from .learner import Checkpoint as Checkpoint
from .learner import EligibilityTrace as EligibilityTrace
from .learner import EProp as EProp
from .learner import ETraceAlgorithm as ETraceAlgorithm
from .learner import ETraceConfig as ETraceConfig
from .learner import ETraceGraphExecutor as ETraceGraphExecutor
from .learner import ETraceVjpAlgorithm as ETraceVjpAlgorithm
from .learner import ETraceVjpGraphExecutor as ETraceVjpGraphExecutor
from .learner import ETraceVmap as ETraceVmap
from .learner import FixedRandomFeedback as FixedRandomFeedback
from .learner import GradExpon as GradExpon
from .learner import IODimVjpAlgorithm as IODimVjpAlgorithm
from .learner import KappaFilter as KappaFilter
from .learner import ModuleLearner as ModuleLearner
from .learner import MultiStepData as MultiStepData
from .learner import NoTrace as NoTrace
from .learner import OSTLFeedforward as OSTLFeedforward
from .learner import OSTLRecurrent as OSTLRecurrent
from .learner import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from .learner import PresynapticTrace as PresynapticTrace
from .learner import RandomProjectionVjpAlgorithm as RandomProjectionVjpAlgorithm
from .learner import SequenceDriverMixin as SequenceDriverMixin
from .learner import SingleStepData as SingleStepData
from .learner import SnAp as SnAp
from .learner import SyntheticGradient as SyntheticGradient
from .learner import ThreeFactor as ThreeFactor
from .learner import compile as compile
from .learner import pp_prop as pp_prop
from .learner import train_synthetic_gradient as train_synthetic_gradient
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

# Public names live in `braintrace`, whatever file defines them: help, pickles, tracebacks say so.
for _name, _value in list(globals().items()):
    if not _name.startswith("_") and getattr(_value, "__module__", "").startswith("braintrace."):
        _value.__module__ = "braintrace"

_NAMES = [_name for _name in globals() if not _name.startswith("_")]
