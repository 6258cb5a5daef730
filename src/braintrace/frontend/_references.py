"""What code refers to from outside of itself: closures, globals, defaults, bound arguments."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Code of these refers to nothing of the user's, and to nothing that changes.
LIBRARIES = {
    *(sys.stdlib_module_names - {"test"}),
    *("jax", "jaxlib", "numpy", "scipy", "saiunit", "brainunit", "optax"),
    *("brainstate", "braintools", "brainevent", "braintrace"),
}
_MADE_BY_PYTHON = 1 << 9  # a flag of classes


def is_function(item: Any) -> bool:
    """Whether an object is code with names of its own, not a module that is called."""
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(item, kinds) or isinstance(attribute(item, "__wrapped__"), kinds)


def attribute(item: Any, name: str) -> Any:
    """An attribute of any object, or None: a `__getattr__` of the user may raise what it likes."""
    try:
        return getattr(item, name, None)
    except Exception:
        return inspect.getattr_static(item, name, None)


def package_of(item: Any) -> str:
    """The package that a Python module, a function, a class or the class of an object is of."""
    owner = item.func if isinstance(item, functools.partial) else item
    if attribute(owner, "__wrapped__") is not None:
        owner = inspect.unwrap(owner)
    if isinstance(owner, types.ModuleType):
        return owner.__name__.partition(".")[0]
    if not is_function(owner):
        return package_of_class(owner if isinstance(owner, type) else type(owner))
    name = (attribute(owner, "__module__") or "").partition(".")[0]
    return "" if name == "builtins" else name  # code without a module says so, too


@functools.cache
def package_of_class(kind: type) -> str:
    """The package that a class is of."""
    name = (attribute(kind, "__module__") or "").partition(".")[0]
    return "" if name == "builtins" and kind.__flags__ & _MADE_BY_PYTHON else name


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


def _nested(of: Callable[[types.CodeType], Iterable[str]]) -> Callable[..., frozenset[str]]:
    """What is true of a function or of the functions defined in it."""

    @functools.cache
    def names(code: types.CodeType) -> frozenset[str]:
        inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
        return frozenset(of(code)).union(*map(names, inner))

    return names


def _of(opcode: str) -> Callable[[types.CodeType], Iterable[str]]:
    return lambda code: (i.argval for i in dis.get_instructions(code) if i.opname == opcode)


globals_read = _nested(_of("LOAD_GLOBAL"))
attributes_read = _nested(lambda code: code.co_names)
imports_of = _nested(lambda code: (n.partition(".")[0] for n in _of("IMPORT_NAME")(code)))
