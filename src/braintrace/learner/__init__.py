"""The learner: a thin stateful shell around the engine."""

from .._precision import brainstate as _loaded  # noqa: F401
from ..checkpoint import Checkpoint as Checkpoint
from ..frontend import EligibilityTrace as EligibilityTrace
from ..frontend import floating as floating
from ._compile import compile as compile
from ._data import MultiStepData as MultiStepData
from ._data import SingleStepData as SingleStepData
from ._data import unwrap as unwrap
from ._driver import SequenceDriverMixin as SequenceDriverMixin
from ._learner import Learner as Learner
from ._nnx import ModuleLearner as ModuleLearner
from ._probe import signal_probe as signal_probe
from ._sequences import length_of as length_of
