"""Evaluation of a graph under a rule, on explicit arrays."""

from ._evaluate import Values as Values
from ._evaluate import evaluate_plain as evaluate_plain
from ._evaluate import inputs_of as inputs_of
from ._forward import new_hidden as new_hidden
from ._learn import Ran as Ran
from ._learn import init_traces as init_traces
from ._learn import stretch as stretch
from ._listen import listen as listen
from ._observe import group_jacobians as group_jacobians
from ._observe import observe as observe
from ._over import over as over
from ._recurrence import Known as Known
from ._recurrence import needed as needed
from ._recurrence import side_by_side as side_by_side
from ._recurrence import unroll as unroll
from ._signals import OWN as OWN
from ._time import Span as Span
