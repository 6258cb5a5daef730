"""Front ends: from a framework's model to a step record."""

from .._precision import brainstate as _loaded  # noqa: F401
from ._brainstate import ModuleInfo as ModuleInfo
from ._brainstate import extract_module_info as extract_module_info
from ._etrace_graph import ETraceGraph as ETraceGraph
from ._etrace_graph import add_hidden_perturbation_from_minfo as add_hidden_perturbation_from_minfo
from ._etrace_graph import add_hidden_perturbation_in_module as add_hidden_perturbation_in_module
from ._etrace_graph import check_crossings as check_crossings
from ._etrace_graph import check_mixing as check_mixing
from ._etrace_graph import compile_etrace_graph as compile_etrace_graph
from ._etrace_graph import find_hidden_groups_from_minfo as find_hidden_groups_from_minfo
from ._etrace_graph import find_hidden_groups_from_module as find_hidden_groups_from_module
from ._etrace_graph import (
    find_hidden_param_op_relations_from_minfo as find_hidden_param_op_relations_from_minfo,
)
from ._etrace_graph import (
    find_hidden_param_op_relations_from_module as find_hidden_param_op_relations_from_module,
)
from ._etrace_graph import graph_of as graph_of
from ._function import StateLeaf as StateLeaf
from ._function import Traced as Traced
from ._function import trace_function as trace_function
