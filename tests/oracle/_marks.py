"""Which elements an equation's outputs read, as boolean matrices: it is run on marks.

A matrix has one row per output element and one column per element of the operand; `OWN` stands for
reading one's own place. Along kept paths these are the places a rule follows; `structure` leaves
nothing out: what mixes and operators have their matrices too, or read everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace.ops import ETPPrimitive
from braintrace.program import Equation, Program, Var, bind, bind_forward, is_inexact

from ._kinds import (
    CONTRACTIONS,
    INDEXED,
    REDUCTIONS,
    WINDOWS,
    Constants,
    Kind,
    constant_values,
    dynamic_axes,
    is_constant,
    kind_of,
    loop_body,
    matrices,
    reads,
    value_of,
)
from ._operators import tangent_program
from ._unroll import unroll

OWN = "own"
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
Links = Callable[[Equation, int], list[Any]]
"""(equation, operand) -> per output a matrix, `OWN`, or None where nothing is read."""


def propagate(
    program: Program, start: Mapping[Var, np.ndarray], links: Links
) -> dict[Any, np.ndarray]:
    """Follow marks, (elements, sources) per variable, through a program."""
    marks: dict[Any, np.ndarray] = dict(start)
    for eqn in program.equations:
        for i, a in enumerate(eqn.inputs):
            if a not in marks:
                continue
            for v, matrix in zip(eqn.outputs, links(eqn, i), strict=True):
                if matrix is not None and v.is_inexact:
                    own = matrix is OWN
                    new = _spread(marks[a], a, v) if own else times(matrix, marks[a])
                    marks[v] = marks[v] | new if v in marks else new
    return marks


def sources(variables: Sequence[Var]) -> dict[Var, np.ndarray]:
    """A mark of its own for every element of the variables."""
    total = sum(v.size for v in variables)
    out: dict[Var, np.ndarray] = {}
    start = 0
    for v in variables:
        own = np.zeros((v.size, total), bool)
        own[:, start : start + v.size] = np.eye(v.size, dtype=bool)
        out[v] = out[v] | own if v in out else own
        start += v.size
    return out


def kept_links(eqn: Equation, i: int, kind: Kind, constants: Constants) -> list[Any]:
    """What the outputs read of an operand of a kind that is kept."""
    if kind is Kind.POINTWISE:
        return [OWN] * len(eqn.outputs)
    if kind is Kind.LOOPS:
        return _looped(eqn, i)
    if eqn.name in CONTRACTIONS and kind in (Kind.MOVES, Kind.SUMS):
        return [reads(eqn, i, constants)]
    if kind is Kind.MOVES:
        return _matrices(eqn, i, lambda column: _bind_marks(eqn, i, column, constants, False))
    if kind is Kind.INDEXES and eqn.name == "sort":
        n = eqn.params["dimension"]
        along = lambda c: [jnp.broadcast_to(c.sum(n, keepdims=True), c.shape)]
        matrix = _matrices(eqn, i, along)[0]
        return [matrix if k == i else None for k in range(len(eqn.outputs))]
    if kind is Kind.INDEXES:
        return _indexed(eqn, i, constants)
    if kind is Kind.SUMS:
        return _matrices(eqn, i, _summed(eqn, i, constants))
    return [None] * len(eqn.outputs)


def structure(eqn: Equation, i: int, constants: Constants) -> list[Any]:
    """What the outputs read of an operand with nothing cut."""
    kind = kind_of(eqn, i, constants, set(eqn.inputs))
    if kind is not Kind.MIXES:
        return kept_links(eqn, i, kind, constants)
    if eqn.name in CONTRACTIONS:
        return _matrices(eqn, i, lambda column: _bind_marks(eqn, i, column, constants, True))
    if eqn.name.startswith("cum"):
        options = {k: eqn.params[k] for k in ("axis", "reverse")}
        return _matrices(eqn, i, lambda column: [lax.cumsum(column, **options)])
    if eqn.name == "reduce_prod":
        return _matrices(eqn, i, lambda column: [column.sum(eqn.params["axes"])])
    if eqn.name == "while":
        return _looped(eqn, i)
    if isinstance(eqn.primitive, ETPPrimitive) or eqn.name in _CUSTOM:
        return _by_derivative(eqn, i)
    return [np.ones((v.size, eqn.inputs[i].size), bool) for v in eqn.outputs]  # type: ignore


# ------------------------------------------------------------------------------- equations run


def times(matrix: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """The product of boolean matrices."""
    return matrix.astype(np.float32) @ marks.astype(np.float32) > 0


def _spread(marks: np.ndarray, a: Any, v: Var) -> np.ndarray:
    """The marks of an operand in the shape of the output it is broadcast to."""
    n = marks.shape[1]
    full = np.broadcast_to(marks.reshape(*a.shape, n), (*v.shape, n))
    return full.reshape(v.size, n)


def _matrices(eqn: Equation, i: int, fun: Callable) -> list[Any]:
    """Where the matrices of a function of operand `i` are not zero."""
    return [np.nan_to_num(matrix) != 0 for matrix in matrices(fun, eqn.inputs[i].shape)]


def _bind_marks(eqn: Equation, i: int, column: Any, constants: Constants, ones: bool) -> list[Any]:
    """Bind the equation on marks; indices as they are, zero where they vary."""
    values = []
    for k, a in enumerate(eqn.inputs):
        if k == i:
            values.append(column)
        elif not is_inexact(a.dtype) and is_constant(a, constants):
            values.append(value_of(a, constants))
        elif not is_inexact(a.dtype):
            values.append(jnp.zeros(a.shape, a.dtype))
        else:
            values.append(jnp.ones(a.shape) if ones else jnp.zeros(a.shape))
    return bind(eqn, values)


def _summed(eqn: Equation, i: int, constants: Constants) -> Callable:
    if eqn.name in REDUCTIONS:
        return lambda column: [column.sum(eqn.params["axes"])]
    if eqn.name in WINDOWS:
        p = {k: v for k, v in eqn.params.items() if k.startswith(("window", "padding", "base"))}
        return lambda column: [lax.reduce_window(column, 0.0, lax.add, **p)]
    return lambda column: _bind_marks(eqn, i, column, constants, True)


def _indexed(eqn: Equation, i: int, constants: Constants) -> list[Any]:
    """Any place along axes whose index varies: the movement at place zero, smeared along them."""
    axes = dynamic_axes(eqn, constants)
    writes = eqn.name not in ("gather", "dynamic_slice")
    if writes and i == 0:
        return [OWN]
    fun = lambda column: _bind_marks(eqn, i, column, constants, False)
    if eqn.name == "scatter":  # of several updates at one place any may be the one that stays
        at, numbers = eqn.inputs[INDEXED[eqn.name]], eqn.params["dimension_numbers"]
        zeros = jnp.zeros(eqn.inputs[0].shape), jnp.zeros(at.shape, at.dtype)
        fun = lambda column: [lax.scatter_add(*zeros, column, numbers)]
    (matrix,) = _matrices(eqn, i, fun)
    smear = _smear(eqn.inputs[0].shape, axes)
    return [times(smear, matrix) if writes else times(matrix, smear)]


def _smear(shape: tuple[int, ...], axes: Sequence[int]) -> np.ndarray:
    """Which elements of an array agree in all other axes."""
    places = np.indices(shape).reshape(len(shape), -1)
    others = [n for n in range(len(shape)) if n not in axes]
    same = places[others][:, :, None] == places[others][:, None, :]
    return same.all(0)


def _looped(eqn: Equation, i: int) -> list[Any]:
    """A `while`: the union over any number of iterations."""
    body, constants = loop_body(eqn)
    at, n = i - eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if at < 0:
        return [None] * len(eqn.outputs)
    marks = sources([body.inputs[at]])
    while True:
        results = propagate(body, marks, lambda e, j: structure(e, j, constants))
        carried = dict(marks)
        for v, out in zip(body.inputs[n:], body.outputs, strict=True):
            if out in results and v.is_inexact:
                carried[v] = marks[v] | results[out] if v in marks else results[out]
        if all(v in marks and (marks[v] == m).all() for v, m in carried.items()):
            return [marks.get(v) for v in body.inputs[n:]]
        marks = carried


def _by_derivative(eqn: Equation, i: int) -> list[Any]:
    """The structure of an equation's derivative, from the program that computes it."""
    unrolled = unroll(*tangent_program(eqn, [i], bind_forward))
    program, constants = unrolled.program, constant_values(unrolled.program, unrolled.consts)
    marks = sources([program.inputs[-1]])
    marks = propagate(program, marks, lambda e, j: structure(e, j, constants))
    return [marks.get(o) for o in program.outputs]
