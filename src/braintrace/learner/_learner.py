"""A model and a rule: a learner finds states, runs an analysed step on them and writes them back.

Everything in between is `_online`, see `_online/_calls.py`. The step is the model's own, or the
function of the user that calls the learner (`_steps.py`). Traces are named by weights and states:
both share those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import brainstate
import jax
import numpy as np

from .._errors import CompilationError, dotted, type_error, value_error, warn
from .._online import (
    Arrays,
    LossWatch,
    Options,
    Plan,
    Position,
    Problem,
    RunInfo,
    Stream,
    Weights,
    plan_of,
)
from .._online import Call as PlanCall
from .._published import published
from ..checkpoint import CheckpointMixin
from ..engine import Engine, Placement, check_placement, put
from ..frontend import (
    EligibilityTrace,
    Key,
    ModuleInfo,
    analysing,
    check_module,
    check_surrounding_trace,
    extract_module_info,
    floating,
    key_of,
    taken,
    title_of,
)
from ..graph import ControlFlowPolicy, Path, check_policy, unused
from ..program import PyTree, any_traced, fingerprint
from ..report import CompilationReport
from ..rules import LearningRule, Rule, by_group, check_choice, check_limit, with_signal
from ._alone import OneThread, alone
from ._checks import (
    FOR_MODULES,
    USE_LESS_MEMORY,
    VJP_METHODS,
    changed_structure,
    check_arguments,
    check_exact,
    check_layout,
    check_lockstep,
    check_precision,
    not_compiled,
    shape_of,
    shape_of_example,
)
from ._data import Call, unwrap
from ._driver import SequenceDriverMixin
from ._export import ExportMixin
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
from ._steps import Prepared, passed, stepping
from ._weights import Differentiated, WeightTree

Array = jax.Array


@dataclass(eq=False, slots=True)
class Known:
    """What a learner has traced and analysed, and the arrays that it wrote last.

    Attributes:
        own: the model's own step.
        last: the step that ran last.
        plans, traced: analysed steps by program, and traced functions by key.
        written: the arrays of hidden states by path, and of traces by name.
        per_sample: states with one entry per sample, and the shapes of an entry.
        mark: is read by calls.
    """

    own: Prepared | None = None
    last: Prepared | None = None
    plans: dict[Any, Plan] = field(default_factory=dict)
    traced: dict[Any, Prepared] = field(default_factory=dict)
    written: dict[Any, list[Any]] | None = None
    per_sample: list[tuple[brainstate.State, list[tuple[int, ...]]]] = field(default_factory=list)
    mark: brainstate.State = field(default_factory=lambda: brainstate.State(()))

    def of_copy(self, model: brainstate.nn.Module) -> Known:
        """What a copy of the learner knows, with a copy of the model."""
        if self.own is None:
            return Known()
        own = replace(self.own, info=self.own.info.of_model(model))
        return Known(own, own, dict(self.plans))


_MOST_PLANS = 64  # a model whose program differs at every call must not fill memory
_MOST_TRACED = 6  # they hold on to arrays that were attributes


class Learner(
    SavedStates,
    CheckpointMixin,
    SignalMixin,
    SequenceDriverMixin,
    ExportMixin,
    brainstate.nn.Module,
):
    """A model that learns online, as `braintrace.compile` returns it.

    Call it like the model: a call advances states and traces, and `brainstate.transform.grad`
    through it gives the gradient of the rule. What users need first:

        reset                between sequences: states and traces begin anew
        learner(x)           one step
        grad, etrace_grad    the gradient of a sequence: of a loss of outputs, or of a step function
        train, etrace_train  learn while the sequence runs
        report, memory       how every parameter is learned; bytes of the traces
        save, load           everything that training goes on from, in one file
        export_c             the learner as C
        shard                spread it over devices
        last_run             how the last sequence was run
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
        self.one_thread = OneThread()
        self.learning_rule, self.config = rule, rule.config
        self.title = rule.name if type(self) is Learner else type(self).__name__  # in messages
        check_choice("vjp_method", vjp_method, VJP_METHODS)
        self.vjp_method = vjp_method
        self.takes = tuple(dict.fromkeys((*type(self).takes, *rule.takes)))
        self.windows = rule.no_windows or type(self).windows
        self._check_signal()
        self.control_flow = check_policy(control_flow)
        self.memory_limit = check_limit(rule.memory_limit if memory_limit is None else memory_limit)
        check_module(model)
        self.model4compile = model
        self.running_index = brainstate.LongTermState(jax.device_put(np.int32(0)))
        self.etraces: dict[str, EligibilityTrace] = {}
        self.batch_size: int | None = None
        self.window: int | None = None  # steps per window of a sequence, if that is not said
        self.strict = False  # refuse to run a step that is not learned exactly
        self.unmarked = False  # whether plain JAX that uses a trained value counts as an operator
        self.engine = Engine.AUTO  # what runs loops over time
        self.placement: Placement | None = None  # where arrays lie, on a mesh
        self.last_run: RunInfo | None = None  # how the last sequence was run
        self.samples: int | None = None  # over which the model is mapped, with `vmap=True`
        self._mapped: Callable[..., PyTree] | None = None  # the model, mapped over them
        self._known = Known()
        self._knows_spikes = False  # whether a silent network would have been reported
        self._losses = LossWatch(type(model).__name__)  # of `etrace_train`
        self._example: Any = None
        self._state_shapes: Shapes = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = super().__deepcopy__(memo)
        new._losses = LossWatch(type(new.model4compile).__name__)  # each counts its own calls
        new._known = self._known.of_copy(new.model4compile)
        if new.samples is not None:
            new.map_over(new.samples)
        return new

    @property
    def rule(self) -> Rule:
        """The rule, with this learner's own signal if it has one."""
        record = self.learning_rule.record
        if self._overrides_signal:
            return with_signal(record, by_group(self.learning_signal))
        return record

    key_parts = ("model4compile", "unmarked", "engine")  # what the key of a step has of a learner

    # ------------------------------------------------------------------------------ compiling

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_graph` was called."""
        return self._known.own is not None

    def __getattr__(self, name: str) -> Any:
        return published(self, name)

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
        self._compile()

    def _compile(self) -> None:
        """Analyse the model for the example, and allocate traces."""
        self._state_shapes = {}
        try:
            args, kwargs = self._example
            self._known.own = self._known.last = self._prepared_own(args, kwargs)
            self.batch_size = shared_batch(self._known.own.plan.graph, self._example)
            self.init_etrace_state()
        except BaseException:
            self._known.own = self._known.last = None
            raise

    def init_etrace_state(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Allocate zero traces for the compiled graph."""
        own = self._compiled()
        self._state_shapes = state_shapes(own.plan.graph.step)
        self._allocate(own, anew=True)

    def recompile(self) -> None:
        """Trace everything again at its next call: Python values that nobody can see have changed.

        Attributes of the model, shapes, types, settings and what a step function refers to are
        compared at every call. Attributes of classes and of Python modules, and the contents of
        objects of other libraries, are not.
        """
        self._known.traced.clear()

    def _compiled(self) -> Prepared:
        if self._known.own is None:
            raise not_compiled()
        return self._known.own

    def _allocate(self, prepared: Prepared, anew: bool = False) -> None:
        """Zero traces for a step, those that the learner does not have yet."""
        if not anew and all(name in self.etraces for name in prepared.names):
            return
        for name, zeros in prepared.parts(prepared.plan.zeros()).items():
            if name not in self.etraces:
                with jax.ensure_compile_time_eval():
                    concrete = jax.tree.map(lambda a: jax.numpy.zeros(a.shape, a.dtype), zeros)
                trace = EligibilityTrace.owned(concrete)
                if self.placement is not None:
                    trace.put(zeros)
                trace.stack_level = self.running_index.stack_level
                self.etraces[name] = trace
            elif anew:
                self.etraces[name].value = zeros

    # ------------------------------------------------------------------------- traced steps

    def _prepared_own(self, args: PyTree, kwargs: PyTree) -> Prepared:
        """The model's own step for arguments of these shapes."""
        trace, key = partial(self._trace_own, args, kwargs), key_of((args, kwargs), self)
        return self._prepared(("own", self._synthetic), key, trace)

    def _trace_own(self, args: PyTree, kwargs: PyTree) -> tuple[ModuleInfo, WeightTree]:
        model, policy = self.model4compile, self.control_flow
        self._check_states()
        info = extract_module_info(model, *args, control_flow=policy, called=self._mapped, **kwargs)
        states = tuple(self.param_states.values())
        return info.trained(set(map(id, states))), WeightTree(tuple(range(len(states))), states)

    def _check_states(self) -> None:
        """Refuse states of other shapes or types than those of the traces."""
        states = self.path_to_states
        check_states(states, self._state_shapes)
        check_precision(states)

    def _prepared(
        self, kind: Any, key: Key | None, trace: Callable[[], tuple[ModuleInfo, WeightTree]]
    ) -> Prepared:
        """A traced function and its analysed step, unless nothing changed since it was traced."""
        if key is not None and (kind, key.value) in self._known.traced:
            return self._known.traced[kind, key.value]
        info, weights = trace()
        touched = set(map(id, info.states.values()))
        prepared = Prepared(
            info,
            self._plan(kind, info),
            Differentiated.of(weights, info),
            tuple(s for s in weights.states if id(s) not in touched),
            [] if key is None else key.holds,
        )
        if key is not None and not any_traced(info.consts):
            _store(self._known.traced, (kind, key.value), prepared, _MOST_TRACED)
        return prepared

    def _plan(self, kind: Any, info: ModuleInfo) -> Plan:
        """The analysed step of a traced function; the same for the same program."""
        of_step = kind[0] != "own"
        leaves = (info.step.params, info.step.hidden, info.step.others)
        about = (self.unmarked, self.engine, self.placement, self._synthetic)
        program = fingerprint(info.step.program, info.consts)
        key = (of_step, program, leaves, info.arg_tree, info.out_tree, *about)
        if key not in self._known.plans:
            rule = replace(self.learning_rule, record=self.rule)
            problem = Problem(
                *(info.step, tuple(info.consts), self.control_flow, self.unmarked),
                find=info.states.get,
                words=FOR_MODULES,
                whole=not of_step,
            )
            name = title_of(self.model4compile)
            windows = self.vjp_method == "multi-step"
            limits = (self.memory_limit, windows, self.engine, self.placement, USE_LESS_MEMORY)
            with analysing(info):
                plan = plan_of(problem, rule, info.records, info.out_tree, name, *limits)
            extra = passed(info) if of_step else None
            if extra is not None:
                structure = jax.tree.unflatten(extra.tree, extra.program.outputs)
                plan.check_call(structure)
            names = plan.rule.record.named(plan.graph)
            plan = replace(plan, passed=extra, attach=self._attach(plan), trace_names=names)
            if plan.reusable:
                _store(self._known.plans, key, plan, _MOST_PLANS)
            return plan
        return self._known.plans[key]

    _synthetic: Any = None  # what a rule trains besides the model

    def _attach(self, plan: Plan) -> Any:
        """What changes the derivative of a call's results."""
        return None

    # -------------------------------------------------------------------------------- calling

    @alone
    def update(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """One step, or one window if an argument is `MultiStepData` (outputs stacked on axis 0)."""
        args, kwargs = self._arguments(args, kwargs)
        if not self.is_compiled:
            raise not_compiled(f"{self.title} is called")
        kwargs, extra = self._extra(kwargs)
        self._check_extra(extra)
        call, besides = unwrap((args, kwargs)), unwrap(extra)
        check_lockstep(call, besides)
        check_arguments(self._example, jax.tree.map(shape_of, call.step))
        running = stepping(self._known.mark)
        if running is not None:
            self._check_states()
            hidden = [s.value for s in self.hidden_states.values()]
            check_surrounding_trace(jax.tree.leaves(hidden))
            return running.call(self, self._mapped or self.model4compile, call, besides.step)
        step_args, step_kwargs = call.step
        try:
            prepared = self._prepared_own(step_args, step_kwargs)
        except CompilationError as cause:
            raise changed_structure() from cause
        if prepared.plan is not self._compiled().plan:  # `update` computes something else now
            check_layout(prepared.plan.graph, self._compiled().plan.graph)
            self._known.own = prepared
            if self.strict:
                check_exact(self.report_of(prepared), self.title)
        self._known.last = prepared
        for state in prepared.unread:
            _ = state.value  # a parameter the step never reads still has a gradient, zero
        window = None if self.vjp_method == "single-step" else (call.length or 1)
        if call.length is None:
            plan_call = self._call(prepared, Arrays(call.leaves, extra=extra or None))
            at, outs = plan_call.one(window)
        else:
            arrays = self._along(call), self._along(besides, call.length)
            extra = jax.tree.unflatten(jax.tree.structure(besides.step), arrays[1])
            plan_call = self._call(prepared, Arrays(arrays[0], extra=extra or None))
            at, outs, _ = plan_call.scan(Options(window))
        self._write(prepared, at, calls=1)
        return jax.tree.unflatten(prepared.info.out_tree, outs)

    @staticmethod
    def _along(call: Call, length: int | None = None) -> tuple[Array, ...]:
        """The arrays of a window; what is the same at every step is repeated."""
        n = call.length or length or 1
        pairs = zip(call.leaves, call.timed, strict=True)
        return tuple(a if t else jax.numpy.broadcast_to(a, (n, *np.shape(a))) for a, t in pairs)

    def _call(
        self, prepared: Prepared, arrays: Arrays, mask: PyTree = None, donate: bool = False
    ) -> PlanCall:
        """An analysed step with the present arrays of its states and traces."""
        info, plan = prepared.info, prepared.plan
        self._allocate(prepared)
        self._look(info)
        states = info.read()
        held, seen = taken([self.etraces[name] for name in prepared.names])
        weights = Weights(list(states.params), states.fixed, tuple(info.consts), self._of_rule())
        of_step = (states.hidden, states.others)
        at = Position(of_step, prepared.traces(held), self.running_index.value)
        return PlanCall(plan, weights, at, Stream(arrays, mask), donate and not seen)

    def _write(self, prepared: Prepared, at: Position, calls: int | None = None) -> None:
        """Store new states and traces; `calls` are counted, None for those that ran."""
        index, count = self.running_index, at.count
        if calls is not None:
            count = jax.lax.stop_gradient(index.value + calls)
        traces = prepared.parts(at.traces)
        more = [*((self.etraces[name], value) for name, value in traces.items()), (index, count)]
        arrays = {"hidden": at.states[0], "others": at.states[1]}
        self._note(prepared, prepared.info.write(arrays, more))

    def map_over(self, samples: int) -> None:
        """Map the model over samples: its states, made so, have one entry for each."""
        mapped = brainstate.nn.Vmap(self.model4compile, vmap_states="new")
        self.samples, self._mapped = samples, lambda *a, **k: mapped(*a, **k)
        states = brainstate.graph.states(self.model4compile).values()
        shapes = lambda s: [np.shape(a)[1:] for a in jax.tree.leaves(s.value)]
        self._known.per_sample = [(s, shapes(s)) for s in states if "new" in (s.tag or ())]

    def _repeat(self) -> None:
        """Give every sample its copy of states that were reset as if there were one sample."""
        for state, shapes in self._known.per_sample:
            leaves, tree = jax.tree.flatten(state.value)
            pairs = zip(leaves, shapes, strict=True)
            every = lambda a: jax.numpy.broadcast_to(a, (self.samples, *np.shape(a)))
            new = [every(a) if np.shape(a) == shape else a for a, shape in pairs]
            state.value = jax.tree.unflatten(tree, new)

    # ---------------------------------------------------------- states that change outside

    def _note(self, prepared: Prepared, plain: bool) -> None:
        """Remember the arrays that states and traces have now, if they are no placeholders."""
        info, known = prepared.info, self._known
        noted: dict[Any, brainstate.State] = {x.path: info.states[x.path] for x in info.step.hidden}
        noted |= {name: self.etraces[name] for name in prepared.names}
        arrays = {key: jax.tree.leaves(state._read_value()) for key, state in noted.items()}
        known.written = (known.written or {}) | arrays if plain else None

    def _look(self, info: ModuleInfo) -> None:
        """Start anew if a state was changed that the traces belong to, and these were not."""
        written = self._known.written or {}

        def others(states: Mapping[Any, brainstate.State]) -> dict[Any, list[Any]]:
            """The arrays of those that hold others than the learner wrote."""
            now = {k: jax.tree.leaves(s._read_value()) for k, s in states.items() if k in written}
            same = lambda k: all(a is b for a, b in zip(now[k], written[k], strict=True))
            return {key: arrays for key, arrays in now.items() if not same(key)}

        if others(self.etraces):
            self._known.written = None
            return
        changed = others({leaf.path: info.states[leaf.path] for leaf in info.step.hidden})
        index = self.running_index.value
        if not changed or any_traced(list(changed.values()), index) or int(index) == 0:
            return
        warn(
            f"the state {', '.join(map(dotted, changed))} was changed outside of the learner.",
            where=self.title,
            why="the traces say how it came about from the weights; they begin anew, at zero",
            do="call learner.reset() between sequences, which resets states and traces; after a "
            "change that the traces shall outlive call learner.keep()",
        )
        self.forget_past()

    def keep(self) -> None:
        """Keep the traces although a state was changed outside of the learner."""
        self._known.written = None

    def forget_past(self) -> None:
        """Zero the traces, so that what comes counts as a new sequence."""
        Learner.reset_state(self)

    def _forgot(self, prepared: Prepared) -> None:
        """The traces of this step are zero: those of others are, too."""
        self._zero(self.etraces.keys() - set(prepared.names))
        self.running_index.value = np.zeros((), np.int32)

    def _zero(self, names: Iterable[str]) -> None:
        for trace in map(self.etraces.__getitem__, names):
            trace.put(jax.tree.map(jax.numpy.zeros_like, trace.take()))

    # ------------------------------------------------------------------------------ placing

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
        placement.check(self._compiled().plan.graph)
        old, self.placement = self.placement, placement
        self._known.traced.clear()
        self._known.own = self._known.last = self._prepared_own(*self._example)
        self._place(old)

    def _place(self, old: Placement | None = None) -> None:
        """Put all arrays where they belong; those of an `old` placement, too."""
        placement = self.placement
        if placement is None or not self.is_compiled:
            return
        own_step = self._compiled()
        info, graph = own_step.info, own_step.plan.graph
        places = {
            "params": placement.params(graph),
            "hidden": placement.states(graph, graph.step.stored),
            "others": placement.states(graph, graph.step.others),
        }
        now = info.read()
        info.write({k: put(getattr(now, k), tuple(at), old) for k, at in places.items()})
        traces = self._held(own_step)
        where = placement.traces(graph, self.rule, traces)
        for name, value in own_step.parts(put(traces, where, old)).items():
            self.etraces[name].put(value)
        if self.optimizer_state is not None:
            own = self.optimizer_state
            params = {p: s.value for p, s in floating(self.param_states).items()}
            own.value = put(own.value, placement.moments(own.value, params), old)

    # ------------------------------------------------------------------------------ resetting

    @alone
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
        self._repeat()
        strengthen(self.model4compile)
        self._place()
        self._known.written = None

    def reset_traces(self) -> None:
        """The traces as they are before the first step."""
        reset: set[str] = set()
        for step in (self._known.own, self._known.last):
            if step is None or not self.etraces.keys() >= set(step.names):  # it never ran
                continue
            traces = step.plan.reset(self._held(step), self.rule)
            for name, value in step.parts(traces).items():
                if name not in reset:
                    self.etraces[name].put(value)
            reset |= set(step.names)
        self._zero(self.etraces.keys() - reset)

    def _held(self, prepared: Prepared) -> list[PyTree]:
        """The present traces of a step."""
        return prepared.traces(taken([self.etraces[name] for name in prepared.names])[0])

    @alone
    def reset(self, batch_size: int | None = None) -> None:
        """Reset the model's states and the traces: do this between sequences."""
        if batch_size is not None and self.batch_size is None:
            raise no_batch()
        check_batch_size(batch_size)
        size = self.batch_size if batch_size is None and self.samples is None else batch_size
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
        self._example = with_batch(self._example, batch_size)
        states = {p: s for p, s in self.path_to_states.items() if p in self._state_shapes}
        with resized_states(states, old, batch_size):
            self.etraces.clear()
            self._compile()
        self.batch_size = batch_size

    # ------------------------------------------------------------------------------ inspecting

    def __repr__(self) -> str:
        name, model = self.title, title_of(self.model4compile)
        if not self.is_compiled:
            return f"{name} of {model}, not compiled"
        options = f"vjp_method={self.vjp_method}, batch_size={self.batch_size}"
        return (
            f"{name} of {model}: {self.config.describe()}, {options}\n"
            f"  {self.report.picture.summary}\n  {self.memory:,} bytes of traces"
        )

    @property
    def memory(self) -> int:
        """Bytes of the traces."""
        leaves = jax.tree.leaves([t.take() for t in self.etraces.values()])
        return sum(a.nbytes for a in leaves)

    @property
    def report(self) -> CompilationReport:
        """How every parameter is learned, in the step that ran last."""
        if self._known.last is None:
            raise not_compiled(f"{self.title} is asked for its report", RuntimeError)
        return self.report_of(self._known.last)

    def report_of(self, prepared: Prepared) -> CompilationReport:
        """The report on one step; a parameter of the model that is not in it is unused."""
        more = [path for path in self.param_states if path not in prepared.info.states]
        report = prepared.plan.report()
        report.parameters.update({path: unused(path) for path in more})
        return report

    def show_graph(self, verbose: bool = True, return_msg: bool = False) -> str | None:
        """Print the compilation report, or return its text."""
        text = self.graph.report.to_str(level=2)
        if verbose and not return_msg:
            print(text)
        return text if return_msg else None

    @property
    def param_states(self) -> Mapping[Path, brainstate.State]:
        """All parameters of the model, by path."""
        return brainstate.graph.states(self.model4compile, brainstate.ParamState)

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The states that carry memory, by path."""
        states = self.path_to_states
        paths = dict.fromkeys(leaf.path for leaf in self._compiled().info.step.hidden)
        return {p: states[p] for p in paths if p in states}

    @property
    def other_states(self) -> dict[Path, brainstate.State]:
        """States that are neither parameters nor memory, by path."""
        named = {*self.hidden_states, *self.param_states.keys()}
        return {p: s for p, s in self.path_to_states.items() if p not in named}

    @property
    def path_to_states(self) -> dict[Path, brainstate.State]:
        return dict(brainstate.graph.states(self.model4compile).items())

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        return {id(s): p for p, s in self.path_to_states.items()}

    def get_etrace_of(self, weight: brainstate.ParamState | Path | str) -> dict[str, PyTree]:
        """The traces of a parameter, by name.

        Args:
            weight: the ParamState, or its path in the model.

        Raises:
            ValueError: no trace is of this parameter.
        """
        if isinstance(weight, brainstate.State):
            path = next((p for p, s in self.path_to_states.items() if s is weight), None)
        else:
            path = (weight,) if isinstance(weight, str) else tuple(weight)
        found = self._traces_by_path()
        traces = {name: trace for name, paths, trace in found if path in paths and trace}
        if not traces:
            traced = {p for _, paths, trace in found if trace for p in paths}
            raise value_error(
                f"{path} has no eligibility trace.",
                why="the report lists the traced weights: "
                + ", ".join(dotted(tuple(p)) for p in sorted(traced, key=str)),
                do="ask for one of these, or see learner.report for the reason",
            )
        return traces


def _store(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    if len(cache) >= most:
        del cache[next(iter(cache))]
    cache[key] = value
