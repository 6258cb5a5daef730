"""The published classes: of rules, their bases, executors, helpers and views."""

from ..frontend import ModuleInfo as ModuleInfo
from ..frontend import extract_module_info as extract_module_info
from ..graph import HiddenGroup as HiddenGroup
from ..graph import HiddenParamOpRelation as HiddenParamOpRelation
from ..graph import PathClassification as PathClassification
from ..learner import EligibilityTrace as EligibilityTrace
from ..learner import Learner as _Learner
from ..learner import SequenceDriverMixin as SequenceDriverMixin
from ..rules import ETraceConfig as ETraceConfig
from ._compile import ETraceVmap as ETraceVmap
from ._dni import DNI as DNI
from ._executors import ETraceGraphExecutor as ETraceGraphExecutor
from ._executors import ETraceVjpGraphExecutor as ETraceVjpGraphExecutor
from ._presets import D_RTRL as D_RTRL
from ._presets import DECOLLE as DECOLLE
from ._presets import ES_D_RTRL as ES_D_RTRL
from ._presets import KFRTRL as KFRTRL
from ._presets import OSTTP as OSTTP
from ._presets import OTPE as OTPE
from ._presets import OTTT as OTTT
from ._presets import RFLO as RFLO
from ._presets import RTRL as RTRL
from ._presets import STLLR as STLLR
from ._presets import UORO as UORO
from ._presets import EProp as EProp
from ._presets import IODimVjpAlgorithm as IODimVjpAlgorithm
from ._presets import NoTrace as NoTrace
from ._presets import OSTLFeedforward as OSTLFeedforward
from ._presets import OSTLRecurrent as OSTLRecurrent
from ._presets import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from ._presets import RandomProjectionVjpAlgorithm as RandomProjectionVjpAlgorithm
from ._presets import SnAp as SnAp
from ._presets import ThreeFactor as ThreeFactor
from ._presets import pp_prop as pp_prop
from ._rule_learner import ETraceVjpAlgorithm as ETraceVjpAlgorithm
from ._synthetic import SyntheticGradient as SyntheticGradient
from ._synthetic import train_synthetic_gradient as train_synthetic_gradient

ETraceAlgorithm = _Learner  # the published name
