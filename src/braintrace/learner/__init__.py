"""The learner: a thin stateful shell around the engine."""

from ._algorithm import EligibilityTrace as EligibilityTrace
from ._algorithm import ETraceAlgorithm as ETraceAlgorithm
from ._algorithm import ETraceVjpAlgorithm as ETraceVjpAlgorithm
from ._compile import ETraceVmap as ETraceVmap
from ._compile import compile as compile
from ._data import MultiStepData as MultiStepData
from ._data import SingleStepData as SingleStepData
from ._drivers import SequenceDriverMixin as SequenceDriverMixin
from ._executor import ETraceGraphExecutor as ETraceGraphExecutor
from ._executor import ETraceVjpGraphExecutor as ETraceVjpGraphExecutor
from ._executor import check_vjp_method as check_vjp_method
from ._grad_expon import GradExpon as GradExpon
from ._presets import D_RTRL as D_RTRL
from ._presets import ES_D_RTRL as ES_D_RTRL
from ._presets import RTRL as RTRL
from ._presets import IODimVjpAlgorithm as IODimVjpAlgorithm
from ._presets import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from ._presets import SnAp as SnAp
from ._presets import pp_prop as pp_prop
