"""A model of any library as a function of arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ..._errors import dotted, type_error
from ..._online import split, strong
from ...learner import ModuleLearner
from ...learner._nnx import is_nnx
from ...program import PyTree, prune, trace

Params = dict[str, jax.Array]
Build = Callable[[int, int], "PureModel"]  # of a seed and a batch size

_FORMS = (
    "pass a class or function that returns a brainstate or nnx module, or (step, params, state) "
    "with step(params, state, x) -> (state, out); it may take seed, key and batch_size"
)


@dataclass(frozen=True, slots=True)
class PureModel:
    """One step of a network with the arrays it starts from; only floating parameters are here."""

    step: Callable[[Params, PyTree, PyTree], tuple[PyTree, PyTree]]
    params: Params
    state: PyTree
    readout: str | None = None  # the parameter (units, outputs) of the read-out, if it is known

    def recurrent(self, x: PyTree) -> list[str]:
        """The parameters that a state depends on; the gradients of all others need no trace."""
        new = lambda params, state, x: jax.tree.leaves(self.step(params, state, x)[0])
        program, _ = trace(new, self.params, self.state, x)
        read = {a for eqn in prune(program).equations for a in eqn.inputs}
        return [name for name, v in zip(self.params, program.inputs, strict=False) if v in read]


def builder(model: Any, x: Callable[[int], PyTree]) -> Build:
    """How networks are made; `x` is the input of a step for a batch size."""

    @functools.cache
    def build(seed: int, batch_size: int) -> PureModel:
        with brainstate.random.seed_context(seed):
            return pure_model(_made(model, seed, batch_size), batch_size, x(batch_size))

    return build


def name_of(model: Any) -> str:
    """What a model is called in a table."""
    model = getattr(model, "func", model)  # of a partial
    return getattr(model, "__name__", type(model).__name__)


def _made(model: Any, seed: int, batch_size: int) -> Any:
    """The model itself, or what its class or function returns for a seed."""
    if isinstance(model, brainstate.nn.Module):
        return model
    if not callable(model) or is_nnx(model):
        raise type_error(
            f"the model has type {type(model).__name__}.",
            why="it is made for every seed, and for batches of more than one size",
            do=_FORMS,
        )
    available = {"seed": seed, "key": jax.random.key(seed), "batch_size": batch_size}
    parameters = inspect.signature(model).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in several]
    unknown = [name for name in needed if name not in available]
    if unknown:
        raise type_error(
            f"{name_of(model)} needs the arguments {', '.join(unknown)}.",
            why=f"it is called for every seed, with those of {', '.join(available)} that it takes",
            do="give the others a default, or pass functools.partial(...) with their values",
        )
    names = {p.name for p in parameters}
    return model(**{name: value for name, value in available.items() if name in names})


def pure_model(model: Any, batch_size: int, x: PyTree) -> PureModel:
    """A module, or (step, params, state), as a function of its floating parameters by name."""
    known = getattr(model, "readout_weight", None)
    if isinstance(model, brainstate.nn.Module):
        step, params, state = _of_brainstate(model, batch_size, x)
    elif is_nnx(model):
        step, params, state = _of_nnx(model, x)
    elif isinstance(model, tuple) and len(model) == 3 and callable(model[0]):
        step, params, state = model
    else:
        kind = f"tuple of {len(model)}" if isinstance(model, tuple) else type(model).__name__
        raise type_error(
            f"the function of the model returns a {kind}.",
            why="a model is one step of a network with its parameters and its state",
            do=_FORMS,
        )
    layout, trained, fixed = split(params)
    paths = layout.paths("params")
    names = [dotted(paths[i]) for i in layout.trained]
    values = {name: jnp.asarray(value) for name, value in zip(names, trained, strict=True)}

    def pure(params: Params, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        inputs = x if type(x) is tuple else (x,)
        # A dictionary comes back from JAX in the order of its keys.
        return step(layout.join([params[name] for name in names], fixed), state, *inputs)

    weights, start = dict(sorted(values.items())), jax.tree.map(strong, state)
    found = (dotted(paths[i]) for i in layout.trained if tuple(paths[i])[-2:] == known)
    return PureModel(pure, weights, start, next(found, None))


def named_step(module: Any, batch_size: int, x: PyTree) -> tuple[Any, ...]:
    """The step, parameters and state of a module; arrays have the names that its learner prints.

    The last result are the names of the parameters, of which an array may be a part.
    """
    if not isinstance(module, brainstate.nn.Module):
        return *_of_nnx(module, x), ()
    step, params, state = _of_brainstate(module, batch_size, x)
    states = brainstate.graph.states(module, brainstate.ParamState)
    paths = {dotted(path): tuple(path) for path in states}
    tree: dict[Any, Any] = {}
    for name, path in paths.items():
        *above, last = path
        functools.reduce(lambda at, key: at.setdefault(key, {}), above, tree)[last] = params[name]

    def nested(params: PyTree, state: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
        get = lambda path: functools.reduce(lambda at, key: at[key], path, params)
        return step({name: get(path) for name, path in paths.items()}, state, *inputs)

    return nested, tree, state, tuple(paths)


def _of_brainstate(module: brainstate.nn.Module, batch_size: int, x: PyTree) -> tuple[Any, ...]:
    """The step of a module, its parameters and its states by path."""
    brainstate.nn.init_all_states(module, batch_size=batch_size)
    inputs = x if type(x) is tuple else (x,)
    stateful: Any = brainstate.transform.StatefulFunction(module, return_only_write=False)
    states = stateful.get_states(*inputs)
    paths = {id(state): dotted(path) for path, state in brainstate.graph.states(module).items()}
    names = [paths.get(id(state), f"other{n}") for n, state in enumerate(states)]
    trained = [isinstance(state, brainstate.ParamState) for state in states]

    def step(params: PyTree, state: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
        every = {**params, **state}
        new, out = stateful.jaxpr_call([every[name] for name in names], *inputs)
        after = dict(zip(names, new, strict=True))
        return {name: after[name] for name in state}, out

    values = {name: state.value for name, state in zip(names, states, strict=True)}
    params = {name: values[name] for n, name in enumerate(names) if trained[n]}
    return step, params, {k: v for k, v in values.items() if k not in params}


def _of_nnx(module: Any, x: PyTree) -> tuple[Any, ...]:
    learner = ModuleLearner(module, "no_trace", x if type(x) is tuple else (x,), {})
    _, params, carry = learner._now()
    return learner.online.step, params, carry.state
