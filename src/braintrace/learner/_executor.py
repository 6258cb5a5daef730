"""Tracing a model call by call, and reusing its analyses and compiled programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, Self

import brainstate
import jax

from .._errors import OWN_CELL, type_error, value_error
from ..engine import (
    Engine,
    Placement,
    Values,
    evaluate_plain,
    group_jacobians,
    inputs_of,
    observe,
    recorded,
)
from ..frontend import (
    ETraceGraph,
    ModuleInfo,
    check_mixing,
    extract_module_info,
    graph_of,
    surroundings,
)
from ..graph import (
    MOST_ENTRIES,
    ControlFlowPolicy,
    Graph,
    Path,
    check_policy,
    warn_of_zero_derivatives,
)
from ..ops import compiled
from ..program import PyTree, fingerprint, is_traced

Array = jax.Array


# Analyses and compiled programs that are cached, the oldest goes first: a model whose program
# differs at every call must not fill memory.
_MOST_CACHED = 64
_MOST_TRACES = 8  # they hold on to arrays that were attributes


class ETraceGraphExecutor:
    """Holds the compiled graph of a model.

    A call traces the model again if anything that `update` can reach has changed (attributes,
    settings, globals: see `frontend/_surroundings`), so that values which it takes from there are
    those of the call; the analysis is reused whenever the traced program is the same.

    Args:
        model: the network, one step in `update`, states initialised.
        include_recurrent_mixing: follow traces through operators too.
        sparse_n: follow them through at most `sparse_n - 1` operators; default 1.
        snap_max_jacobian_elements: how many entries the Jacobian of one relation may have.
        control_flow: which control flow the analysis leaves alone, none by default.
        fold: follow weights with a factor that varies.
        couple_axis: an axis of states along which elements are one unit.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        include_recurrent_mixing: bool = False,
        sparse_n: int | None = None,
        snap_max_jacobian_elements: int = MOST_ENTRIES,
        control_flow: ControlFlowPolicy | None = None,
        fold: bool = True,
        couple_axis: int | None = None,
    ):
        crossings = check_mixing(include_recurrent_mixing, sparse_n)
        self._options = (crossings, snap_max_jacobian_elements, fold, couple_axis)
        self.control_flow = check_policy(control_flow)
        if not isinstance(model, brainstate.nn.Module):
            raise type_error(
                f"expected a brainstate.nn.Module, got {type(model).__name__}.",
                why="the step of a learner is the `update` of a module",
                do="write one step of the network in the `update` of such a module, or give a "
                f"function to braintrace.compile; {OWN_CELL}",
            )
        self.model = model
        self.unmarked = False  # whether plain JAX that uses a trained value counts as an operator
        self.engine = Engine.AUTO  # what runs loops over time
        self.placement: Placement | None = None  # where arrays lie, on a mesh
        self.mode = brainstate.State(())  # of another structure while calls are replaced
        self._graph: ETraceGraph | None = None
        self._analyses: dict[Hashable, Graph] = {}
        self._runs: dict[Hashable, Callable] = {}
        self._traces: dict[Hashable, tuple[ModuleInfo, Graph, list[Any]]] = {}

    @property
    def is_compiled(self) -> bool:
        return self._graph is not None

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        if self._graph is None:
            raise value_error(
                "the graph is not compiled yet.",
                why="shapes come from example inputs",
                do="call compile_graph(*example_inputs) first",
            )
        return self._graph

    @property
    def states(self) -> dict[Path, brainstate.State]:
        """The states the step touches, by path."""
        return dict(self.graph.module_info.states)

    path_to_states = states

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        return {id(s): p for p, s in self.states.items()}

    def compile_graph(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Trace and analyse the model on example inputs."""
        info = self._info(args, kwargs)
        self._graph = graph_of(info, *self._options, self.unmarked)
        self._analyses[_key(info)] = self._graph.analysis
        warn_of_zero_derivatives(self._graph.analysis)

    def _info(self, args: Any, kwargs: Any) -> ModuleInfo:
        return extract_module_info(self.model, *args, control_flow=self.control_flow, **kwargs)

    def bound_to(self, model: brainstate.nn.Module) -> Self:
        """This executor, or a copy of it for another model of the same structure."""
        if model is self.model:
            return self
        other = copy.copy(self)
        other.model = model
        other._analyses, other._runs, other._traces = dict(self._analyses), dict(self._runs), {}
        return other

    def adopt(self, analysis: Graph) -> None:
        """Let the compiled graph, and reports of it, be about another analysis of the model."""
        self._graph = self.graph._replace(
            hidden_groups=analysis.groups,
            hidden_param_op_relations=analysis.relations,
            diagnostics=analysis.records,
            analysis=analysis,
        )

    def forget(self) -> None:
        """Drop the compiled graph."""
        self._graph = None
        self._analyses.clear()
        self._traces.clear()

    def trace(self, *args: PyTree, **kwargs: PyTree) -> tuple[ModuleInfo, Graph]:
        """Trace the model at its present states and surroundings, unless it was, at the same."""
        context = surroundings(self.model, (args, kwargs))  # before `update` changes any of it
        if context is not None and (context.key, self.unmarked) in self._traces:
            info, analysis, _ = self._traces[context.key, self.unmarked]
            return info, analysis
        info = self._info(args, kwargs)
        key = _key(info)
        if key not in self._analyses:
            analysis = graph_of(info, *self._options, self.unmarked).analysis
            _store(self._analyses, key, analysis)
        analysis = self._analyses[key]
        if context is not None and not any(map(is_traced, info.consts)):
            traced = (info, analysis, context.holds)
            _store(self._traces, (context.key, self.unmarked), traced, _MOST_TRACES)
        return info, analysis

    def compiled(self, key: Hashable, run: Callable, donate: int | None = None) -> Callable:
        """`run`, compiled once for equal keys; it may reuse the memory of argument `donate`."""
        key = (key, donate, self.engine, self.placement)
        if key not in self._runs:
            structures = self.graph.analysis.structures
            run = recorded(run, self.engine, self.placement)
            _store(self._runs, key, compiled(run, structures, donate))
        return self._runs[key]

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the compilation report, or return its text."""
        text = self.graph.report.to_str(level=2)
        if verbose and not return_msg:
            print(text)
        return text if return_msg else None


class ETraceVjpGraphExecutor(ETraceGraphExecutor):
    """An executor that also evaluates the Jacobians of a step.

    Takes the arguments of `ETraceGraphExecutor`, and `vjp_method` as second.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        vjp_method: str = "single-step",
        include_recurrent_mixing: bool = False,
        sparse_n: int | None = None,
        snap_max_jacobian_elements: int = MOST_ENTRIES,
        control_flow: ControlFlowPolicy | None = None,
        fold: bool = True,
        couple_axis: int | None = None,
    ):
        limits = (sparse_n, snap_max_jacobian_elements, control_flow, fold, couple_axis)
        super().__init__(model, include_recurrent_mixing, *limits)
        self.vjp_method = check_vjp_method(vjp_method)

    @property
    def is_single_step_vjp(self) -> bool:
        return self.vjp_method == "single-step"

    @property
    def is_multi_step_vjp(self) -> bool:
        return self.vjp_method == "multi-step"

    def solve_h2w_h2h_jacobian(self, *args: PyTree, **kwargs: PyTree) -> tuple:
        """Run one step without storing anything.

        Returns:
            `(out, hiddens, others, (xs, fs), Ds)`: outputs, new states by path, per relation the
            operator's input and tail, per hidden group the block Jacobian (*varshape, S, S).
        """
        info, graph = self.trace(*args, **kwargs)
        values = values_of(info, tuple(jax.tree.leaves((args, kwargs))))
        flat = evaluate_plain(graph, values)
        inputs = inputs_of(graph, values)
        parts = observe(graph, values.consts, inputs)
        hiddens = {leaf.path: flat[leaf.output] for leaf in graph.step.hidden}
        others = {leaf.path: flat[leaf.output] for leaf in graph.step.others}
        out = jax.tree.unflatten(info.out_tree, flat[: graph.step.n_outs])
        jacobians = group_jacobians(graph, values.consts, inputs)
        return out, hiddens, others, ([o.x for o in parts], [o.f for o in parts]), jacobians


def _store(
    cache: dict[Hashable, Any], key: Hashable, value: PyTree, most: int = _MOST_CACHED
) -> None:
    if len(cache) >= most:
        del cache[next(iter(cache))]
    cache[key] = value


def check_vjp_method(vjp_method: str) -> str:
    """Accept 'single-step' and 'multi-step'."""
    if vjp_method not in ("single-step", "multi-step"):
        raise value_error(
            f"unknown vjp_method {vjp_method!r}.",
            why="a gradient is taken per step or per window",
            do="choose 'single-step' or 'multi-step'",
        )
    return vjp_method


def values_of(
    info: ModuleInfo, arguments: tuple[Array, ...], extra: tuple[Array, ...] = ()
) -> Values:
    """The present arrays of a traced call."""
    states = (info.leaves("params"), info.leaves("hidden"), info.leaves("others"))
    return Values(info.consts, arguments, *states, extra)


def _key(info: ModuleInfo) -> Hashable:
    leaves = (info.step.params, info.step.hidden, info.step.others)
    return fingerprint(info.step.program, info.consts), leaves, info.arg_tree
