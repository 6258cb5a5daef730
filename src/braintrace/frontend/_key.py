"""What a traced step depends on, as a key: with an equal one it need not be traced again.

As flax's `graphdef`, a key has the structure of modules and their attributes, by value where they
can be compared; states by their identity, shapes and types, for their arrays are arguments of the
program. Functions count with what they refer to by name, so that an array that took the place of
another is seen; what cannot be compared is traced at every call. What no name of the step leads to
(attributes of Python modules, what code imports while it runs) is for `learner.recompile()`.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import brainstate
import jax
import numpy as np
import saiunit as u

from ..ops import Structure
from ..program import PyTree, Tracer, trace_settings
from ._references import LIBRARIES, attribute, is_function, names_in, package_of, package_of_class

_MOST_OBJECTS = 2_000  # what refers to more is traced sooner than compared
_MOST_BYTES = 1 << 20  # of a numpy array, which may change in place
_BY_VALUE = {int, bool, str, bytes, type(None)}
_BY_IDENTITY = (
    *(jax.Array, np.dtype, np.ufunc, u.Unit, u.Dimension, enum.Enum, Structure),
    *(range, slice, type(...), types.ModuleType),
    *(types.MemberDescriptorType, types.GetSetDescriptorType),
)
# Objects of these are what their attributes say; those of other libraries may hold more.
_OPEN = {"brainstate", "braintools", "brainevent", "braintrace", "saiunit"}
_OF_JAX = {"jax", "jaxlib"}
_OF_EVERY_STATE = {
    *("_trace_state", "_value", "_level", "_source_info", "_hooks_manager", "_been_writen"),
}


class _Unclear(Exception):
    """Something cannot be compared with what it was before."""


@dataclass(slots=True)
class Key:
    """A key, and the objects that it has by identity: no other can have it while these live."""

    value: tuple[Hashable, ...] = ()
    holds: list[Any] = field(default_factory=list)


def key_of(arguments: PyTree, *roots: Any) -> Key | None:
    """The key of a call of `roots` with these arguments; None if there is none."""
    if brainstate.has_state_hooks():
        return None
    walk = _Walk()
    try:
        walk.arrays(arguments)
        for item in (brainstate.environ.all(), brainstate.random.DEFAULT, *roots):
            walk.visit(item)
    except (_Unclear, RecursionError):
        return None
    return Key((trace_settings(), *walk.key), walk.holds)


class _Walk:
    def __init__(self) -> None:
        self.key: list[Any] = []
        self.holds: list[Any] = []
        self.seen: dict[int, int] = {}

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
        # A key is what was met, in order: values as they are, objects by number when they come
        # again. Of `[a, a]`, the list is number 0 and a is 1, so the second a is `1`; of `[a, b]`
        # with an equal b it is written out once more: an object that is shared differs from two
        # that are alike. `holds` keeps ids from being used again.
        if kind in _BY_VALUE:
            self.key += (kind, item)
        elif kind is float or kind is complex:
            self.key += (kind, repr(item))  # 0.0 == -0.0
        elif id(item) in self.seen:
            self.key.append(self.seen[id(item)])
        elif isinstance(item, Tracer) or len(self.holds) > _MOST_OBJECTS:
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
        elif isinstance(item, (set, frozenset)) and all(type(e) in _BY_VALUE for e in item):
            self.key.append(frozenset((type(e), e) for e in item))
        elif isinstance(item, (np.ndarray, np.generic)):
            if item.dtype.hasobject or item.nbytes > _MOST_BYTES:
                raise _Unclear
            self.key += (item.shape, item.dtype, item.tobytes())
        elif isinstance(item, brainstate.State):
            if item.has_hooks():
                raise _Unclear
            self.key.append(id(item))
            self.arrays(vars(item).get("_value"))  # `value` would count as a use
            self.contents({k: v for k, v in vars(item).items() if k not in _OF_EVERY_STATE})
            self.visit(type(item))
        elif isinstance(item, _BY_IDENTITY):
            self.key.append(id(item))
        elif isinstance(item, type):
            self.attributes(item)
        elif isinstance(item, (staticmethod, classmethod, property)):
            self.visit(item.fget if isinstance(item, property) else item.__func__)
        elif isinstance(item, brainstate.nn.Module):
            parts = getattr(type(item), "key_parts", None)
            if parts is None:
                self.object(item)
            else:  # a learner is what it learns
                self.key.append(id(item))
                self.each(getattr(item, name) for name in parts)
        elif is_function(item):
            self.function(item)
        elif callable(item) and attribute(item, "__self__") is not None:
            self.each((item.__name__, item.__self__))  # a method of an object in C
        else:
            self.object(item)

    def object(self, item: Any) -> None:
        """What any other object is: its attributes, and those of its class."""
        self.key.append(id(item))
        kind: Any = type(item)
        package = package_of_class(kind)
        if package in _OF_JAX:
            return
        held, slots = attribute(item, "__dict__"), _slots(kind)
        if package in LIBRARIES - _OPEN or (held is None and not slots):
            raise _Unclear
        self.contents(held or {})
        self.each(attribute(item, slot) for slot in slots)
        self.visit(kind)

    def attributes(self, kind: Any) -> None:
        """The attributes of a class and its bases that are not of a library: methods, say."""
        self.key.append(id(kind))
        for base in kind.__mro__:
            if package_of_class(base) not in LIBRARIES:
                named = vars(base).items()
                shown = {k: v for k, v in named if k == "__call__" or k[:2] != "__"}
                self.contents({k: v for k, v in shown.items() if k != "_abc_impl"})

    def function(self, item: Any) -> None:
        """A function is its code and what that refers to."""
        bound = isinstance(item, types.MethodType)  # another object whenever it is read
        self.key.append(id(item.__func__ if bound else item))
        if bound:
            self.visit(item.__self__)
        if package_of(item) not in LIBRARIES or isinstance(item, functools.partial):
            self.each(value for _, value in names_in(item))
            self.each(() if bound else vars(item).items())


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    members = (m for base in kind.__mro__ for m in vars(base).values())
    return tuple(m.__name__ for m in members if isinstance(m, types.MemberDescriptorType))
