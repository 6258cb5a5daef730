"""Front ends: from a framework's model to a step record."""

from .._precision import brainstate as _loaded  # noqa: F401
from ._analysing import analysing as analysing
from ._brainstate import ModuleInfo as ModuleInfo
from ._brainstate import assign as assign
from ._brainstate import extract_module_info as extract_module_info
from ._brainstate import inside_of_jax as inside_of_jax
from ._brainstate import step_info as step_info
from ._brainstate import write_of as write_of
from ._key import Key as Key
from ._key import key_of as key_of
from ._references import check_takes as check_takes
from ._step_function import StepFunction as StepFunction
from ._step_function import models_of as models_of
from ._step_function import states_named as states_named
from ._step_function import title_of as title_of
from ._weights import StateTree as StateTree
from ._weights import check_read as check_read
from ._weights import floating as floating
from ._weights import leaves_of as leaves_of
from ._weights import named_states as named_states
from ._weights import states_in as states_in
from ._weights import states_of as states_of
from ._weights import tree_of as tree_of
from ._weights import values_of as values_of
from ._weights import weights_of as weights_of
from ._weights import write_weights as write_weights
