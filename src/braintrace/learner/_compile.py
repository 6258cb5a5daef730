"""From a model to a ready learner in one call."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import numpy as np

from .._errors import dotted, not_supported, type_error, value_error
from ..engine import Engine, Placement, check_engine, check_placement
from ..frontend import StepFunction
from ..program import PyTree
from ..rules import BY_NAME, ETraceConfig, LearningRule, check_count, check_options
from . import _presets
from ._checks import check_exact
from ._data import MultiStepData, SingleStepData
from ._dni import DNI
from ._learner import Learner
from ._nnx import ModuleLearner, is_nnx
from ._reset import check_batch_size
from ._rule_learner import RuleLearner

RULES: dict[str, type[Learner]] = {
    name: DNI if row.learner == "DNI" else getattr(_presets, row.learner)
    for name, row in BY_NAME.items()
}


def class_of(config: ETraceConfig) -> type[Learner]:
    """The learner class for a rule with these coordinates."""
    by_signal = {
        "modulatory": _presets.ThreeFactor,
        "target_projection": _presets.OSTTP,
        "local_loss": _presets.DECOLLE,
        "bootstrapped": DNI,
    }
    by_trace = {
        "per_param": _presets.ParamDimVjpAlgorithm,
        "io_factorized": _presets.IODimVjpAlgorithm,
        "random_projection": _presets.UORO,
        "kronecker": _presets.KFRTRL,
        "everything": _presets.RTRL,
        "paired": _presets.STLLR,
        "none": _presets.NoTrace,
    }
    return by_signal.get(config.learning_signal, by_trace[config.trace_factorization])


def options_of(config: ETraceConfig) -> dict[str, PyTree]:
    """The arguments of that class."""
    kind = config.trace_factorization
    if kind == "paired":
        assert config.alphas is not None
        pre, post = config.alphas
        leaks = {"leak_pre": config.decay_x, "leak_post": config.decay_f}
        return {**leaks, "alpha_pre": pre, "alpha_post": post}
    fixed = config.learning_signal in ("target_projection", "bootstrapped")
    return {} if kind not in ("per_param", "io_factorized") or fixed else {"config": config}


class ETraceVmap(brainstate.nn.Module):
    """A learner of a model that is mapped over samples; `module` is that learner.

    It has all of the learner's methods; axis 0 of all inputs counts the samples.
    """

    def __init__(self, learner: Learner):
        super().__init__()
        self.module = learner

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self.module.samples} samples of\n{self.module!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ETraceVmap:
        return ETraceVmap(copy.deepcopy(self.module, memo))

    def __copy__(self) -> ETraceVmap:
        return ETraceVmap(self.module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def update(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """One step of every sample."""
        return self.module(*args, **kwargs)

    def reset(self) -> None:
        """Reset the model's states and the traces of every sample: do this between sequences.

        Initial states drawn at random are drawn once and shared by all samples.
        """
        self.module.reset()


def compile(
    model: Any,
    algorithm: str | LearningRule | ETraceConfig | type[Learner],
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
) -> Learner | ModuleLearner | ETraceVmap:
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
            (`braintrace.rules.d_rtrl()`), by its coordinates or by class.
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
                learner = _mapped(new_learner, model, example_inputs, kwargs, batch_size)
        else:
            with seeded:
                _initialise(model, batch_size)
            learner = new_learner()
            learner.compile_graph(*example_inputs, **(kwargs or {}))
            learner.batch_size = batch_size if learner.batch_size is None else learner.batch_size
            learner._place()
        learner.window = None if window is None else check_count("window", window, "steps")
        if strict:
            check_exact(learner.report, _rule(algorithm).__name__)
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
    rule = make = _rule(algorithm)
    if isinstance(algorithm, ETraceConfig):
        options = options_of(algorithm) | options
    if isinstance(algorithm, LearningRule):
        rule, make = RuleLearner, functools.partial(rule.of, rule=algorithm)
    _check_options(rule, options)

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
        if isinstance(node, (Learner, ETraceVmap)):
            raise value_error(
                f"{step.title} calls the learner {dotted(path)}.",
                where=step.line,
                why="its step is analysed and has its traces already",
                do="call the modules themselves in the function, and compile it alone",
            )
    return step


def _mapped(
    new_learner: Callable[[], Learner],
    model: brainstate.nn.Module,
    inputs: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree] | None,
    batch_size: int | None,
) -> ETraceVmap:
    if kwargs:
        raise not_supported(
            f"vmap=True with the keyword arguments {', '.join(kwargs)}.",
            why="a mapped learner maps its inputs by position",
            do="pass them by position, or use batch_size without vmap",
        )
    if batch_size is None:
        raise value_error(
            "vmap=True without batch_size.",
            why="the states of every sample are allocated at compile time",
            do="pass batch_size=<number of samples>",
        )
    bare = [i.data if isinstance(i, (SingleStepData, MultiStepData)) else i for i in inputs]
    _check_samples(bare, batch_size)
    learner = new_learner()

    @brainstate.transform.vmap_new_states(state_tag="new", axis_size=batch_size)
    def new_states():
        brainstate.nn.init_all_states(model)

    new_states()
    learner.map_over(batch_size)
    learner.compile_graph(*bare)
    return ETraceVmap(learner)


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


def _check_samples(inputs: PyTree, n_samples: int) -> None:
    for leaf in jax.tree.leaves(inputs):
        if np.shape(leaf)[:1] != (n_samples,):
            raise value_error(
                f"an input has shape {np.shape(leaf)}, the learner maps {n_samples} samples.",
                why="axis 0 of every input counts the samples (vmap=True)",
                do="put the batch on axis 0, or compile again for another batch size",
            )


def _rule(algorithm: Any) -> type[Learner]:
    if isinstance(algorithm, str):
        name = algorithm.strip().lower()
        if name not in RULES:
            close = difflib.get_close_matches(name, RULES, 1)
            hint = f"did you mean {close[0]!r}? Or pass" if close else "choose one of them, or pass"
            raise value_error(
                f"unknown rule {algorithm!r}.",
                why=f"the rules are {', '.join(sorted(RULES))}",
                do=f"{hint} a learner class",
            )
        return RULES[name]
    if isinstance(algorithm, LearningRule):
        return RULES.get(algorithm.name, RuleLearner)
    if isinstance(algorithm, ETraceConfig):
        return class_of(algorithm)
    if isinstance(algorithm, type) and issubclass(algorithm, Learner):
        return algorithm
    kind = algorithm.__name__ if isinstance(algorithm, type) else type(algorithm).__name__
    raise type_error(
        f"{kind} is not a rule.",
        why="a rule is a name, a value of braintrace.rules, an ETraceConfig or a subclass of "
        "ETraceAlgorithm",
        do=f"pass one of {', '.join(sorted(RULES))}",
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


def _check_options(rule: type[Learner], options: dict[str, Any]) -> None:
    check_options(rule.__name__, parameters_of(rule), options, " to braintrace.compile")
