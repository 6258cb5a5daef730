"""The compiled graph of a model and its parts, as the published package names them."""

from __future__ import annotations

from collections.abc import Mapping

import brainstate

from ..frontend import ModuleInfo, extract_module_info
from ..graph import MOST_ENTRIES, ControlFlowPolicy, HiddenGroup, HiddenParamOpRelation, Path
from ..program import PyTree
from ._etrace_graph import ETraceGraph, check_mixing, graph_of, groups_by_path
from ._perturb import HiddenPerturbation
from ._perturb import perturbed as add_hidden_perturbation_from_minfo


def compile_etrace_graph(
    model: brainstate.nn.Module,
    *model_args: PyTree,
    include_hidden_perturb: bool = True,
    include_recurrent_mixing: bool = False,
    sparse_n: int | None = None,
    snap_max_jacobian_elements: int = MOST_ENTRIES,
    control_flow: ControlFlowPolicy | None = None,
    **kwargs: PyTree,
) -> ETraceGraph:
    """Trace one step of a model and find its hidden groups and weight relations.

    Args:
        model: a module with initialised states.
        *model_args: arguments of one step.
        include_hidden_perturb: accepted; the perturbed step is made when it is read.
        include_recurrent_mixing: follow traces through operators too.
        sparse_n: follow them through at most `sparse_n - 1` operators; default 1.
        snap_max_jacobian_elements: how many entries the Jacobian of one relation may have.
        control_flow: which control flow the analysis leaves alone, none by default.
        **kwargs: keyword arguments of one step.

    Raises:
        NotSupportedError: the step writes a parameter, or a Jacobian would be too large.
        CompilationError: the step contains what the policy does not accept.
    """
    crossings = check_mixing(include_recurrent_mixing, sparse_n)
    minfo = extract_module_info(model, *model_args, control_flow=control_flow, **kwargs)
    return graph_of(minfo, crossings, snap_max_jacobian_elements)


def find_hidden_groups_from_minfo(
    minfo: ModuleInfo,
    include_recurrent_mixing: bool = False,
    sparse_n: int | None = None,
    snap_max_jacobian_elements: int = MOST_ENTRIES,
) -> tuple[tuple[HiddenGroup, ...], dict[Path, HiddenGroup]]:
    """The hidden groups of a traced model, and the group of each state path.

    Groups are states that act on each other element by element, whatever else is followed.
    """
    crossings = check_mixing(include_recurrent_mixing, sparse_n)
    groups = graph_of(minfo, crossings, snap_max_jacobian_elements).hidden_groups
    return groups, groups_by_path(groups)


def find_hidden_groups_from_module(
    model: brainstate.nn.Module,
    *args: PyTree,
    include_recurrent_mixing: bool = False,
    sparse_n: int | None = None,
    snap_max_jacobian_elements: int = MOST_ENTRIES,
    **kwargs: PyTree,
) -> tuple[tuple[HiddenGroup, ...], dict[Path, HiddenGroup]]:
    """The hidden groups of a model, and the group of each state path."""
    info = extract_module_info(model, *args, **kwargs)
    limits = (include_recurrent_mixing, sparse_n, snap_max_jacobian_elements)
    return find_hidden_groups_from_minfo(info, *limits)


def find_hidden_param_op_relations_from_minfo(
    minfo: ModuleInfo, hid_path_to_group: Mapping[Path, HiddenGroup] | None = None
) -> tuple[HiddenParamOpRelation, ...]:
    """The weight relations of a traced model, or those into `hid_path_to_group` only."""
    relations = graph_of(minfo).hidden_param_op_relations
    if hid_path_to_group is None:
        return relations
    return tuple(
        r for r in relations if any(p in hid_path_to_group for p in r.connected_hidden_paths)
    )


def find_hidden_param_op_relations_from_module(
    model: brainstate.nn.Module, *args: PyTree, **kwargs: PyTree
) -> tuple[HiddenParamOpRelation, ...]:
    """The weight relations of a model."""
    return find_hidden_param_op_relations_from_minfo(extract_module_info(model, *args, **kwargs))


def add_hidden_perturbation_in_module(
    model: brainstate.nn.Module, *args: PyTree, **kwargs: PyTree
) -> HiddenPerturbation:
    """The step of a model with a perturbation added to every new hidden state."""
    return add_hidden_perturbation_from_minfo(extract_module_info(model, *args, **kwargs))
