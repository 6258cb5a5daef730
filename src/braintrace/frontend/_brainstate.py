"""The brainstate front end: a module's `update` as a step with named slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u
from jax.tree_util import PyTreeDef

from .._errors import (
    OWN_CELL,
    NotSupportedError,
    dotted,
    message,
    not_supported,
    type_error,
    value_error,
)
from .._published import published
from ..graph import (
    CompilationRecord,
    ControlFlowPolicy,
    DiagnosticKind,
    DiagnosticLevel,
    Leaf,
    Path,
    Step,
    check_policy,
)
from ..program import (
    Program,
    PyTree,
    Tracer,
    Var,
    any_traced,
    failing_line,
    flatten,
    hide_frames_of,
    is_inexact,
    is_of_outer_trace,
    prune,
)
from ._names import named_states
from ._step_function import StepFunction, title_of
from ._traces import EligibilityTrace

State: TypeAlias = brainstate.State
States = Mapping[Path, State]

hide_frames_of(brainstate)
hide_frames_of(u)


class StateArrays(NamedTuple):
    """The arrays of the states of a step; `fixed` are parameters that are not trained."""

    params: tuple[jax.Array, ...]
    hidden: tuple[jax.Array, ...]
    others: tuple[jax.Array, ...]
    fixed: tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ModuleInfo:
    """One traced call of a model.

    `states` are the states the call touched, by path; `records` the diagnostics of the trace;
    `stateful_model` brainstate's own record of the call.
    """

    model: brainstate.nn.Module
    step: Step
    consts: tuple[jax.Array, ...]
    states: States
    arg_tree: PyTreeDef
    out_tree: PyTreeDef
    records: tuple[CompilationRecord, ...]
    stateful_model: brainstate.nn.Module
    control_flow: ControlFlowPolicy | None = None
    fixed: tuple[tuple[Path, int], ...] = ()  # arrays of parameters that are last arguments

    def __getattr__(self, name: str) -> Any:
        return published(self, name)

    @property
    def state_id_to_path(self) -> dict[int, Path]:
        """The path of every state that the call touched."""
        return {id(state): path for path, state in self.states.items()}

    def read(self) -> StateArrays:
        """The present arrays of all states of the step.

        Raises:
            NotSupportedError: this is inside of a transformation that does not know the states.
        """
        flat: dict[Path, list[jax.Array]] = {}

        def at(path: Path, index: int) -> jax.Array:
            if path not in flat:
                flat[path] = jax.tree.leaves(self.states[path].value)
            return flat[path][index]

        kinds = (self.step.params, self.step.hidden, self.step.others)
        found = (tuple(at(leaf.path, leaf.index) for leaf in leaves) for leaves in kinds)
        params, hidden, others = found
        check_surrounding_trace(hidden)
        return StateArrays(params, hidden, others, tuple(at(*place) for place in self.fixed))

    def trained(self, states: Collection[int]) -> ModuleInfo:
        """The same with floating arrays of these states as parameters, by id; others arguments."""
        step = self.step
        mine = lambda leaf: id(self.states[leaf.path]) in states and step.entry(leaf).is_inexact
        params = [leaf for leaf in step.params if mine(leaf)]
        fixed = [leaf for leaf in step.params if not mine(leaf)]
        if not fixed:
            return self
        n, total = step.n_args, len(step.program.inputs)
        last = {leaf.position for leaf in fixed}
        order = [*range(n), *sorted(last), *(i for i in range(n, total) if i not in last)]
        new = {old: i for i, old in enumerate(order)}
        moved = lambda leaves: tuple(replace(a, position=new[a.position]) for a in leaves)
        program = replace(step.program, inputs=tuple(step.program.inputs[i] for i in order))
        fixed.sort(key=lambda leaf: leaf.position)
        return replace(
            self,
            step=Step(
                program,
                n + len(fixed),
                step.n_outs,
                moved(params),
                moved(step.hidden),
                moved(step.others),
                fixed=len(fixed),
            ),
            fixed=tuple((leaf.path, leaf.index) for leaf in fixed),
        )

    def of_model(self, model: brainstate.nn.Module) -> ModuleInfo:
        """The same of a copy of the model."""
        copies = brainstate.graph.states(model)
        states = {path: copies.get(path, state) for path, state in self.states.items()}
        return replace(self, model=model, states=states)

    def write(
        self, arrays: Mapping[str, Sequence[jax.Array]], more: Sequence[tuple[State, PyTree]] = ()
    ) -> bool:
        """Store new arrays of `params`, `hidden` or `others`, and values of other states: all or
        nothing. Returns whether none of them is traced.
        """
        places = [
            (self.states[leaf.path], leaf.index, array)
            for kind, new in arrays.items()
            for leaf, array in zip(getattr(self.step, kind), new, strict=True)
        ]
        return assign([*in_states(places), *more])


def in_states(places: Iterable[tuple[State, int, jax.Array]]) -> list[tuple[State, PyTree]]:
    """New values of states, from arrays at indices among the leaves of their values."""
    new: dict[int, tuple[State, list[jax.Array], PyTreeDef]] = {}
    for state, index, array in places:
        if id(state) not in new:
            new[id(state)] = (state, *jax.tree.flatten(state.value))
        new[id(state)][1][index] = array
    return [(state, tree.unflatten(flat)) for state, flat, tree in new.values()]


def assign(values: Sequence[tuple[State, PyTree]]) -> bool:
    """Give states new values, all or none of them; returns whether none is traced.

    Outside of its own transformations brainstate refuses to store a value that JAX traces: those
    come first, so that nothing is changed when one is refused.
    """
    plain = not any_traced([value for _, value in values])
    try:
        for state, value in values if plain else sorted(values, key=_is_plain):
            if isinstance(state, EligibilityTrace):
                state.put(value)
            else:
                state.value = value
    except getattr(brainstate, "TraceContextError", ()) as error:
        raise inside_of_jax() from error
    return plain


def _is_plain(write: tuple[State, PyTree]) -> bool:
    return not any_traced(write[1])


def floating(params: States) -> dict[Path, State]:
    """The parameters that have a gradient; counters and indices do not."""
    inexact = lambda a: jnp.issubdtype(jnp.result_type(a), jnp.inexact)
    return {p: s for p, s in params.items() if all(map(inexact, jax.tree.leaves(s.value)))}


def check_surrounding_trace(arrays: Sequence[Any]) -> None:
    """Refuse a transformation around a call that does not know the states, which it has traced."""
    traced = [a for a in arrays if isinstance(a, Tracer)]
    if traced and all(map(is_of_outer_trace, traced)):
        raise inside_of_jax()


def inside_of_jax() -> Exception:
    """The error of a call inside of a transformation that does not know the states."""
    return not_supported(
        "the learner is called inside of a transformation of JAX.",
        why="its states and traces change with every call, and jax.jit, jax.vmap, jax.grad, "
        "jax.checkpoint and jax.lax.scan do not know them",
        do="use the versions in brainstate.transform: jit, vmap, grad, checkpoint, scan; or "
        "braintrace.online, whose learners have no states",
    )


def extract_module_info(
    model: brainstate.nn.Module,
    *args: PyTree,
    control_flow: ControlFlowPolicy | None = None,
    called: Callable[..., PyTree] | None = None,
    **kwargs: PyTree,
) -> ModuleInfo:
    """Trace one call of a model and sort its states into parameters, hidden states and others.

    Args:
        model: a module with initialised states.
        *args: arguments of one step.
        control_flow: which control flow the analysis leaves alone, none by default.
        called: what is called, if it is not the model: the model mapped over samples.
        **kwargs: keyword arguments of one step.

    Raises:
        TypeError: `model` is not a brainstate module, or `control_flow` no policy.
        NotSupportedError: the step writes a parameter.
        ValueError: a state leaves the step with another shape, type or unit.
    """
    check_module(model)
    check_policy(control_flow)
    if isinstance(model, StepFunction):
        model.check_arguments(args, kwargs)
    info = step_info(called or model, model, args, kwargs, control_flow=control_flow)
    return replace(info, records=(*info.records, *_unused(named_states(model), info.states)))


def check_module(model: Any) -> None:
    """Refuse a model that is no module."""
    if not isinstance(model, brainstate.nn.Module):
        raise type_error(
            f"expected a brainstate.nn.Module, got {type(model).__name__}.",
            why="the `update` of a module is one step, whose states are named by their paths in it",
            do="write one step of the network in the `update` of such a module, or give a "
            f"function to braintrace.compile; {OWN_CELL}",
        )


def step_info(
    function: Callable[..., PyTree],
    model: brainstate.nn.Module,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    names: Mapping[int, Path] | None = None,
    control_flow: ControlFlowPolicy | None = None,
) -> ModuleInfo:
    """Trace a call of a model, or of a function around it, with the states that it touches.

    Args:
        function: what is called.
        model: states are named by their paths in it.
        args: arguments.
        kwargs: keyword arguments.
        names: what other states are called, by id; None for a call of the model alone.
        control_flow: what the analysis leaves alone.

    Raises:
        NotSupportedError: the function writes a parameter.
        ValueError: a state leaves it with another shape, type or unit.
    """
    records: list[CompilationRecord] = []
    lines: list[str | None] = []
    structures = {p: jax.tree.structure(s.value) for p, s in named_states(model).items()}

    def call(*a, **k):
        try:
            out = function(*a, **k)
            _check_structure(model, structures)
            return out
        except Exception as error:
            lines.append(failing_line(error))  # further out JAX drops frames
            raise

    stateful = brainstate.transform.StatefulFunction(call, return_only_write=False)
    try:
        stateful.make_jaxpr(*args, **kwargs)
    except Exception as error:
        if names is None:
            error.add_note(_failed(model, args, kwargs, next(iter(lines), None)))
        raise
    key = stateful.get_arg_cache_key(*args, **kwargs)
    trace = stateful.get_state_trace_by_cache(key)
    out_shapes, _ = stateful.get_out_shapes_by_cache(key)
    program, consts = flatten(stateful.get_jaxpr_by_cache(key))
    program = prune(program)

    if names is None and isinstance(model, StepFunction):
        model.add(trace.states)
    paths = {**(names or {}), **{id(s): path for path, s in named_states(model).items()}}
    states: dict[Path, brainstate.State] = {}
    for i, state in enumerate(trace.states):
        path = paths.get(id(state))
        if path is None:
            kind = "_unknown_path" if names is None else type(state).__name__
            path = (f"{kind}_{i}",)
            records += [_mismatch(state, path)] if names is None else []
        states[path] = state
    args_flat, arg_tree = jax.tree.flatten((args, kwargs))
    step = _sort(program, states, trace.been_writen, len(args_flat), out_shapes)
    return ModuleInfo(
        model,
        step,
        consts,
        states,
        arg_tree,
        jax.tree.structure(out_shapes),
        tuple(records),
        stateful,
        control_flow,
    )


def _check_structure(model: brainstate.nn.Module, structures: Mapping[Path, PyTreeDef]) -> None:
    """Refuse a state that took another unit or structure during the step."""
    for path, state in brainstate.graph.states(model).items():
        old, new = structures.get(path), state._read_value()  # `value` would count as a use
        if old is None or jax.tree.structure(new) == old:
            continue
        before, after = _describe_tree(old), _describe(new)
        leaves = jax.tree.leaves(new)[:1] * old.num_leaves
        state.value = jax.tree.unflatten(old, leaves)  # else brainstate cannot undo the trace
        named = next(p for p in structures if p == path)
        raise value_error(
            f"state {dotted(named)} is {before} before the step and {after} after it.",
            where=_defined_at(model),
            why="a state must keep its unit and structure from step to step",
            do="convert the new value before you assign it",
        )


def _defined_at(model: brainstate.nn.Module) -> str | None:
    if isinstance(model, StepFunction):
        return model.line
    code = getattr(type(model), "update", type(model).__call__).__code__
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"


def _describe_tree(tree: PyTreeDef) -> str:
    return _describe(jax.tree.unflatten(tree, [jnp.zeros(())] * tree.num_leaves))


def _failed(model: brainstate.nn.Module, args: PyTree, kwargs: PyTree, where: str | None) -> str:
    """The note on an error of the user's own `update`."""
    code = "it" if isinstance(model, StepFunction) else "`update`"
    states = {
        path: state
        for path, state in named_states(model).items()
        if not isinstance(state, brainstate.ParamState)
    }
    listed = ", ".join(f"{dotted(p)} {_describe(s.value)}" for p, s in states.items())
    states_now = listed or "none: the states are not initialised"
    return message(
        f"{title_of(model)} could not be traced on inputs {_describe((args, kwargs))}.",
        where=where,
        why=f"{code} raised the error above; the model's states are {states_now}",
        do=f"fix {code} at this line; if shapes do not fit, pass the inputs of one step (xs[0], "
        "not xs), and give states the batch size of the inputs: braintrace.compile(..., "
        "batch_size=...) or brainstate.nn.init_all_states(model, batch_size=...)",
    )


def _sort(
    program: Program,
    states: States,
    written: list[bool],
    n_args: int,
    out_shapes: PyTree,
) -> Step:
    n_outs = len(jax.tree.leaves(out_shapes))
    read = {a for eqn in program.equations for a in eqn.inputs if isinstance(a, Var)}
    params: list[Leaf] = []
    hidden: list[Leaf] = []
    others: list[Leaf] = []
    position, output = n_args, n_outs
    for (path, state), changed in zip(states.items(), written, strict=True):
        count = len(jax.tree.leaves(state.value))
        is_param = isinstance(state, brainstate.ParamState)
        if is_param and changed:
            raise NotSupportedError(_written_parameter(path, program, output))
        if changed:
            _check_kept(path, state, program, position, output)
        for i in range(count):
            var = program.inputs[position + i]
            exits = [o for k, o in enumerate(program.outputs) if k != output + i]
            is_read = var in read or any(o is var for o in exits)
            recurrent = isinstance(state, brainstate.HiddenState) or is_read
            channels = isinstance(state, brainstate.HiddenGroupState)
            leaf = Leaf(path, i, position + i, output + i, channels)
            if is_param:
                params.append(leaf)
            elif changed and recurrent and is_inexact(var.dtype):
                hidden.append(leaf)
            else:
                others.append(leaf)
        position += count
        output += count
    return Step(program, n_args, n_outs, tuple(params), tuple(hidden), tuple(others))


def _where(program: Program, output: int) -> str | None:
    atom = program.outputs[output]
    return next((e.where() for e in program.equations if atom in e.outputs), None)


def _written_parameter(path: Path, program: Program, output: int) -> str:
    return message(
        f"the step writes the parameter {dotted(path)}.",
        where=_where(program, output),
        why="weights must stay constant while a trace is built; a weight that changes inside the "
        "step is a state",
        do="keep it in a brainstate.HiddenState, or update the parameter outside `update`",
    )


def _check_kept(
    path: Path, state: brainstate.State, program: Program, position: int, output: int
) -> None:
    for i in range(len(jax.tree.leaves(state.value))):
        before, after = program.inputs[position + i], program.outputs[output + i]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise value_error(
                f"state {dotted(path)} enters the step as {before.dtype}{list(before.shape)} "
                f"and leaves it as {after.dtype}{list(after.shape)}.",
                where=_where(program, output + i),
                why="a state must keep its shape and type from step to step; a missing or "
                "extra batch axis is the usual cause",
                do="initialise the state with the shape and type of its new value (for a "
                "batch: brainstate.nn.init_all_states(model, batch_size=...))",
            )


def _describe(value: PyTree) -> str:
    parts = []
    for x in jax.tree.leaves(value, is_leaf=lambda v: isinstance(v, u.Quantity)):
        unit = f" in {x.unit}" if isinstance(x, u.Quantity) else ""
        is_array = hasattr(x, "dtype") and hasattr(x, "shape")
        parts.append(f"{x.dtype}{list(x.shape)}{unit}" if is_array else repr(x))
    more = f" and {len(parts) - 12} more" if len(parts) > 12 else ""
    return ", ".join(parts[:12]) + more


def _mismatch(state: brainstate.State, path: Path) -> CompilationRecord:
    return CompilationRecord(
        DiagnosticKind.STATE_MISMATCH,
        DiagnosticLevel.INFO,
        f"the step touches a {type(state).__name__} that is not an attribute of the model "
        f"(random number generators usually are not); it is called {path[0]} here.",
    )


def _unused(every: States, states: States) -> list[CompilationRecord]:
    return [
        CompilationRecord(
            DiagnosticKind.PARAMETER_UNUSED,
            DiagnosticLevel.WARNING,
            f"parameter {dotted(path)} is never read by the step; its gradient is zero, or "
            "that of single steps if a step function uses it outside the learner call.",
            weight_path=path,
        )
        if isinstance(state, brainstate.ParamState)
        else CompilationRecord(
            DiagnosticKind.STATE_MISMATCH,
            DiagnosticLevel.INFO,
            f"state {dotted(path)} is never touched by the step.",
        )
        for path, state in every.items()
        if path not in states
    ]
