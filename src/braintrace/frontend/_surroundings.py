"""Everything that tracing a call may depend on, as a key: equal keys, equal programs.

A program is made by Python code, which may read anything. The key has what code can reach by
name: attributes of modules, states (by identity and shape, not by value), closures, globals and
class attributes of code outside of `LIBRARIES`, settings of brainstate and JAX. Objects whose
contents cannot be compared leave no key, and the call is traced.

The key is one list, to which a walk over objects appends. Objects that cannot change count by
identity; the walk holds on to them, so that no other object can have their identity while the key
is in use.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import numpy as np
import saiunit as u

from ..ops import Structure
from ..program import PyTree, is_traced, trace_settings
from ._references import LIBRARIES, attributes_read, globals_read, imports_of, package_of

_MOST_OBJECTS = 2_000  # a model that refers to more is traced sooner than compared
_MOST_BYTES = 1 << 20  # of a numpy array, which may change in place
_SLOT = types.MemberDescriptorType
_BY_VALUE = {int, bool, str, bytes, type(None)}
_BY_IDENTITY = (
    *(jax.Array, np.dtype, np.ufunc, u.Unit, u.Dimension, enum.Enum),
    *(_SLOT, types.GetSetDescriptorType, type(...), range, slice, Structure),
)
# Objects of these are what their attributes say; those of other libraries may hold more.
_OPEN = {"brainstate", "braintools", "brainevent", "braintrace", "saiunit"}
_OF_EVERY_STATE = {
    *("_trace_state", "_value", "_level", "_source_info", "_hooks_manager", "_been_writen"),
}


class _Unclear(Exception):
    """Something cannot be compared with what it was before."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A key, and the objects whose identity is in it."""

    key: tuple[Hashable, ...]
    holds: list[Any]


def surroundings(model: brainstate.nn.Module, arguments: PyTree) -> Surroundings | None:
    """What tracing a call of a model depends on; None if that cannot be told."""
    if brainstate.has_state_hooks():
        return None
    walk = _Walk()
    try:
        walk.arrays(arguments)
        walk.visit(brainstate.environ.all())
        walk.visit(brainstate.random.DEFAULT)
        walk.visit(model)
    except (_Unclear, RecursionError):
        return None
    return Surroundings((trace_settings(), *walk.key), walk.holds)


@dataclass(frozen=True, slots=True)
class _Class:
    """What is looked up once per class: where it is from, its slots, its bases of the user's."""

    package: str
    slots: tuple[str, ...]
    bases: tuple[type, ...]


@functools.cache
def _class_of(kind: type) -> _Class:
    members = (m for base in kind.__mro__ for m in vars(base).values())
    slots = tuple(m.__name__ for m in members if isinstance(m, _SLOT))
    bases = tuple(base for base in kind.__mro__ if package_of(base) not in LIBRARIES)
    return _Class(package_of(kind), slots, bases)


class _Walk:
    def __init__(self) -> None:
        self.key: list[Any] = []
        self.holds: list[Any] = []
        self.seen: dict[int, int] = {}
        self.modules: set[tuple[int, frozenset[str]]] = set()

    def arrays(self, tree: PyTree) -> None:
        """Arguments of the program, which has their shapes and types."""
        leaves, structure = jax.tree.flatten(tree)
        self.key.append(structure)
        for leaf in leaves:
            aval = getattr(leaf, "aval", None)
            plain = (type(leaf), np.shape(leaf), getattr(leaf, "dtype", None))
            self.key.append(plain if aval is None else aval)

    def visit(self, item: Any) -> None:
        kind = type(item)
        if kind in _BY_VALUE:
            self.key += (kind, item)
        elif kind is float or kind is complex:
            self.key += (kind, repr(item))  # 0.0 == -0.0
        elif id(item) in self.seen:
            self.key.append(self.seen[id(item)])
        elif is_traced(item) or len(self.holds) > _MOST_OBJECTS:
            raise _Unclear
        else:
            self.seen[id(item)] = len(self.holds)
            self.holds.append(item)
            self.key.append(kind)
            self.contents(item)

    def each(self, items: Iterable[Any]) -> None:
        for item in items:
            self.visit(item)
        self.key.append(")")

    def contents(self, item: Any) -> None:
        """What is in an object that is met for the first time."""
        if isinstance(item, (list, tuple, dict)):
            self.each(item)
            self.each(item.values() if isinstance(item, dict) else ())
            if type(item) not in (list, tuple, dict):
                self.visit(getattr(item, "__dict__", None))
        elif isinstance(item, (set, frozenset)):
            if not all(type(element) in _BY_VALUE for element in item):
                raise _Unclear
            self.key.append(frozenset((type(element), element) for element in item))
        elif isinstance(item, brainstate.State):
            self.state(item)
        elif isinstance(item, (np.ndarray, np.generic)):
            if item.dtype.hasobject or item.nbytes > _MOST_BYTES:
                raise _Unclear
            self.key += (item.shape, item.dtype, item.tobytes())
        elif isinstance(item, types.FunctionType):
            self.function(item)
        elif isinstance(item, types.MethodType):
            self.each((item.__self__, item.__func__))
        elif isinstance(item, types.BuiltinFunctionType):
            self.each((item.__name__, item.__self__))
        elif isinstance(item, types.ModuleType):
            self.key.append(id(item))
            if package_of(item) not in LIBRARIES:  # nobody knows which attributes are read
                raise _Unclear
        elif isinstance(item, functools.partial):
            self.each((item.func, item.args, item.keywords))
        elif isinstance(item, (staticmethod, classmethod)):
            self.visit(item.__func__)
        elif isinstance(item, property):
            self.visit(item.fget)
        elif isinstance(item, type):
            self.attributes(item)
        else:
            self.object(item)

    def state(self, state: brainstate.State) -> None:
        if state.has_hooks():
            raise _Unclear
        self.key.append(id(state))
        self.arrays(vars(state).get("_value"))  # `value` would count as a use
        self.contents({k: v for k, v in vars(state).items() if k not in _OF_EVERY_STATE})
        self.visit(type(state))

    def object(self, item: Any) -> None:
        self.key.append(id(item))
        if isinstance(item, _BY_IDENTITY):
            return
        owner: Any = type(item)
        kind = _class_of(owner)
        package = package_of(item) if hasattr(item, "__wrapped__") else kind.package
        if package in ("jax", "jaxlib"):
            return
        closed = package in LIBRARIES and package not in _OPEN
        if closed or not (kind.slots or hasattr(item, "__dict__")):
            raise _Unclear
        self.contents(getattr(item, "__dict__", {}))
        self.each(getattr(item, slot, None) for slot in kind.slots)
        self.visit(type(item))

    def attributes(self, kind: type) -> None:
        """The attributes of a class and its bases that are not of a library."""
        self.key.append(id(kind))
        for base in _class_of(kind).bases:
            hidden = lambda k: k == "_abc_impl" or (k[:2] == "__" and k != "__call__")
            self.contents({k: v for k, v in vars(base).items() if not hidden(k)})

    def function(self, function: types.FunctionType) -> None:
        self.key.append(id(function))
        self.each(c.cell_contents for c in function.__closure__ or () if c != types.CellType())
        self.each(function.__defaults__ or ())
        self.contents(function.__kwdefaults__ or {})
        self.contents(function.__dict__)
        if package_of(function) not in LIBRARIES:
            code = function.__code__
            if imports_of(code) - LIBRARIES:
                raise _Unclear
            self.variables(function.__globals__, globals_read(code), attributes_read(code))

    def variables(self, owner: dict, names: Iterable[str], attributes: frozenset[str]) -> None:
        """Variables of a Python module; of those that are modules themselves, their attributes."""
        for name in names:
            value = owner.get(name)
            if isinstance(value, types.ModuleType) and package_of(value) not in LIBRARIES:
                self.key.append(id(value))
                if (id(value), attributes) in self.modules:
                    continue
                self.modules.add((id(value), attributes))
                self.holds.append(value)
                self.variables(vars(value), [a for a in attributes if a in vars(value)], attributes)
            else:
                self.visit(value)
