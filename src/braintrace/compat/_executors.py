"""The published executors: a traced and analysed model, and the numbers of one of its steps."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from ..engine import Values, evaluate_plain, group_jacobians, inputs_of, observe
from ..frontend import ModuleInfo, check_module, extract_module_info
from ..graph import MOST_ENTRIES, ControlFlowPolicy, Graph, Path, check_policy
from ..learner._checks import VJP_METHODS, not_compiled
from ..program import PyTree
from ..rules import check_choice
from ._etrace_graph import ETraceGraph, check_mixing, graph_of


class ETraceGraphExecutor:
    """Holds the compiled graph of a model.

    Args:
        model: the network, one step in `update`, states initialised.
        include_recurrent_mixing: follow traces through operators too.
        sparse_n: follow them through at most `sparse_n - 1` operators; default 1.
        snap_max_jacobian_elements: how many entries the Jacobian of one relation may have.
        control_flow: which control flow the analysis leaves alone, none by default.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        include_recurrent_mixing: bool = False,
        sparse_n: int | None = None,
        snap_max_jacobian_elements: int = MOST_ENTRIES,
        control_flow: ControlFlowPolicy | None = None,
    ):
        crossings = check_mixing(include_recurrent_mixing, sparse_n)
        self._options = (crossings, snap_max_jacobian_elements)
        self.control_flow = check_policy(control_flow)
        check_module(model)
        self.model = model
        self._graph: ETraceGraph | None = None

    @property
    def is_compiled(self) -> bool:
        return self._graph is not None

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        if self._graph is None:
            raise not_compiled()
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
        info = extract_module_info(self.model, *args, control_flow=self.control_flow, **kwargs)
        self._graph = graph_of(info, *self._options)

    def _now(self, args: PyTree, kwargs: PyTree) -> tuple[ModuleInfo, Graph]:
        """The analysed step for these arguments."""
        info = extract_module_info(self.model, *args, control_flow=self.control_flow, **kwargs)
        return info, graph_of(info, *self._options).analysis

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
    ):
        limits = (sparse_n, snap_max_jacobian_elements, control_flow)
        super().__init__(model, include_recurrent_mixing, *limits)
        check_choice("vjp_method", vjp_method, VJP_METHODS)
        self.vjp_method = vjp_method

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
        info, graph = self._now(args, kwargs)
        *states, fixed = info.read()
        values = Values(info.consts, (*jax.tree.leaves((args, kwargs)), *fixed), *states)
        flat = evaluate_plain(graph, values)
        inputs = inputs_of(graph, values)
        parts = observe(graph, values.consts, inputs)
        hiddens = {leaf.path: flat[leaf.output] for leaf in graph.step.hidden}
        others = {leaf.path: flat[leaf.output] for leaf in graph.step.others}
        out = jax.tree.unflatten(info.out_tree, flat[: graph.step.n_outs])
        jacobians = group_jacobians(graph, values.consts, inputs)
        return out, hiddens, others, ([o.x for o in parts], [o.f for o in parts]), jacobians


class LearnerExecutor(ETraceVjpGraphExecutor):
    """What a learner has compiled, as an executor."""

    def __init__(self, learner: Any):
        self._learner, self.model = learner, learner.model4compile
        self.control_flow, self.vjp_method = learner.control_flow, learner.vjp_method

    @property
    def is_compiled(self) -> bool:
        return self._learner.is_compiled

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        return self._learner.graph

    def compile_graph(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Compile the learner."""
        self._learner.compile_graph(*args, **kwargs)

    def _now(self, args: PyTree, kwargs: PyTree) -> tuple[ModuleInfo, Graph]:
        prepared = self._learner._prepared_own(args, kwargs)
        return prepared.info, prepared.plan.graph
