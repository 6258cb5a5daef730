"""The compiled graph of a brainstate model, and functions that return its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

import brainstate
import jax

from .._errors import not_supported, type_error, value_error
from ..frontend import ModuleInfo, analysing, title_of
from ..graph import (
    MOST_ENTRIES,
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    Graph,
    HiddenGroup,
    HiddenParamOpRelation,
    Path,
    Traces,
    analyse,
    certify,
    unused,
)
from ..program import PyTree
from ..report import CompilationReport, uses_of
from ._perturb import HiddenPerturbation, perturbed


class ETraceGraph(NamedTuple):
    """The parts of a model's step that a learning rule reads."""

    module_info: ModuleInfo
    hidden_groups: tuple[HiddenGroup, ...]
    hid_path_to_group: Mapping[Path, HiddenGroup]
    hidden_param_op_relations: tuple[HiddenParamOpRelation, ...]
    diagnostics: tuple[CompilationRecord, ...]
    analysis: Graph

    @property
    def hidden_perturb(self) -> HiddenPerturbation:
        """The perturbed step."""
        return perturbed(self.module_info)

    def call_hidden_perturb(
        self, inputs: Sequence[jax.Array], perturb_data: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Run the perturbed step on flat inputs."""
        return self.hidden_perturb.eval_jaxpr(inputs, perturb_data)

    def dict(self) -> dict[str, PyTree]:
        """The fields by name."""
        return self._asdict() | {"hidden_perturb": self.hidden_perturb}

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
        traces = Traces(shapes)
        parameters, model = certify(self.analysis, traces), self.module_info.model
        for path in brainstate.graph.states(model, brainstate.ParamState).keys():
            if path not in parameters:
                parameters[path] = unused(path)
        return CompilationReport(
            self.hidden_groups,
            self.hidden_param_op_relations,
            self.diagnostics,
            [leaf.path for leaf in self.module_info.step.others],
            parameters,
            uses_of(self.analysis, traces.per_parameter),
            model=title_of(model),
            analysis_bytes=self.analysis.memory,
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
    crossings: int | None = None,
    most_entries: int = MOST_ENTRIES,
    fold: bool = True,
    couple_axis: int | None = None,
    unmarked: bool = False,
) -> ETraceGraph:
    """The graph of a traced model; `fold`, `couple_axis` and `unmarked` as in `analyse`."""
    limits = (crossings, most_entries, minfo.control_flow, fold, unmarked, couple_axis)
    with analysing(minfo):
        graph = analyse(minfo.step, minfo.consts, minfo.states.get, minfo.records, *limits)
    return etrace_graph(minfo, graph)


def etrace_graph(minfo: ModuleInfo, graph: Graph) -> ETraceGraph:
    """An analysed step with the call that it was traced from."""
    return ETraceGraph(
        minfo,
        graph.groups,
        groups_by_path(graph.groups),
        graph.relations,
        graph.records,
        graph,
    )


def groups_by_path(groups: Sequence[HiddenGroup]) -> dict[Path, HiddenGroup]:
    return {path: g for g in groups for path in g.hidden_paths}
