"""A function of states as an analysed step: the model alone, or the user's function around it.

While a user's step function is traced, a learner that it calls calls its model, so that all of the
function is one step: encoder, read-out, states of its own, noise, whatever transformations there
are around the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import CompilationError, message, type_error, value_error
from .._online import Passed, Plan
from ..frontend import ModuleInfo, models_of, states_named, step_info
from ..graph import Path
from ..program import PyTree
from ._data import Call
from ._weights import Differentiated

# Its value has another structure while a step function is traced, so that a call of a learner
# inside of a compiled function is traced again.
MODE = brainstate.State(())
_RUNNING: list[Stepping] = []


@dataclass(frozen=True, eq=False)
class Prepared:
    """A traced function of states, its analysed step, and what is differentiated.

    Attributes:
        info: the function.
        plan: its step.
        of: the weights; of the model's own step all parameters.
        unread: states of these that the step does not touch.
        holds: what its key refers to by identity.
    """

    info: ModuleInfo
    plan: Plan
    of: Differentiated
    unread: tuple[brainstate.State, ...] = ()
    holds: list[Any] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of the parts of its traces, see `parts`."""
        return jax.tree.leaves(self.plan.trace_names)

    def parts(self, traces: list[PyTree]) -> dict[str, PyTree]:
        """The parts of traces by name; `traces` is the inverse."""
        tree: Any = jax.tree.structure(self.plan.trace_names)
        return dict(zip(self.names, tree.flatten_up_to(traces), strict=True))

    def traces(self, parts: Sequence[PyTree]) -> list[PyTree]:
        """The traces of which these are the parts, in the order of the names."""
        return jax.tree.unflatten(jax.tree.structure(self.plan.trace_names), parts)


@dataclass(eq=False, slots=True)
class Stepping:
    """A step function that is being traced, and what is noted of the calls in it.

    Attributes:
        learner: whose step it is.
        given: in windows, results of the learner's calls in place of the model's, in order.
        extra: what a call passes to the rule.
        results: what calls returned.
    """

    learner: Any
    given: list[PyTree] | None = None
    extra: dict[str, PyTree] = field(default_factory=dict)
    results: list[PyTree] = field(default_factory=list)

    def __enter__(self) -> Stepping:
        _RUNNING.append(self)
        MODE.value = (MODE.value,)
        return self

    def __exit__(self, *error: Any) -> None:
        _RUNNING.pop()
        (MODE.value,) = MODE.value

    def call(self, learner: Any, model: Callable, call: Call, extra: dict[str, PyTree]) -> PyTree:
        """A call of a learner in the function."""
        if learner is not self.learner:
            return _modelled(model, call)
        if extra and self.extra:
            raise value_error(
                f"step_fn passes {', '.join(extra)} to the rule twice.",
                why="the rule takes one for each step",
                do="call the learner once with it in step_fn",
            )
        self.extra = self.extra or extra
        if self.given is not None:
            out = self.given[len(self.results)]
        else:
            out = _modelled(model, call)
        self.results.append(out)
        return out


def stepping(mark: brainstate.State) -> Stepping | None:
    """The step function that is being traced; `mark` is that of the learner that asks."""
    _ = MODE.value, mark.value  # what was traced under another mode is stale
    return _RUNNING[-1] if _RUNNING else None


def _modelled(model: Callable[..., PyTree], call: Call) -> PyTree:
    """The model's results: of one step, or of a window, stacked."""
    if call.length is None:
        args, kwargs = call.step
        return model(*args, **kwargs)
    leaves, tree = call.leaves, jax.tree.structure(call.step)
    timed = [a for a, t in zip(leaves, call.timed, strict=True) if t]

    def one(*now: PyTree) -> PyTree:
        rest = iter(now)
        flat = [next(rest) if t else a for a, t in zip(leaves, call.timed, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, flat)
        return model(*args, **kwargs)

    if call.length == 1:
        return jax.tree.map(lambda a: jnp.asarray(a)[None], one(*(a[0] for a in timed)))
    return brainstate.transform.for_loop(one, *timed)


def prepared_step(
    learner: Any,
    step_fn: Callable[..., PyTree],
    slices: tuple[PyTree, ...],
    finish: Callable[[PyTree], PyTree],
    weights: Mapping[Path, brainstate.State],
    window: bool,
) -> ModuleInfo:
    """Trace a step function on one step: it returns `finish` of what the function does.

    In windows it is traced on windows of one step, and what is noted of calls is returned too.
    """

    def function(*slices: PyTree) -> PyTree:
        if window:
            slices = jax.tree.map(lambda a: jnp.asarray(a)[None], slices)
        # step_fn = lambda x: loss(readout(learner(encoder(x)))): while it runs here, `learner`
        # finds `noted` running and calls its model, so that the trace is
        # loss(readout(model(encoder(x)))).
        with Stepping(learner) as noted:
            out = finish(step_fn(*slices))
        results = [jax.tree.map(lambda a: a[0], r) for r in noted.results] if window else []
        return out, results, noted.extra

    names = _names(learner, step_fn, weights)
    info = step_info(function, learner.model4compile, slices, {}, names)
    _check_private(learner, info)
    _check_called(learner, info)
    return info


def _check_called(learner: Any, info: ModuleInfo) -> None:
    """Refuse a step function that does not call its learner."""
    if not any(state is learner._known.mark for state in info.states.values()):
        raise value_error(
            "step_fn does not call the learner.",
            why="without it no trace is used: the model alone gives the gradient of one step",
            do="call this learner in it, `learner(x)` in place of `model(x)`; after compiling "
            "again, as when a notebook's cell runs twice, define step_fn again too",
        )


def _names(
    learner: Any, step_fn: Callable, weights: Mapping[Path, brainstate.State]
) -> dict[int, Path]:
    """What states of a step function that are not the model's are called, by id."""
    names: dict[int, Path] = {}
    taken = set(learner.path_to_states)
    found = states_named(models_of(step_fn))
    for path, state in (*((p, s) for p, s in weights.items()), *found.items()):
        path = path if path not in taken else ("step_fn", *path)
        if id(state) not in names:
            names[id(state)] = path
            taken.add(path)
    return names


def _check_private(learner: Any, info: ModuleInfo) -> None:
    """Refuse a step function that reads or writes what belongs to a learner."""
    private = {id(s) for s in (*learner.etraces.values(), learner.running_index)}
    if any(id(state) in private for state in info.states.values()):
        raise type_error(
            "step_fn reads or writes the learner's own states: its traces, or its count of steps.",
            why="the traces of a step are advanced when the whole of it is known, in blocks of "
            "steps; inside of it they do not exist",
            do="return what you need as aux (has_aux=True), read the traces between sequences, and "
            "reset with learner.reset() between them; a transformation that is given the learner "
            "reads its states: give it a function, for_loop(lambda x: learner(x), xs)",
        )


def passed(info: ModuleInfo) -> Passed | None:
    """What a step function passes to its rule."""
    outs = jax.tree.unflatten(info.out_tree, info.step.program.outputs[: info.step.n_outs])
    atoms, tree = jax.tree.flatten(outs[2])
    return Passed.of(info.step, atoms, tree)


def window_results(
    learner: Any,
    function: Callable[..., PyTree],
    results: list[PyTree],
    slices: tuple[PyTree, ...],
    weights: Mapping[Path, brainstate.State],
) -> ModuleInfo:
    """Trace what a step function returns for a whole window, given the results of its calls."""

    def of_window(given: list[PyTree], slices: tuple[PyTree, ...]) -> PyTree:
        with Stepping(learner, given):
            return function(*slices)

    names = _names(learner, function, weights)
    info = step_info(of_window, learner.model4compile, (results, slices), {}, names)
    if info.step.hidden or any(
        info.step.exit(leaf) is not info.step.entry(leaf) for leaf in info.step.others
    ):
        raise CompilationError(
            message(
                "step_fn keeps states of its own in windows, and returns what depends on them.",
                why="what it returns for a window is computed from the results of its steps",
                do="return it as an output of the model, or take single steps (chunk_size=1)",
            )
        )
    return info
