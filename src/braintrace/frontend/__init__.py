"""Front ends: from a framework's model to a step record."""

from .._precision import brainstate as _loaded  # noqa: F401
from ._analysing import analysing as analysing
from ._brainstate import ModuleInfo as ModuleInfo
from ._brainstate import States as States
from ._brainstate import assign as assign
from ._brainstate import check_module as check_module
from ._brainstate import check_surrounding_trace as check_surrounding_trace
from ._brainstate import extract_module_info as extract_module_info
from ._brainstate import floating as floating
from ._brainstate import in_states as in_states
from ._brainstate import step_info as step_info
from ._key import Key as Key
from ._key import key_of as key_of
from ._step_function import StepFunction as StepFunction
from ._step_function import models_of as models_of
from ._step_function import states_named as states_named
from ._step_function import title_of as title_of
from ._traces import EligibilityTrace as EligibilityTrace
from ._traces import taken as taken
