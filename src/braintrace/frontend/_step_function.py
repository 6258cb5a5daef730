"""A function that calls modules, as one module: the whole step of a learner.

    encoder, rnn, readout = ...
    step = lambda x: readout(rnn(encoder(x)))

The modules are attributes under the names that the function has for them, so that their states
are `encoder.weight`, `rnn.h` and so on, and are initialised and reset with it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, TypeAlias

import brainstate

from .._errors import OWN_CELL, check_takes, type_error, value_error
from ..program import PyTree
from ._references import LIBRARIES, is_function, names_in, package_of

State: TypeAlias = brainstate.State


class StepFunction(brainstate.nn.Module):
    """A function of arrays, and of the modules and states that it refers to."""

    graph_invisible_attrs = ("_initial",)

    def __init__(self, function: Callable[..., PyTree]):
        super().__init__()
        if isinstance(function, type) or not callable(function):
            what = function if isinstance(function, type) else type(function)
            raise type_error(
                f"expected a brainstate.nn.Module or a function, got {what.__name__}.",
                why="one call of it is a step of the network",
                do="pass a module (an instance, not a class), or a function that calls modules: "
                f"braintrace.compile(lambda x: readout(rnn(x)), rule, x0); {OWN_CELL}",
            )
        self._function, self._original = function, id(self)
        self._initial: list[tuple[State, PyTree]] | None = None  # of states in no module
        self.title = getattr(inspect.unwrap(function), "__qualname__", type(function).__name__)
        for name, item in models_of(function).items():
            setattr(self, f"{name}_" if hasattr(self, name) else name, item)

    @property
    def line(self) -> str | None:
        """Where the function is defined."""
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        return code and f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"

    def update(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._function(*args, **kwargs)

    def add(self, used: Iterable[State]) -> None:
        """Take in the states of a traced call that no name of the function led to.

        Raises:
            ValueError: it uses no state.
        """
        own = {id(s) for s in self.states().values()}
        more = [s for s in used if id(s) not in own and s is not brainstate.random.DEFAULT]
        for state in more:
            names = (f"{type(state).__name__}_{i}" for i in count())
            setattr(self, next(n for n in names if not hasattr(self, n)), state)
        states = self.states().values()
        if not states:
            raise value_error(
                f"{self.title} uses no state of brainstate.",
                where=self.line,
                why="parameters and memory of a step are states, in modules or by themselves",
                do=f"call modules in it; {OWN_CELL}",
            )
        if self._initial is None:
            nodes = [n for n in self.nodes(brainstate.nn.Module).values() if n is not self]
            inside = {id(s) for node in nodes for s in brainstate.graph.states(node).values()}
            short = [s for s in states if not isinstance(s, brainstate.LongTermState)]
            self._initial = [(s, s.value) for s in short if id(s) not in inside]

    def reset_state(self, *args: PyTree, **kwargs: PyTree) -> None:
        """States that are in no module get the values that they were compiled with."""
        for state, value in self._initial or ():
            state.value = value

    def check_arguments(self, args: PyTree, kwargs: PyTree) -> None:
        """Refuse arguments that the function does not take, and calls of a copy."""
        if self._original != id(self):
            raise type_error(
                f"a copy of the function {self.title} is called.",
                where=self.line,
                why="it still calls the modules of the original, not their copies",
                do="make the modules and the learner again and learner.load(path) what "
                "learner.save(path) wrote, or write the step as the `update` of a module",
            )
        check_takes(
            self._function,
            ["an input"] * len(args),
            "a step gets the example inputs of compile, and nothing else",
            "pass one example per argument, braintrace.compile(function, rule, *inputs, "
            f"kwargs={{...}}); what is the same at every step belongs in the function; {OWN_CELL}",
            self.title,
            tuple(kwargs),
            self.line,
        )


def title_of(model: brainstate.nn.Module) -> str:
    """What a model is called: its class, or the function that it is."""
    return model.title if isinstance(model, StepFunction) else type(model).__name__


def models_of(function: Any) -> dict[str, Any]:
    """Modules and states that a function refers to, by name; functions it calls count as it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def add(function: Any, title: str) -> None:
        called = []
        for name, item in names_in(function):
            if is_function(item):
                called.append((name, item))
            elif (part := _models_in(item)) is not None:
                while name in found and found[name] is not part:
                    name = f"{title}_{name}"
                found[name] = part
        for name, item in called:
            if id(item) not in seen and package_of(item) not in LIBRARIES:
                seen.add(id(item))
                add(item, name)

    add(function, "")
    return found


def _models_in(item: Any, inside: bool = False) -> Any:
    """The item, or a dictionary of what in it is a module or state; None without one."""
    if isinstance(item, (brainstate.nn.Module, brainstate.State)):
        return None if item is brainstate.random.DEFAULT else item
    if isinstance(item, (list, tuple)):
        parts = dict(enumerate(item))
    elif isinstance(item, dict):
        parts = item
    elif inside or isinstance(item, (type, types.ModuleType)) or package_of(item) in LIBRARIES:
        return None
    else:
        parts = getattr(item, "__dict__", {})
    models = {str(k): _models_in(v, True) for k, v in parts.items()}
    return {k: v for k, v in models.items() if v is not None} or None


def states_named(models: Any, path: tuple = ()) -> dict[tuple, State]:
    """The states in what `models_of` returns, by their paths."""
    if isinstance(models, brainstate.State):
        return {path: models}
    if isinstance(models, dict):
        parts = [states_named(part, (*path, name)) for name, part in models.items()]
        return {key: state for part in parts for key, state in part.items()}
    return {(*path, *key): state for key, state in brainstate.graph.states(models).items()}
