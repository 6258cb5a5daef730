"""A step function as an analysed program."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakKeyDictionary

import jax
from jax.tree_util import PyTreeDef

from .._errors import dotted, message
from ..engine import (
    Engine,
    Placement,
    TimeAxes,
    Values,
    map_steps,
    recorded,
    reset_traces,
    split_traces,
)
from ..graph import (
    CompilationRecord,
    ControlFlowPolicy,
    Graph,
    Leaf,
    Step,
    bits_of,
    reach,
    warn_of_zero_derivatives,
)
from ..ops import compiled as jitted
from ..program import (
    Atom,
    InParts,
    Program,
    PyTree,
    any_traced,
    evaluate,
    failing_line,
    flatten,
    prune,
    trace_of,
    zeros_of,
)
from ..report import CompilationReport, uses_of
from ..rules import LearningRule, Rule, check_calls
from ._advice import Problem, advise, analysed, certified
from ._checks import (
    check_effects,
    check_memory,
    check_noise,
    check_result,
    check_signature,
    check_states,
    state_records,
)
from ._loop import Weights
from ._outside import Outside
from ._start import run_started
from ._tree import Layout

Array = jax.Array
Compiled = MutableMapping[Callable, dict[Hashable, Callable]]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a step is traced for: structures, shapes and types."""

    params: Layout
    state: Layout
    inputs: PyTreeDef
    shapes: tuple[jax.ShapeDtypeStruct, ...]


# (graph, values, axes, what the rule reads, results) -> results with another derivative
Attach = Callable[[Graph, Values, TimeAxes, PyTree, list[Array]], list[Array]]


@dataclass(frozen=True, eq=False, slots=True)
class Passed:
    """What a step computes for its rule, a modulator say: outputs of its program.

    Before the steps of a block are run it is evaluated for all of them; if it reads a state, that
    state must be known, and steps are taken one by one.
    """

    program: Program
    tree: PyTreeDef
    reads_states: bool

    @classmethod
    def of(cls, step: Step, outputs: Sequence[Atom], tree: PyTreeDef) -> Passed | None:
        """These outputs of a step; None for none."""
        if not outputs:
            return None
        program = prune(step.program, outputs)
        states = {step.entry(leaf): 1 for leaf in (*step.hidden, *step.others)}
        read = reach(program, states, differentiable=False)
        return cls(program, tree, any(bits_of(a, read) for a in program.outputs))

    def __call__(
        self, step: Step, weights: Weights, states: PyTree, inputs: Sequence[Array], steps: int
    ) -> PyTree:
        """Its values in a block, with a leading axis of steps."""

        def one(inputs: Sequence[Array]) -> PyTree:
            flat = step.arguments((*inputs, *weights.fixed), weights.trained, *states)
            outs = evaluate(self.program, weights.consts, flat)
            return jax.tree.unflatten(self.tree, jax.lax.stop_gradient(outs))

        return map_steps(steps, one, inputs)


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """A traced and analysed step.

    The arguments of its program are the inputs and the parameters that are not trained. `windows`
    says that sequences are run in windows, `engine` what runs loops over time; `compiled` holds
    functions that were compiled.
    """

    problem: Problem
    graph: Graph
    rule: LearningRule
    out_tree: PyTreeDef
    trace_shapes: list[Array]
    model: str  # the name of the step
    windows: bool = False
    engine: Engine = Engine.AUTO
    placement: Placement | None = None
    signature: Signature | None = None  # of a step of pytrees
    passed: Passed | None = None  # what the step computes for its rule
    attach: Attach | None = None  # changes the derivative of a call's results
    compiled: Compiled = field(default_factory=WeakKeyDictionary)
    trace_names: PyTree = None  # of their parts, for a learner that stores these by name

    @property
    def consts(self) -> tuple[Array, ...]:
        """Values of the constants of the program."""
        return self.problem.consts

    @property
    def reusable(self) -> bool:
        """Whether it may serve later calls: it holds no value of a running transformation."""
        return not any_traced(self.consts)

    def compile(
        self,
        owner: Callable,
        key: Hashable,
        function: Callable,
        donate: int | None = None,
        most: Callable[..., int] | None = None,
    ) -> Callable:
        """`function`, compiled once for equal keys, for as long as its owner is held.

        It may reuse the memory of argument `donate`. Under `vmap` it is evaluated for `most`
        samples at once, which follows from its arguments.
        """
        compiled = self.compiled.setdefault(owner, {})
        if key not in compiled:
            run = recorded(function, self.engine, self.placement)
            call = jitted(run, self.graph.structures, donate)
            alone = jax.default_backend() == "cpu" and jax.device_count() == 1
            compiled[key] = InParts(call, most) if most is not None and alone else call
        return compiled[key]

    def report(self) -> CompilationReport:
        """How every parameter is learned."""
        graph = self.graph
        others = [leaf.path for leaf in graph.step.others]
        parameters = certified(graph, self.rule, self.trace_shapes, self.windows)
        pairs = zip(graph.parts, self.rule.record.parts, strict=True)
        each = [(part, p.rule) for part, p in pairs] or [(graph, self.rule.record)]
        uses = [use for part, record in each for use in uses_of(part, record.per_parameter)]
        relations = [r for part, _ in each for r in part.relations]
        records = [] if self.placement is None else self.placement.records(graph)
        records = [*_records(graph), *records]
        about = (graph.groups, relations, records, others, parameters, uses)
        advice = partial(advise, self.problem, self.rule)
        last = (self.rule.name, advice, self.model, graph.memory)
        return CompilationReport(*about, *last)

    def zeros(self) -> list[Array]:
        """Traces before the first step."""
        if self.placement is None:
            return zeros_of(self.trace_shapes)
        return zeros_of(self.trace_shapes, self.trace_places)

    @property
    def trace_places(self) -> list[PyTree]:
        """Where the traces lie, on a mesh."""
        assert self.placement is not None
        return self.placement.traces(self.graph, self.rule.record, self.trace_shapes)

    def reset(self, traces: list[PyTree], record: Rule) -> list[PyTree]:
        """Traces between sequences; `record` are the functions that are run."""
        return reset_traces(record, self.graph, traces)

    def check_call(self, extra: Mapping[str, PyTree]) -> None:
        """Refuse a call that does not give the rule what it needs."""
        check_calls(self.rule, [g.groups for g in self.graph.parts or (self.graph,)], extra)


def _failed(step: Callable, cause: Exception, state: PyTree, inputs: PyTree) -> str:
    """The note on an error of the user's own step."""
    shown = lambda tree: ", ".join(f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(tree))
    return message(
        f"the step could not be traced on inputs {shown(inputs)}.",
        where=failing_line(cause),
        why=f"it raised the error above, in step(params, state, *inputs); the state is "
        f"{shown(state)}",
        do="fix the step at this line; if shapes do not fit, compare the inputs of this call with "
        "those of init, which takes one step: xs[0], not xs",
    )


def make_plan(
    outside: Outside,
    rule: LearningRule,
    signature: Signature,
    policy: ControlFlowPolicy | None,
    memory_limit: int | None,
    windows: bool,
    unmarked: bool,
    engine: Engine,
    placement: Placement | None,
) -> Plan:
    """Trace a step for a signature and analyse it."""
    step = outside.step
    traced = _traced(step, signature)
    consts = outside.closed_over(traced.consts, step)
    problem = Problem(traced.step, consts, policy, unmarked)
    records, last = state_records(traced.step), (windows, engine, placement)
    about = (traced.out_tree, name_of(step), memory_limit)
    return replace(plan_of(problem, rule, records, *about, *last), signature=signature)


def plan_of(
    problem: Problem,
    rule: LearningRule,
    records: Sequence[CompilationRecord],
    out_tree: PyTreeDef,
    name: str,
    memory_limit: int | None,
    windows: bool,
    engine: Engine,
    placement: Placement | None,
    do: str | None = None,
) -> Plan:
    """Analyse a traced step; `do` is what to do about traces that are too large."""
    graph, shapes = analysed(problem, rule, records, windows)
    warn_of_zero_derivatives(graph)
    limit = rule.memory_limit if memory_limit is None else memory_limit
    said = () if do is None else (do,)
    check_memory(limit, graph, shapes, rule.name, *said)
    split = split_traces([s.rule.record for s in rule.shares], graph, shapes)
    for s, part, of in zip(rule.shares, graph.parts, split, strict=True):
        own = s.rule.memory_limit if memory_limit is None else None
        check_memory(own, part, of, s.rule.name, *said)
    if placement is not None:
        placement.check(graph)
    return Plan(problem, graph, rule, out_tree, shapes, name, windows, engine, placement)


def _records(graph: Graph) -> list[CompilationRecord]:
    """What the analysis noted; in a mixture of each parameter by its own rule."""
    if not graph.parts:
        return list(graph.records)
    out = []
    for part in graph.parts:
        own = {leaf.path for i, leaf in enumerate(graph.step.params) if part.owns(i)}
        of_states = part is graph.parts[-1]
        out += [
            d for d in part.records if d.weight_path in own or (of_states and d.weight_path is None)
        ]
    return out


@dataclass(frozen=True, eq=False, slots=True)
class _Traced:
    """A step as a program, with the constants and the structure of its output."""

    step: Step
    consts: tuple[Array, ...]
    out_tree: PyTreeDef


def _traced(step: Callable[..., PyTree], signature: Signature) -> _Traced:
    params, state = signature.params, signature.state
    n_inputs = signature.inputs.num_leaves
    sizes = (n_inputs, len(params.arrays), len(params.trained), len(state.trained))
    check_signature(step, len(signature.inputs.children()), len(params.trained))
    trees: list[PyTreeDef] = []
    traces: list[Callable] = []

    def flat(*leaves: PyTree) -> list[Array]:
        traces.append(trace_of(leaves[0]))
        inputs, fixed, trained, hidden, others = _cut(leaves, sizes)
        arguments = jax.tree.unflatten(signature.inputs, inputs)
        try:
            joined = params.join(trained, fixed), state.join(hidden, others)
            result = run_started(step, *joined, tuple(arguments))
        except Exception as cause:
            cause.add_note(_failed(step, cause, hidden, arguments))
            raise
        after, out = check_result(result, state)
        trees.append(jax.tree.structure(out))
        return [*jax.tree.leaves(out), *(after[i] for i in (*state.trained, *state.arrays))]

    program, consts = flatten(jax.make_jaxpr(flat)(*signature.shapes))
    check_effects(traces[-1])
    program = prune(program)
    check_noise(program)
    out_tree = trees[-1]
    first, n_outs = n_inputs + len(params.arrays), out_tree.num_leaves
    leaf_of = lambda path, at, out: Leaf(path, 0, at, out)
    names, states = params.paths("params"), state.paths("state")
    trained = tuple(leaf_of(names[k], first + i, -1) for i, k in enumerate(params.trained))
    start = first + len(trained)
    order = (*state.trained, *state.arrays)
    leaves_of_state = tuple(leaf_of(states[k], start + i, n_outs + i) for i, k in enumerate(order))
    hidden, others = leaves_of_state[: len(state.trained)], leaves_of_state[len(state.trained) :]
    traced = Step(program, first, n_outs, trained, hidden, others, fixed=len(params.arrays))
    check_states(
        [dotted(leaf.path) for leaf in leaves_of_state],
        [traced.entry(leaf) for leaf in leaves_of_state],
        [traced.exit(leaf) for leaf in leaves_of_state],
    )
    return _Traced(traced, tuple(consts), out_tree)


def name_of(step: Callable[..., PyTree]) -> str:
    """What a step is called in reports and warnings."""
    return getattr(step, "__name__", type(step).__name__)


def _cut(items: Sequence[Array], sizes: Sequence[int]) -> list[Sequence[Array]]:
    """Consecutive slices of these sizes, and the rest."""
    out, at = [], 0
    for n in sizes:
        out.append(items[at : at + n])
        at += n
    return [*out, items[at:]]
