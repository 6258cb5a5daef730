"""Learners: a model and a rule behind brainstate's calling conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import brainstate
import jax
import numpy as np
from jax import lax
from jax.tree_util import PyTreeDef

from .._errors import dotted, error, type_error, value_error
from .._online import (
    LossWatch,
    Problem,
    RunInfo,
    advise,
    check_memory,
    check_relations,
    traces_of,
)
from ..checkpoint import CheckpointMixin
from ..engine import (
    Placement,
    TimeAxes,
    Values,
    check_placement,
    check_surroundings,
    put,
    run_block,
)
from ..frontend import (
    ETraceGraph,
    Marker,
    Operands,
    StateTree,
    Traced,
    check_read,
    is_placeholder,
    named_states,
    outside,
    placeholder_call,
    title_of,
    weights_of,
    writing_states,
)
from ..frontend import values_of as arrays_of
from ..graph import ControlFlowPolicy, Graph, Outside, Path, with_step
from ..program import PyTree, deep_equations, zeros_of
from ..report import CompilationReport
from ..rules import LearningRule, Rule, by_group, check_limit, with_signal
from ._checks import (
    FOR_MODULES,
    USE_LESS_MEMORY,
    check_arguments,
    check_exact,
    check_layout,
    check_lockstep,
    check_precision,
    check_trace,
    shape_of,
    shape_of_example,
)
from ._data import Call, unwrap
from ._drivers import SequenceDriverMixin
from ._executor import ETraceVjpGraphExecutor, check_vjp_method, values_of
from ._reset import (
    LAST,
    Shapes,
    check_batch_size,
    check_states,
    no_batch,
    reinitialise,
    resized_states,
    shared_batch,
    state_shapes,
    strengthen,
    with_batch,
)
from ._saved import SavedStates
from ._signal import SignalMixin
from ._views import EligibilityTrace, TraceViewsMixin

Array = jax.Array
Instead = Callable[..., tuple[list[Array], Values]]  # (rule, graph, call, values, extra, names)


class ETraceAlgorithm(
    SavedStates,
    CheckpointMixin,
    SignalMixin,
    SequenceDriverMixin,
    TraceViewsMixin,
    brainstate.nn.Module,
):
    """A model that learns online.

    Build one with `braintrace.compile`, or with the class of a rule and `compile_graph`. Call it
    like the model: the call advances states and traces, and `brainstate.transform.grad` through it
    gives the gradient of the rule.
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        rule: LearningRule,
        name: str | None = None,
        vjp_method: str = "single-step",
        control_flow: ControlFlowPolicy | None = None,
        memory_limit: int | None = None,
    ):
        super().__init__(name=name)
        self.learning_rule, self.config = rule, rule.config
        self.vjp_method = check_vjp_method(vjp_method)
        self.takes = tuple(dict.fromkeys((*type(self).takes, *rule.takes)))
        self.windows = rule.no_windows or type(self).windows
        self._check_signal()
        self.executor = ETraceVjpGraphExecutor(
            model,
            self.vjp_method,
            rule.crossings is not None,
            None if rule.crossings is None else rule.crossings + 1,
            rule.most_entries,
            control_flow,
            rule.record.folds,
            rule.couple_axis,
        )
        self.memory_limit = check_limit(rule.memory_limit if memory_limit is None else memory_limit)
        self.model4compile = model
        self.running_index = brainstate.LongTermState(jax.device_put(np.int32(0)))
        self.etraces: dict[str, EligibilityTrace] = {}
        self.batch_size: int | None = None
        self.strict = False  # refuse to run a step that is not learned exactly
        self.last_run: RunInfo | None = None  # how the last sequence was run
        self._outside: Outside | None = None  # what the last step function did besides
        self._instead: Instead | None = None  # what a call does in place of the engine
        self._knows_spikes = False  # whether a silent network would have been reported
        self._losses = LossWatch(type(model).__name__)  # of `etrace_train`
        self._example: Any = None
        self._state_shapes: Shapes = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = super().__deepcopy__(memo)
        new._losses = LossWatch(type(new.model4compile).__name__)  # each counts its own calls
        return new

    @property
    def rule(self) -> Rule:
        """The rule, with this learner's own signal if it has one."""
        record = self.learning_rule.record
        if self._overrides_signal:
            return with_signal(record, by_group(self.learning_signal))
        return record

    # ------------------------------------------------------------------------------ compiling

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_graph` was called."""
        return self.executor.is_compiled

    def compile_graph(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Trace the model on example inputs, analyse its relations and allocate their traces.

        Inputs may be `jax.ShapeDtypeStruct`s. A second call with the same shapes does nothing.

        Raises:
            CompilationError: the step has no hidden state, or no weight reaches one.
        """
        if brainstate.transform.in_new_state_probe():
            return
        kwargs, _ = self._extra(kwargs)
        call = unwrap((args, kwargs))
        example = jax.tree.map(shape_of_example, call.step)
        if self.is_compiled:
            check_arguments(self._example, example)
            return
        self._example = example
        check_precision(self.path_to_states)
        strengthen(self.model4compile)
        step_args, step_kwargs = call.step
        self.executor.compile_graph(*step_args, **step_kwargs)
        try:
            analysis = self.executor.graph.analysis
            windows, unmarked = self.vjp_method == "multi-step", self.executor.unmarked
            check_relations(analysis, self.learning_rule, windows, unmarked, FOR_MODULES)
            self.batch_size = shared_batch(self.executor.graph, self._example)
            self.learning_rule.check_groups(analysis.groups)
            self.init_etrace_state()
        except BaseException:
            self.executor.forget()
            raise

    def init_etrace_state(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Allocate zero traces for the compiled graph."""
        graph = self.executor.graph
        info = graph.module_info
        init = lambda p: self.rule.init(graph.analysis, Values(info.consts, (), p, (), ()))
        traces = jax.eval_shape(init, info.leaves("params"))
        limits = (self.memory_limit, graph.analysis, traces, type(self).__name__)
        check_memory(*limits, USE_LESS_MEMORY)
        self._state_shapes = state_shapes(graph)
        placement, places = self.placement, None
        if placement is not None:
            placement.check(graph.analysis)
            places = placement.traces(graph.analysis, self.rule.per_parameter, traces)
        for (i, path), zeros in zip(self._traced(), zeros_of(traces, places), strict=True):
            key = f"{i}:{'.'.join(map(str, path))}"
            if key in self.etraces:
                self.etraces[key].value = zeros
            else:
                self.etraces[key] = EligibilityTrace(zeros)

    def _traced(self) -> list[tuple[int, Path]]:
        """What has a trace: relations, or all parameter leaves; number and path."""
        return self.rule.traced(self.executor.graph.analysis)

    # -------------------------------------------------------------------------------- calling

    def update(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """One step, or one window if an argument is `MultiStepData` (outputs stacked on axis 0)."""
        args, kwargs = self._unnamed(args, kwargs)
        if not self.is_compiled:
            raise value_error(
                f"{type(self).__name__} is called before it is compiled.",
                why="the traces have no shape yet",
                do="call learner.compile_graph(*example_inputs) first, or build the learner "
                "with braintrace.compile(model, rule, *example_inputs)",
            )
        kwargs, extra = self._extra(kwargs)
        self._check_extra(extra)
        call, besides = unwrap((args, kwargs)), unwrap(self._rule_inputs(extra))
        check_lockstep(call, besides)
        check_arguments(self._example, jax.tree.map(shape_of, call.step))
        states = self.path_to_states
        check_states(states, self._state_shapes)
        check_precision(states)
        step_args, step_kwargs = call.step
        self.executor = self.executor.bound_to(self.model4compile)  # a copied learner has its own
        info, graph = self.executor.trace(*step_args, **step_kwargs)
        check_layout(graph, self.executor.graph.analysis)
        if graph is not self.executor.graph.analysis:  # `update` computes something else now
            self.executor.adopt(graph)
            if self.strict:
                check_exact(self.report, type(self).__name__)
        for state in states.values():
            if isinstance(state, brainstate.ParamState):
                _ = state.value  # a parameter the step never reads still has a gradient, zero
        inputs = call.leaves
        if self.placement is not None:
            at = lambda a, timed: self.placement.arrays(graph, a, int(timed))
            inputs = tuple(put(a, at(a, t)) for a, t in zip(inputs, call.timed, strict=True))
        values = values_of(info, inputs, besides.leaves)
        check_surroundings(self.placement, (values.params, values.hidden, inputs))
        check_trace(values.hidden)
        of_rule = (besides.timed, jax.tree.structure(besides.step))
        _ = self.executor.mode.value
        if self._instead is not None:
            outs, new = self._instead(self.rule, graph, call, values, *of_rule)
        else:
            traces = [t.value for t in self.etraces.values()]
            outs, new, traces = self._run(graph, call, *of_rule)(values, traces)
            with writing_states():
                for state, value in zip(self.etraces.values(), traces, strict=True):
                    state.value = value
            self.running_index.value = lax.stop_gradient(self.running_index.value + 1)
        info.write("hidden", new.hidden)
        info.write("others", new.others)
        return jax.tree.unflatten(info.out_tree, outs)

    def _run(self, graph: Graph, call: Call, extra: tuple[bool, ...], names: PyTreeDef):
        single, rule = self.vjp_method == "single-step", self.rule
        length = call.length or 1
        axes = TimeAxes(
            length,
            tuple(False for _ in graph.step.program.consts),
            call.timed,
            None if single else length,
            extra,
            names,
        )

        def run(values: Values, traces: list[PyTree]):
            ran = run_block(graph, rule, values, traces, axes)
            last = replace(
                values,
                hidden=tuple(a[-1] for a in ran.after.hidden),
                others=tuple(a[-1] for a in ran.after.others),
            )
            outs = ran.outs if call.length is not None else [a[0] for a in ran.outs]
            return outs, last, ran.traces

        key = (graph, call.timed, call.length, extra, names)
        return self.executor.compiled(key, run)

    @contextmanager
    def instead(self, run: Instead) -> Iterator[None]:
        """Let calls compute their results by `run`; traces do not move."""
        before, self._instead = self._instead, run
        mode = self.executor.mode  # another structure: what was traced without `run` is stale
        value, mode.value = mode.value, (mode.value,)
        try:
            yield
        finally:
            self._instead, mode.value = before, value

    # ------------------------------------------------------------------------------- sequences

    calls_in_blocks = True  # whether many calls may be evaluated at once
    _learner = property(lambda self: self)

    @contextmanager
    def _placing(self, called: list[bool], mappable: bool = False) -> Iterator[None]:
        def placed(
            rule: Any, graph: Graph, call: Call, values: Values, extra: PyTree, names: PyTreeDef
        ) -> tuple[list[Array], Values]:
            called.append(True)
            marker = Marker(graph, call.timed, call.length, extra, names)
            kinds = (values.params, values.hidden, values.others)
            arrays = Operands(values.consts, values.args, *kinds, values.extra)
            outs, hidden, others = placeholder_call(marker, arrays, mappable)
            return outs, replace(values, hidden=hidden, others=others)

        with self.instead(placed):
            yield

    def _judge(self, traced: Traced | None, called: list[bool], weights: StateTree) -> bool:
        """Certify a step function; whether weights are used in a way that blocks would credit.

        In a block, RTRL goes back through the steps after the one that uses a weight.
        """
        calls = traced is None or any(map(is_placeholder, deep_equations(traced.program)))
        if not calls and not called:  # a function that was traced before calls nothing again
            raise value_error(
                "step_fn does not call the learner.",
                why="without it no trace is used: the model alone gives the gradient of one step",
                do="call this learner in it, `learner(x)` in place of `model(x)`; after compiling "
                "again, as when a notebook's cell runs twice, define step_fn again too",
            )
        trained = named_states(weights, self.path_to_states)
        if traced is not None:
            check_read(trained, self.param_states, [leaf.state for leaf in traced.leaves])
        states = {**self.states(), **self.graph.module_info.states, **self.path_to_states}
        private = {id(s) for s in (*self.etraces.values(), self.running_index)}
        self._outside = outside(traced, states, {**self.param_states, **trained}, private)
        besides = self._outside
        if self.strict and (besides.dropped or besides.everywhere):
            check_exact(self.report, type(self).__name__, trained)
        return self.rule.per_parameter and bool(trained.keys() & besides.dropped.keys())

    def forget_past(self) -> None:
        """Zero the traces, so that what comes counts as a new sequence."""
        ETraceAlgorithm.reset_state(self)

    # ------------------------------------------------------------------------------ placing

    @property
    def placement(self) -> Placement | None:
        """Where states, traces and parameters lie on a mesh of devices, see `shard`."""
        return self.executor.placement

    def shard(
        self, mesh: jax.sharding.Mesh, *, batch: str | None = None, units: str | None = None
    ) -> None:
        """Spread the learner over a mesh of devices: parameters, states, traces, optimizer, inputs.

        Where they lie follows from the operators of the step; gradients do not depend on it. What
        the user has spread over devices stays there.

        Args:
            mesh: the devices.
            batch: the axis of the mesh that samples are split over.
            units: the axis of the mesh that units are split over: the columns of weights, and the
                synapses of sparse ones. A weight whose units the devices do not divide is whole on
                each of them; the report says so.

        Raises:
            ValueError: the mesh has no such axis, or samples or units cannot be split.
        """
        placement = check_placement(mesh, batch, units)
        if placement is None:
            raise type_error(
                "the mesh is None.",
                why="a learner is spread over a jax.sharding.Mesh of devices",
                do="pass mesh=jax.make_mesh((jax.device_count(),), ('data',))",
            )
        placement.check(self.graph.analysis)
        old, self.executor.placement = self.executor.placement, placement
        self._place(old)

    def _place(self, old: Placement | None = None) -> None:
        """Put all arrays where they belong; those of an `old` placement, too."""
        placement = self.placement
        if placement is None or not self.is_compiled:
            return
        info, graph = self.graph.module_info, self.graph.analysis
        places = {k: placement.states(graph, getattr(graph.step, k)) for k in ("hidden", "others")}
        for kind, at in {"params": placement.params(graph), **places}.items():
            info.write(kind, put(info.leaves(kind), tuple(at), old))
        states = list(self.etraces.values())
        traces = [s.value for s in states]
        where = placement.traces(graph, self.rule.per_parameter, traces)
        for state, value in zip(states, put(traces, where, old), strict=True):
            state.value = value
        if self.optimizer_state is not None:
            own, params = self.optimizer_state, arrays_of(weights_of(None, self.param_states))
            own.value = put(own.value, placement.moments(own.value, params), old)

    # ------------------------------------------------------------------------------ resetting

    @brainstate.nn.call_order(LAST - 1, check_order_boundary=False)
    def reset_state(self, batch_size: int | None = None, **kwargs: PyTree) -> None:
        """Zero the traces and counters; with `batch_size`, for another number of samples.

        The model's own states are not touched: use `reset`, or
        `brainstate.nn.reset_all_states(learner)`, between sequences.

        Raises:
            ValueError: `batch_size` is no number of samples, or the learner has no batch axis.
        """
        check_batch_size(batch_size)
        self._losses.look()
        if batch_size is not None and self.is_compiled and batch_size != self.batch_size:
            self._resize(batch_size)
        self.running_index.value = np.zeros((), np.int32)  # a constant within a trace, too
        self.reset_traces()
        strengthen(self.model4compile)
        self._place()

    def reset_traces(self) -> None:
        """The traces as they are before the first step."""
        if self.etraces:
            traces = self.rule.reset([s.value for s in self.etraces.values()])
            for state, value in zip(self.etraces.values(), traces, strict=True):
                state.value = value

    def reset(self, batch_size: int | None = None) -> None:
        """Reset the model's states and the traces: do this between sequences."""
        if batch_size is not None and self.batch_size is None:
            raise no_batch()
        check_batch_size(batch_size)
        size = self.batch_size if batch_size is None else batch_size
        if self.placement is not None:
            self.placement.check_samples(size)  # before anything is changed
        brainstate.nn.reset_all_states(self.model4compile, batch_size=size)
        reinitialise(self.model4compile, size)
        self.reset_state(batch_size)

    def _resize(self, batch_size: int) -> None:
        old = self.batch_size
        if old is None:
            raise no_batch()
        if self.placement is not None:
            self.placement.check_samples(batch_size)
        self._example = with_batch(self._example, old, batch_size)
        states = {p: s for p, s in self.path_to_states.items() if p in self._state_shapes}
        with resized_states(states, old, batch_size):
            args, kwargs = self._example
            self.executor.compile_graph(*args, **kwargs)
        self.batch_size = batch_size
        self.init_etrace_state()

    # ------------------------------------------------------------------------------ inspecting

    def __repr__(self) -> str:
        name, model = type(self).__name__, title_of(self.model4compile)
        if not self.is_compiled:
            return f"{name} of {model}, not compiled"
        size = sum(a.nbytes for t in self.etraces.values() for a in jax.tree.leaves(t.value))
        options = f"vjp_method={self.vjp_method}, batch_size={self.batch_size}"
        return (
            f"{name} of {model}: {self.config.describe()}, {options}\n"
            f"  {self.report.picture.summary}\n  {size:,} bytes of traces"
        )

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph."""
        return self.executor.graph

    graph_executor = property(lambda self: self.executor)

    @property
    def report(self) -> CompilationReport:
        """The compilation report, with what the last step function does outside `update`."""
        if not self.is_compiled:
            raise error(RuntimeError)(
                f"{type(self).__name__} is not compiled yet.",
                why="the report is about the analysed step",
                do="call learner.compile_graph(*example_inputs) first, or build the learner with "
                "braintrace.compile(model, rule, *example_inputs)",
            )
        shapes = [jax.tree.map(shape_of, t.value) for t in self.etraces.values()]
        windows = self.vjp_method == "multi-step"
        traces = traces_of(self.rule, self.config, shapes, windows)
        rule = replace(self.learning_rule, record=self.rule)
        info, outside = self.graph.module_info, self._outside
        judge = lambda reports: with_step(reports, outside)
        unmarked = self.executor.unmarked
        problem = Problem(info.step, tuple(info.consts), info.control_flow, unmarked, judge)
        graph, placement = self.graph, self.placement
        if placement is not None:
            records = placement.records(graph.analysis)
            graph = graph._replace(diagnostics=(*graph.diagnostics, *records))
        return graph.report_on(traces, outside, rule.name, partial(advise, problem, rule))

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the compilation report, or return its text."""
        return self.executor.show_graph(verbose, return_msg)

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The states that carry memory, by path."""
        states = brainstate.graph.states(self.model4compile)
        paths = dict.fromkeys(leaf.path for leaf in self.graph.module_info.step.hidden)
        return {p: states[p] for p in paths if p in states}

    @property
    def other_states(self) -> dict[Path, brainstate.State]:
        """States that are neither parameters nor memory, by path."""
        named = {*self.hidden_states, *self.param_states.keys()}
        return {
            p: s for p, s in brainstate.graph.states(self.model4compile).items() if p not in named
        }

    @property
    def path_to_states(self) -> dict[Path, brainstate.State]:
        return dict(brainstate.graph.states(self.model4compile).items())

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        return {id(s): p for p, s in self.path_to_states.items()}

    def get_etrace_of(self, weight: brainstate.ParamState | Path | str) -> dict[str, PyTree]:
        """The traces of a parameter, by relation.

        Args:
            weight: the ParamState, or its path in the model.

        Raises:
            ValueError: no relation carries this parameter.
        """
        if isinstance(weight, brainstate.State):
            path = next((p for p, s in self.path_to_states.items() if s is weight), None)
        else:
            path = (weight,) if isinstance(weight, str) else tuple(weight)
        if self.rule.per_parameter:
            paths = [[p] for _, p in self._traced()]
        else:
            relations = self.graph.hidden_param_op_relations
            paths = [list(r.trainable_paths.values()) for r in relations]
        pairs = list(zip(paths, self.etraces.items(), strict=True))
        traces = {key: state.value for ps, (key, state) in pairs if path in ps and state.value}
        if not traces:
            traced = {p for ps, (_, state) in pairs if state.value for p in ps}
            raise value_error(
                f"{path} has no eligibility trace.",
                why="the report lists the traced weights: "
                + ", ".join(dotted(tuple(p)) for p in sorted(traced, key=str)),
                do="ask for one of these, or see learner.report for the reason",
            )
        return traces


class ETraceVjpAlgorithm(ETraceAlgorithm):
    """A learner whose gradient is taken by reverse mode inside a step or a window."""
