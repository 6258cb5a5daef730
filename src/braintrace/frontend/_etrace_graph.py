"""The compiled graph of a brainstate model, and functions that return its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

import brainstate
import jax

from .._errors import (
    CompilationError,
    NotSupportedError,
    message,
    not_supported,
    type_error,
    value_error,
)
from ..graph import (
    MOST_ENTRIES,
    CompilationRecord,
    ControlFlowPolicy,
    DiagnosticKind,
    DiagnosticLevel,
    Graph,
    HiddenGroup,
    HiddenParamOpRelation,
    HiddenPerturbation,
    Outside,
    Traces,
    analyse,
    certify,
    unused,
    with_step,
)
from ..program import PyTree, failing_line
from ..report import Advice, CompilationReport, uses_of
from ._brainstate import ModuleInfo, Path, extract_module_info
from ._step_function import StepFunction


class ETraceGraph(NamedTuple):
    """The parts of a model's step that a learning rule reads."""

    module_info: ModuleInfo
    hidden_groups: tuple[HiddenGroup, ...]
    hid_path_to_group: Mapping[Path, HiddenGroup]
    hidden_param_op_relations: tuple[HiddenParamOpRelation, ...]
    hidden_perturb: HiddenPerturbation | None
    diagnostics: tuple[CompilationRecord, ...]
    analysis: Graph

    @property
    def report(self) -> CompilationReport:
        """A readable summary, for a rule with one trace per weight."""
        shapes = [
            {
                k: jax.ShapeDtypeStruct(
                    r.slots.lanes + r.operator.trace_shape(k) + (r.slots.width,), r.slots.dtype
                )
                for k in r.keys
            }
            for r in self.hidden_param_op_relations
        ]
        return self.report_on(Traces(shapes))

    def report_on(
        self,
        traces: Traces,
        outside: Outside | None = None,
        rule: str = "",
        advise: Callable[[], Advice] | None = None,
    ) -> CompilationReport:
        """A readable summary, for what a rule stores and a step function does."""
        parameters, model = certify(self.analysis, traces), self.module_info.model
        for path in brainstate.graph.states(model, brainstate.ParamState).keys():
            if path not in parameters:
                parameters[path] = unused(path)
        return CompilationReport(
            self.hidden_groups,
            self.hidden_param_op_relations,
            self.diagnostics,
            [leaf.path for leaf in self.module_info.step.others],
            with_step(parameters, outside),
            uses_of(self.analysis, traces.per_parameter),
            rule,
            advise,
            model.title if isinstance(model, StepFunction) else type(model).__name__,
            self.analysis.memory,
        )

    def explain(
        self,
        *,
        weight_path: Path | None = None,
        hidden_path: Path | None = None,
        kind: DiagnosticKind | None = None,
    ) -> tuple[CompilationRecord, ...]:
        """The diagnostics about one weight, one state or of one kind.

        The last ones (of kind PARAMETER) say for every parameter how it is learned, and whether
        its gradient is exact.
        """
        certificate = tuple(
            CompilationRecord(
                DiagnosticKind.PARAMETER,
                DiagnosticLevel.INFO if p.silent is None else DiagnosticLevel.WARNING,
                str(p),
                weight_path=p.path,
                hidden_paths=p.states,
            )
            for p in self.report.parameters.values()
        )
        return tuple(
            d
            for d in (*self.diagnostics, *certificate)
            if (weight_path is None or d.weight_path == tuple(weight_path))
            and (hidden_path is None or tuple(hidden_path) in d.hidden_paths)
            and (kind is None or d.kind == kind)
        )

    def call_hidden_perturb(
        self, inputs: Sequence[jax.Array], perturb_data: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Run the perturbed step on flat inputs."""
        if self.hidden_perturb is None:
            raise ValueError("the graph was compiled with include_hidden_perturb=False.")
        return self.hidden_perturb.eval_jaxpr(inputs, perturb_data)

    def dict(self) -> dict[str, PyTree]:
        """The fields by name."""
        return self._asdict()


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
        include_hidden_perturb: also build the perturbed step.
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
    return graph_of(minfo, include_hidden_perturb, crossings, snap_max_jacobian_elements)


def check_mixing(include_recurrent_mixing: bool, sparse_n: int | None) -> int | None:
    """How many operators a trace is followed through; None for none, on no path."""
    if include_recurrent_mixing:
        return (1 if sparse_n is None else check_crossings(sparse_n)) - 1
    if sparse_n is not None:
        raise not_supported(
            f"sparse_n={sparse_n} without recurrent mixing.",
            why="it counts how often a trace is followed through operators",
            do="pass include_recurrent_mixing=True as well",
        )
    return None


def check_crossings(n: int) -> int:
    """Accept the order n of a rule that follows n - 1 crossings."""
    why, do = "n - 1 counts how many operators a trace is followed through", "pass an integer >= 1"
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise type_error(f"n has type {type(n).__name__}.", why=why, do=do)
    if n < 1:
        raise value_error(f"n={n}.", why=why, do=do)
    return int(n)


def graph_of(
    minfo: ModuleInfo,
    include_hidden_perturb: bool = True,
    crossings: int | None = None,
    most_entries: int = MOST_ENTRIES,
    fold: bool = True,
    unmarked: bool = False,
) -> ETraceGraph:
    """The graph of a traced model; `fold` and `unmarked` as in `analyse`."""
    try:
        graph = analyse(
            minfo.step,
            minfo.consts,
            minfo.states.get,
            minfo.records,
            crossings,
            most_entries,
            minfo.control_flow,
            fold,
            unmarked,
        )
    except (CompilationError, NotSupportedError):
        raise
    except Exception as error:
        raise CompilationError(_not_analysed(minfo, error)) from error
    perturb = add_hidden_perturbation_from_minfo(minfo) if include_hidden_perturb else None
    return ETraceGraph(
        minfo,
        graph.groups,
        _by_path(graph.groups),
        graph.relations,
        perturb,
        graph.records,
        graph,
    )


def _not_analysed(minfo: ModuleInfo, error: Exception) -> str:
    model = type(minfo.model)
    code = getattr(model, "update", model.__call__).__code__
    return message(
        f"the step of {model.__name__} runs, but its derivative could not be analysed.",
        where=failing_line(error) or f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})",
        why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
        do="check custom derivatives at this line; if there are none, this is a fault of the "
        "compiler: please report the model. Until then move the part that fails out of `update`",
    )


def _by_path(groups: Sequence[HiddenGroup]) -> dict[Path, HiddenGroup]:
    return {path: g for g in groups for path in g.hidden_paths}


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
    groups = graph_of(minfo, False, crossings, snap_max_jacobian_elements).hidden_groups
    return groups, _by_path(groups)


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
    relations = graph_of(minfo, False).hidden_param_op_relations
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


def add_hidden_perturbation_from_minfo(minfo: ModuleInfo) -> HiddenPerturbation:
    """The step of a traced model with a perturbation added to every new hidden state."""
    states = tuple(minfo.states[leaf.path] for leaf in minfo.step.hidden)
    return HiddenPerturbation(minfo.step, minfo.consts, states)


def add_hidden_perturbation_in_module(
    model: brainstate.nn.Module, *args: PyTree, **kwargs: PyTree
) -> HiddenPerturbation:
    """The step of a model with a perturbation added to every new hidden state."""
    return add_hidden_perturbation_from_minfo(extract_module_info(model, *args, **kwargs))
