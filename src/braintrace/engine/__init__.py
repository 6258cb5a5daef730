"""Evaluation of a graph under a rule, on explicit arrays."""

from ._learn import Values as Values
from ._learn import enter_window as enter_window
from ._learn import init_traces as init_traces
from ._learn import inputs_of as inputs_of
from ._learn import sequence as sequence
from ._learn import single_step as single_step
from ._learn import window_step as window_step
from ._observe import Observation as Observation
from ._observe import group_jacobians as group_jacobians
from ._observe import observe as observe
