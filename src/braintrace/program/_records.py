"""Programs: straight-line equations over our own records, the same under every version of JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._jax import SourceInfo, is_traced, trace_is_running
from ._lines import user_line

Array = jax.Array
Params = dict[str, Any]  # the static parameters of an equation
PyTree: TypeAlias = Any  # nested containers of arrays
_MOST_PATTERN = 1 << 20  # elements of a constant whose zeros are looked at


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Var:
    """A value computed by a program; compared by identity."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_inexact(self) -> bool:
        return is_inexact(self.dtype)

    @property
    def is_complex(self) -> bool:
        return jax.dtypes.issubdtype(self.dtype, np.complexfloating)


@dataclass(frozen=True, eq=False, slots=True)
class Const:
    """A literal written into the program."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        return self.value.dtype if hasattr(self.value, "dtype") else jnp.result_type(self.value)


Atom = Var | Const


@dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """One primitive applied to atoms; `bodies` are what a cond, scan or while runs inside."""

    primitive: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    params: Params
    source: SourceInfo
    effects: frozenset[object] = frozenset()
    callers: tuple[SourceInfo, ...] = ()
    bodies: tuple[Body, ...] = ()

    @property
    def name(self) -> str:
        return self.primitive.name

    def where(self) -> str | None:
        """The user's own file and line of this equation, or of the call that it is part of."""
        sources = (self.source, *self.callers)
        lines = (user_line(s, own) for own in (True, False) for s in sources)
        return next((line for line in lines if line), None)


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A straight-line program: `consts` (closed-over arrays) and `inputs` to `outputs`."""

    consts: tuple[Var, ...]
    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]

    @property
    def read(self) -> list[Atom]:
        """All that equations read, and the outputs; once for each use."""
        return [*(a for e in self.equations for a in e.inputs), *self.outputs]


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A program inside an equation, with the values of its constants."""

    program: Program
    values: tuple[Any, ...]


def deep_equations(program: Program) -> Iterator[Equation]:
    """All equations of a program and of the bodies in it, outer ones first."""
    for eqn in program.equations:
        yield eqn
        yield from equations_inside(eqn)


def equations_inside(eqn: Equation) -> Iterator[Equation]:
    """All equations in the bodies of an equation."""
    for body in eqn.bodies:
        yield from deep_equations(body.program)


def producers(program: Program) -> dict[Atom, Equation]:
    """The equation that computes each value; inputs and constants have none."""
    return {o: e for e in program.equations for o in e.outputs}


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an atom, an array or an aval."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def is_inexact(dtype: Any) -> bool:
    """Whether values of this type carry a derivative (floating or complex, no PRNG keys)."""
    return jax.dtypes.issubdtype(dtype, np.inexact)


def pattern(value: Any) -> np.ndarray | None:
    """Where a floating constant is not zero; None if everywhere, or if that is by chance.

    The zeros of a matrix are its structure; a single number is zero by chance.
    """
    if is_traced(value) or np.ndim(value) < 2 or np.size(value) > _MOST_PATTERN:
        return None
    nonzero = np.asarray(value) != 0
    return None if nonzero.all() else nonzero


def zeros_of(shapes: PyTree, shardings: PyTree = None) -> PyTree:
    """Zeros of many shapes: one program, not one for each of them, and on a CPU none.

    With `shardings` they are made where they will lie.
    """
    leaves, tree = jax.tree.flatten(shapes)
    like = tuple((a.shape, a.dtype) for a in leaves)
    places = None if shardings is None else tuple(jax.tree.leaves(shardings))
    if places is None and jax.default_backend() == "cpu" and not trace_is_running():
        return jax.tree.unflatten(tree, jax.device_put([np.zeros(*a) for a in like]))
    return jax.tree.unflatten(tree, _zeros(like, places)())


@lru_cache
def _zeros(shapes: tuple[tuple[tuple[int, ...], Any], ...], shardings: Any) -> Callable[[], Any]:
    make = lambda: [jnp.zeros(shape, dtype) for shape, dtype in shapes]
    return jax.jit(make) if shardings is None else jax.jit(make, out_shardings=list(shardings))
