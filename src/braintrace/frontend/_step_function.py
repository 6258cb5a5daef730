"""A function that calls modules, as one module: the whole step of a learner.

    encoder, rnn, readout = ...
    step = lambda x: readout(rnn(encoder(x)))

The modules are attributes under the names that the function has for them, so that their states
are `encoder.weight`, `rnn.h` and so on, and are initialised and reset with it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, TypeAlias

import brainstate

from .._errors import type_error, value_error
from .._jaxpr import PyTree

State: TypeAlias = brainstate.State
# Functions of these refer to no model of the user.
LIBRARIES = {
    *sys.stdlib_module_names,
    *("jax", "jaxlib", "numpy", "scipy", "saiunit", "brainunit", "optax"),
    *("brainstate", "braintools", "brainevent", "braintrace"),
}


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
                do="pass a module (an object, no class), or a function that calls modules: "
                "braintrace.compile(lambda x: readout(rnn(x)), rule, x0)",
            )
        self._function, self._original = function, id(self)
        self._initial: list[tuple[State, PyTree]] | None = None  # of states in no module
        self.title = getattr(inspect.unwrap(function), "__qualname__", type(function).__name__)
        for name, item in _models_of(function).items():
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
        known = {id(s) for s in self.states().values()}
        more = [s for s in used if id(s) not in known and s is not brainstate.random.DEFAULT]
        for state in more:
            names = (f"{type(state).__name__}_{i}" for i in count())
            setattr(self, next(n for n in names if not hasattr(self, n)), state)
        states = self.states().values()
        if not states:
            raise value_error(
                f"{self.title} uses no state of brainstate.",
                where=self.line,
                why="parameters and memory of a step are states, in modules or by themselves",
                do="call modules in it; a function of arrays alone, "
                "step(params, state, x), is for braintrace.online",
            )
        if self._initial is None:
            nodes = [n for n in self.nodes(brainstate.nn.Module).values() if n is not self]
            inside = {id(s) for node in nodes for s in node.states().values()}
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
        try:
            signature = inspect.signature(self._function)
        except ValueError:  # a built-in function has none
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            inputs = ", ".join([*["an input"] * len(args), *(f"{k}=..." for k in kwargs)])
            raise type_error(
                f"{self.title}{signature} is called with {inputs}: {error}.",
                where=self.line,
                why="a step gets the example inputs of compile, and nothing else",
                do="pass one example per argument, braintrace.compile(function, rule, *inputs, "
                "kwargs={...}); what is the same at every step belongs in the function",
            ) from None


def title_of(model: brainstate.nn.Module) -> str:
    """What a model is called: its class, or the function that it is."""
    return model.title if isinstance(model, StepFunction) else type(model).__name__


def _models_of(function: Any) -> dict[str, Any]:
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


def is_function(item: Any) -> bool:
    """Whether an object is code with names of its own, not a module that is called."""
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(item, kinds) or isinstance(getattr(item, "__wrapped__", None), kinds)


def package_of(item: Any) -> str:
    """The package that defines a function, or the class of an object."""
    owner = inspect.unwrap(item.func if isinstance(item, functools.partial) else item)
    name = getattr(owner if is_function(owner) else type(owner), "__module__", None)
    return (name or "").partition(".")[0]


def names_in(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function refers to from outside: bound arguments, closure, globals, defaults."""
    if isinstance(function, functools.partial):
        bind = inspect.signature(function.func).bind_partial
        yield from bind(*function.args, **function.keywords).arguments.items()
        yield from names_in(function.func)
    elif isinstance(function, types.MethodType):
        yield "self", function.__self__
        yield from names_in(function.__func__)
    elif isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if cell != types.CellType():  # empty while its function is still being defined
                yield name, cell.cell_contents
        for name in globals_read(function.__code__):
            if name in function.__globals__:
                yield name, function.__globals__[name]
        parameters = inspect.signature(function).parameters.values()
        yield from ((p.name, p.default) for p in parameters if p.default is not p.empty)
        if hasattr(function, "__wrapped__"):
            yield "wrapped", function.__wrapped__
    elif is_function(function):
        yield from names_in(inspect.unwrap(function))
    else:
        yield "self", function
        call = type(function).__call__
        yield from names_in(call) if isinstance(call, types.FunctionType) else ()


@functools.cache
def globals_read(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function reads, and the functions defined in it."""
    read = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(dict.fromkeys([*read, *(name for c in inner for name in globals_read(c))]))
