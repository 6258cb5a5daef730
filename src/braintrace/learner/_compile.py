"""From a model to a ready learner in one call."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax

from .._errors import (
    dotted,
    meant,
    not_supported,
    refuse_pytorch,
    type_error,
    value_error,
)
from .._published import part
from ..engine import Engine, Placement, check_engine, check_placement
from ..frontend import StepFunction
from ..program import PyTree
from ..rules import BY_NAME, ETraceConfig, LearningRule, check_count, check_options, rule_value
from ._checks import check_exact
from ._learner import Learner
from ._nnx import ModuleLearner, is_nnx
from ._reset import check_batch_size


def compile(
    model: Callable[..., PyTree],
    algorithm: str | LearningRule | ETraceConfig | type[Learner] | Mapping[str, Any],
    *example_inputs: PyTree,
    batch_size: int | None = None,
    seed: int | None = None,
    verbose: int = 0,
    vmap: bool = False,
    window: int | None = None,
    strict: bool = False,
    unmarked: bool = False,
    engine: str = "auto",
    mesh: jax.sharding.Mesh | None = None,
    batch: str | None = None,
    units: str | None = None,
    kwargs: Mapping[str, PyTree] | None = None,
    **options: Any,
) -> Learner | ModuleLearner:
    """Initialise a model's states and turn it into an online learner.

    The step is the `update` of a module, or a function that calls modules, such as encoder, network
    and read-out; all of it is analysed. The modules and states that the function refers to
    (variables, bound arguments, functions it calls) are initialised and reset with the learner;
    `learner.model4compile` is a module that holds them by their names.

    Args:
        model: the network, one step in `update`; or a function of the inputs; or a module of flax's
            nnx, one step in `__call__`, with its states as Variables: then plain JAX is always
            recognised, and `batch_size`, `seed`, `vmap` and `kwargs` do not apply.
        algorithm: a rule by name ('d_rtrl', 'pp_prop', ...), as a value
            (`braintrace.rules.d_rtrl()`), by its coordinates or by class; or a dict of rules for
            names of parameters, see `online`.
        *example_inputs: arguments of one step; only shapes and types matter, so
            `jax.ShapeDtypeStruct`s will do.
        batch_size: number of samples; states get a batch axis of this size.
        seed: seed of the state initialisation.
        verbose: 1 prints the report, 2 adds warnings.
        vmap: compile for one sample and map over the batch axis of the inputs.
        window: steps in which nothing is cut, for sequences: `vjp_method='multi-step'`, and the
            `chunk_size` of `etrace_grad` and `etrace_train`; None takes single steps.
        strict: refuse a model with a parameter whose gradient is not exact, naming all of them.
        unmarked: recognise plain JAX (`x @ w`, `h * a`, a convolution) as operators; by default
            only operators of braintrace are followed.
        engine: what runs loops over time, 'auto', 'scan' or 'kernel', see `online`.
        mesh: devices to spread the learner over, see `learner.shard`.
        batch: the axis of the mesh that samples are split over.
        units: the axis of the mesh that units are split over.
        kwargs: keyword arguments of one step, examples like the inputs.
        **options: arguments of the rule; for a module of nnx those of `braintrace.online`.

    Returns:
        The learner, an `ETraceVmap` when `vmap` is set, a `ModuleLearner` of a module of nnx.

    Raises:
        ValueError: unknown rule name, missing inputs or batch size, bad options.
        TypeError: `algorithm` is not a rule, `model` neither module nor function, or an option is
            unknown.
        CompilationError: no weight can be learned online, or with `strict` not all exactly.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(cell, 'd_rtrl', jnp.zeros((2, 3)), batch_size=2)
        >>> learner(jnp.ones((2, 3))).shape
        (2, 4)
        >>> readout = braintrace.nn.Linear(4, 1)
        >>> whole = braintrace.compile(lambda x: readout(cell(x)), 'd_rtrl', jnp.zeros(3))
        >>> list(whole.param_states)[-1]
        ('readout', 'weight')
    """
    refuse_pytorch(model, "model")
    if not example_inputs:
        raise value_error(
            "no example inputs.",
            why="the model is traced on the arguments of one step",
            do="pass them: braintrace.compile(model, rule, x0)",
        )
    if isinstance(verbose, bool) or verbose not in (0, 1, 2):
        raise value_error(
            f"verbose={verbose!r}.", why="the levels are 0, 1, 2", do="choose one of them"
        )
    learner: Any
    row = BY_NAME.get(algorithm.strip().lower()) if isinstance(algorithm, str) else None
    if isinstance(algorithm, Mapping):
        algorithm = rule_value(algorithm, {}, window)
    elif row is not None and row.make is not None and window is not None:
        if "window" in inspect.signature(row.make).parameters:  # the rule has one of its own
            options, window = {"window": window, **options}, None
    if isinstance(algorithm, LearningRule) and algorithm.window is not None:
        window = algorithm.window if algorithm.record.replay is None else None
    if is_nnx(model):
        _check_not_given(batch_size=batch_size, seed=seed, vmap=vmap or None, kwargs=kwargs or None)
        spread = {"mesh": mesh, "batch": batch, "units": units}
        options = {"strict": strict, "engine": engine, "window": window, **spread, **options}
        learner = ModuleLearner(model, algorithm, example_inputs, options)
    else:
        if not isinstance(model, brainstate.nn.Module):
            model = _step_of(model)
        check_batch_size(batch_size)
        placement = check_placement(mesh, batch, units)
        how = (unmarked, check_engine(engine), placement)
        if window is not None:
            options = {"vjp_method": "multi-step", **options}
        new_learner = _maker(model, algorithm, options, *how)
        seeded = contextlib.nullcontext() if seed is None else brainstate.random.seed_context(seed)
        if vmap and placement is not None:
            raise not_supported(
                "vmap=True with a mesh.",
                why="its samples are not an axis of the compiled step",
                do="compile with an explicit batch (vmap=False, batch_size=...)",
            )
        if vmap:
            with seeded:
                learner = part("_compile", "mapped")(
                    new_learner, model, example_inputs, kwargs, batch_size
                )
        else:
            with seeded:
                _initialise(model, batch_size)
            learner = new_learner()
            learner.compile_graph(*example_inputs, **(kwargs or {}))
            learner.batch_size = batch_size if learner.batch_size is None else learner.batch_size
            learner._place()
        learner.window = None if window is None else check_count("window", window, "steps")
        if strict:
            check_exact(learner.report, (learner.module if vmap else learner).title)
            (learner.module if vmap else learner).strict = True
    if verbose:
        learner.report.show(level=verbose)
    return learner


def _maker(
    model: brainstate.nn.Module,
    algorithm: Any,
    options: dict,
    unmarked: bool,
    engine: Engine,
    placement: Placement | None,
) -> Callable[[], Learner]:
    """What makes a learner of a model by a rule."""
    make: Any
    row = BY_NAME.get(algorithm.strip().lower()) if isinstance(algorithm, str) else None
    if row is not None and row.learner is None:  # a name without a published class
        assert row.make is not None
        own = {k: options[k] for k in inspect.signature(row.make).parameters if k in options}
        options = {k: v for k, v in options.items() if k not in own}
        algorithm = rule_value(row.name, own)
    rule = make = _rule(algorithm)
    name = rule.__name__
    if isinstance(algorithm, ETraceConfig):
        options = part("_compile", "options_of")(algorithm) | options
    if isinstance(algorithm, LearningRule):
        make, name = functools.partial(Learner, rule=algorithm), algorithm.name
    check_options(name, parameters_of(rule), options, " to braintrace.compile")

    def new_learner() -> Learner:
        learner = make(model, **options)
        learner.unmarked, learner.engine, learner.placement = unmarked, engine, placement
        return learner

    return new_learner


def _initialise(model: brainstate.nn.Module, batch_size: int | None) -> None:
    if not isinstance(model, brainstate.nn.Map):
        brainstate.nn.init_all_states(model, batch_size=batch_size)
    nodes = (
        brainstate.graph.nodes(model, brainstate.nn.Map).values()
        if isinstance(model, StepFunction)
        else [model]
    )
    for node in nodes:
        if isinstance(node, brainstate.nn.Map):
            node.init_all_states()


def _step_of(function: Callable[..., PyTree]) -> StepFunction:
    """A function as a module."""
    step = StepFunction(function)
    for path, node in brainstate.graph.nodes(step).items():
        if isinstance(node, Learner):
            raise value_error(
                f"{step.title} calls the learner {dotted(path)}.",
                where=step.line,
                why="its step is analysed and has its traces already",
                do="call the modules themselves in the function, and compile it alone",
            )
    return step


def _check_not_given(**arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise not_supported(
            f"{', '.join(given)} with a module of nnx.",
            why="it has made its states itself, for a batch or one sample, and is called with the "
            "example inputs",
            do="leave it out; give the variables of the module the shape of a batch, or map "
            "braintrace.online over samples",
        )


def _rule(algorithm: Any) -> type[Learner]:
    if isinstance(algorithm, str):
        name = algorithm.strip().lower()
        if name not in BY_NAME:
            close = meant(name, BY_NAME)
            hint = f"did you mean {close!r}? Or pass" if close else "choose one of them, or pass"
            raise value_error(
                f"unknown rule {algorithm!r}.",
                why=f"the rules are {', '.join(sorted(BY_NAME))}",
                do=f"{hint} a learner class",
            )
        return part("_compile", "RULES")[name]
    if isinstance(algorithm, LearningRule):
        return Learner
    if isinstance(algorithm, ETraceConfig):
        return part("_compile", "class_of")(algorithm)
    if isinstance(algorithm, type) and issubclass(algorithm, Learner):
        return algorithm
    kind = algorithm.__name__ if isinstance(algorithm, type) else type(algorithm).__name__
    raise type_error(
        f"{kind} is not a rule.",
        why="a rule is a name, a value of braintrace.rules, an ETraceConfig or a subclass of "
        "ETraceAlgorithm",
        do=f"pass one of {', '.join(sorted(BY_NAME))}",
    )


def parameters_of(rule: type[Learner]) -> list[inspect.Parameter]:
    """The options of a rule; also those that its base class takes."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in rule.__mro__:
        if "__init__" not in vars(base):
            continue
        here = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        parameters = {**here, **parameters}
        if not any(p.kind is p.VAR_KEYWORD for p in here.values()):
            break
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    own = ("self", "model", "rule")
    return [p for p in parameters.values() if p.name not in own and p.kind not in several]
