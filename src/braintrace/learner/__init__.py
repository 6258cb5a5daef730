"""The learner: a thin stateful shell around the engine."""

from .._precision import brainstate as _loaded  # noqa: F401
from ..checkpoint import Checkpoint as Checkpoint
from ..frontend import floating as floating
from ..rules import ETraceConfig as ETraceConfig
from ._compile import ETraceVmap as ETraceVmap
from ._compile import compile as compile
from ._data import MultiStepData as MultiStepData
from ._data import SingleStepData as SingleStepData
from ._dni import DNI as DNI
from ._driver import SequenceDriverMixin as SequenceDriverMixin
from ._learner import ETraceVjpAlgorithm as ETraceVjpAlgorithm
from ._learner import Learner as Learner
from ._nnx import ModuleLearner as ModuleLearner
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
from ._probe import signal_probe as signal_probe
from ._rule_learner import RuleLearner as RuleLearner
from ._sequences import length_of as length_of
from ._synthetic import SyntheticGradient as SyntheticGradient
from ._synthetic import train_synthetic_gradient as train_synthetic_gradient
from ._traces import EligibilityTrace as EligibilityTrace

ETraceAlgorithm = Learner  # the published name
