"""Evaluation of a graph under a rule, on explicit arrays."""

from ._evaluate import Values as Values
from ._evaluate import evaluate_plain as evaluate_plain
from ._evaluate import inputs_of as inputs_of
from ._exits import run_with_exits as run_with_exits
from ._forward import new_hidden as new_hidden
from ._learn import BlockResult as BlockResult
from ._learn import init_traces as init_traces
from ._learn import run_block as run_block
from ._map_steps import map_steps as map_steps
from ._observe import group_jacobians as group_jacobians
from ._observe import observe as observe
from ._recurrence import StepValues as StepValues
from ._recurrence import evaluate_all_steps as evaluate_all_steps
from ._recurrence import needed as needed
from ._recurrence import unroll as unroll
from ._signals import OWN as OWN
from ._time import TimeAxes as TimeAxes
