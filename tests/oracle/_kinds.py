"""What an equation does to the elements of one operand, decided from its name and shapes alone.

POINTWISE: an output element reads the operand at its own place. MOVES: it reads one other place.
INDEXES: it reads some place along axes whose index varies. SUMS: it reads many places, and each
place is read by few outputs. FLAT: the derivative is zero. LOOPS: a `while` in which nothing
sums or mixes. MIXES: everything else; a rule holds the operand constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braintrace.ops import ETPPrimitive
from braintrace.program import (
    Const,
    Equation,
    Program,
    Var,
    bind,
    flatten,
    inner_equations,
    inner_jaxprs,
    is_inexact,
    prune,
)

from ._operators import reach, tangent_program
from ._unroll import unroll


class Kind(Enum):
    """What becomes of a dependence at an equation."""

    POINTWISE = "pointwise"
    MOVES = "moves"
    INDEXES = "indexes"
    SUMS = "sums"
    FLAT = "flat"
    LOOPS = "loops"
    MIXES = "mixes"


_POINTWISE = set(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clamp complex
    conj convert_element_type cos cosh digamma div erf erf_inv erfc exp exp2 expm1
    igamma igammac imag integer_pow lgamma log log1p logistic max min mul neg
    optimization_barrier pcast polygamma pow pvary real reduce_precision rem rsqrt select_n sin
    sinh sqrt square sub tan tanh zeta
    """.split()
)
_FLAT = set(
    "and ceil eq floor ge gt is_finite le lt ne not or round sign stop_gradient xor".split()
)
_MOVES = set("broadcast_in_dim concatenate pad reshape rev slice transpose".split())
# Moves whose places are operands, from this position on (for scatters: this one).
INDEXED = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "scatter": 1}
INDEXED |= {f"scatter{by}": 1 for by in ("-add", "_add", "-mul", "_mul", "-sub", "_sub")}
INDEXED |= {f"scatter{by}": 1 for by in ("-min", "-max")}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod"}
CONTRACTIONS = {"dot_general", "conv_general_dilated"}
WINDOWS = {"reduce_window_sum", "reduce_window_max", "reduce_window_min"}

Constants = Mapping[Var, Any]
"""The values of a program that depend on no input."""


def kind_of(eqn: Equation, i: int, constants: Constants, varying: set[Any]) -> Kind:
    """The kind of operand `i`; `varying` is what depends on states or operators."""
    name, a = eqn.name, eqn.inputs[i]
    if name in _FLAT or not is_inexact(a.dtype):
        return Kind.FLAT
    if name in _POINTWISE or (name.startswith("custom_") and _all_pointwise(eqn)):
        return Kind.POINTWISE
    if name in _MOVES:
        return Kind.MOVES
    if name in INDEXED:
        return Kind.MOVES if not dynamic_axes(eqn, constants) else Kind.INDEXES
    if name == "sort":
        return Kind.INDEXES  # some place along its axis
    if name in REDUCTIONS:
        single = all(a.shape[n] == 1 for n in eqn.params["axes"])
        return Kind.MOVES if single else Kind.SUMS
    if name in WINDOWS:
        return Kind.SUMS
    if name == "conv_general_dilated" and i == 1:
        return Kind.MIXES
    if name == "conv_general_dilated" or (
        name == "dot_general" and is_constant(eqn.inputs[1 - i], constants)
    ):
        matrix = reads(eqn, i, constants)
        one, few = matrix.sum(1).max(initial=0) <= 1, matrix.sum(0).max(initial=0) <= 1
        return Kind.MOVES if one else Kind.SUMS if few else Kind.MIXES
    if name in ("triangular_solve", "custom_linear_solve") and i == len(eqn.inputs) - 1:
        return Kind.POINTWISE if _divides(eqn, constants) else Kind.MIXES
    if name == "shard_map" and _all_pointwise(eqn):
        return Kind.POINTWISE
    if name == "dot_general":
        contracted, batched = eqn.params["dimension_numbers"]
        if all(a.shape[n] == 1 for n in contracted[i]):
            return Kind.MOVES  # an outer or an element-wise product
        other = eqn.inputs[1 - i].shape
        free = set(range(len(other))) - {*contracted[1 - i], *batched[1 - i]}
        return Kind.SUMS if all(other[n] == 1 for n in free) else Kind.MIXES
    if name == "while":
        return Kind.LOOPS if _loops_apart(eqn, varying) else Kind.MIXES
    return Kind.POINTWISE if _pushes_pointwise(eqn) else Kind.MIXES


def matrices(fun: Callable, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Per result of a linear function of one array its matrix, (result, array)."""
    size = math.prod(shape)
    outs = jax.vmap(fun)(jnp.eye(size).reshape(size, *shape))
    return [np.asarray(o).reshape(size, math.prod(o.shape[1:])).T for o in outs]


def reads(eqn: Equation, i: int, constants: Constants) -> np.ndarray:
    """Which elements of operand `i` each result of a contraction reads: not where the other operand
    is constant and zero."""
    a = eqn.inputs[1 - i]
    other = jnp.ones(a.shape)
    if is_constant(a, constants):
        other = (jnp.asarray(value_of(a, constants)) != 0).astype(float)
    contract = lambda c: bind(eqn, [c, other] if i == 0 else [other, c])
    return matrices(contract, eqn.inputs[i].shape)[0] != 0


def _divides(eqn: Equation, constants: Constants) -> bool:
    """Whether a solve by a constant matrix divides each element by a number."""
    if not all(is_constant(a, constants) for a in eqn.inputs[:-1]):
        return False
    values = [value_of(a, constants) for a in eqn.inputs[:-1]]
    matrix = matrices(lambda c: bind(eqn, [*values, c]), eqn.inputs[-1].shape)[0]
    return not (matrix - np.diag(np.diag(matrix))).any()


def summands(eqn: Equation) -> float:
    """How many elements a result of a sum or product reads; infinity for what is neither."""
    shape, p = eqn.inputs[0].shape, eqn.params
    if eqn.name in REDUCTIONS:
        sizes: Sequence[int] = [shape[n] for n in p["axes"]]
    elif eqn.name in WINDOWS:
        sizes = p["window_dimensions"]
    elif eqn.name == "dot_general":
        sizes = [shape[n] for n in p["dimension_numbers"][0][0]]
    else:
        return np.inf
    return int(np.prod(sizes, dtype=np.int64))


def dynamic_axes(eqn: Equation, constants: Constants) -> tuple[int, ...]:
    """The axes (of the larger array) along which an indexed equation reads a place that varies."""
    at = INDEXED[eqn.name]
    if eqn.name.startswith("dynamic"):
        starts = eqn.inputs[at:]
        part = (eqn.inputs[1] if eqn.name == "dynamic_update_slice" else eqn.outputs[0]).shape
        return tuple(
            n
            for n, start in enumerate(starts)
            if not is_constant(start, constants) and part[n] != eqn.inputs[0].shape[n]
        )
    if is_constant(eqn.inputs[at], constants):
        return ()
    numbers, full = eqn.params["dimension_numbers"], eqn.inputs[0].shape
    if eqn.name == "gather":  # an axis that is taken whole begins at 0
        sizes = eqn.params["slice_sizes"]
        return tuple(n for n in numbers.start_index_map if sizes[n] != full[n])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [n for n in range(len(full)) if n not in gone]
    pairs = zip(window, numbers.update_window_dims, strict=True)
    sizes = {n: eqn.inputs[2].shape[u] for n, u in pairs}
    places = numbers.scatter_dims_to_operand_dims
    return tuple(n for n in places if sizes.get(n) != full[n])


def is_constant(atom: Any, constants: Constants) -> bool:
    return isinstance(atom, Const) or atom in constants


def value_of(atom: Any, constants: Constants) -> Any:
    return atom.value if isinstance(atom, Const) else constants[atom]


def constant_values(program: Program, consts: Sequence[Any]) -> dict[Var, Any]:
    """The values that depend on no input of the program."""
    constants: dict[Var, Any] = dict(zip(program.consts, consts, strict=True))
    for eqn in program.equations:
        if not eqn.effects and all(is_constant(a, constants) for a in eqn.inputs):
            values = [value_of(a, constants) for a in eqn.inputs]
            constants.update(zip(eqn.outputs, bind(eqn, values), strict=True))
    return constants


def loop_body(eqn: Equation) -> tuple[Program, dict[Var, Any]]:
    """The unrolled body of a `while`, and its constants."""
    body = unroll(*flatten(eqn.params["body_jaxpr"]))
    return prune(body.program), constant_values(body.program, body.consts)


def _loops_apart(eqn: Equation, varying: set[Any]) -> bool:
    """Whether nothing that varies is summed or mixed in an iteration of a `while`."""
    if any(isinstance(e.primitive, ETPPrimitive) for e in inner_equations(eqn)):
        return False
    body, constants = loop_body(eqn)
    n = eqn.params["body_nconsts"]
    entries = zip(body.inputs, eqn.inputs[eqn.params["cond_nconsts"] :], strict=True)
    inside = [v for v, a in entries if a in varying and v.is_inexact]
    while True:
        reached = reach(body, inside)
        carried = zip(body.inputs[n:], body.outputs, strict=True)
        more = [v for v, o in carried if o in reached and v not in inside]
        if not more:
            break
        inside += more
    kinds = {
        kind_of(e, i, constants, reached)
        for e in body.equations
        for i, a in enumerate(e.inputs)
        if a in reached
    }
    return not kinds & {Kind.SUMS, Kind.MIXES}


def _pushes_pointwise(eqn: Equation) -> bool:
    """Whether the derivative of an equation that is in no table is pointwise throughout."""
    shapes = {a.shape for a in (*eqn.inputs, *eqn.outputs)}
    if len(shapes - {()}) > 1 or any(True for _ in inner_jaxprs(eqn.params)):
        return False
    try:
        inexact = [i for i, a in enumerate(eqn.inputs) if is_inexact(a.dtype)]
        program, _ = tangent_program(eqn, inexact)
    except NotImplementedError:  # it has no forward derivative
        return False
    tangents = reach(program, program.inputs[len(eqn.inputs) :])
    return all(
        e.name in _POINTWISE | _FLAT or (e.name == "broadcast_in_dim" and not e.inputs[0].shape)
        for e in program.equations
        if any(a in tangents for a in e.inputs)
    )


def _all_pointwise(eqn: Any) -> bool:
    """Whether a function with its own derivative computes each element from its own place."""
    return all(
        inner.primitive.name in _POINTWISE | _FLAT
        or (inner.primitive.name == "broadcast_in_dim" and _lines_up(inner))
        or (
            (inner.primitive.name in ("jit", "pjit") or inner.primitive.name.startswith("custom_"))
            and _all_pointwise(inner)
        )
        for jaxpr in inner_jaxprs(eqn.params)
        for inner in jaxpr.eqns
    )


def _lines_up(eqn: Any) -> bool:
    """Whether a broadcast adds leading axes only, as an element-wise function does by itself."""
    source, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return tuple(eqn.params["broadcast_dimensions"]) == tuple(
        range(len(out) - len(source), len(out))
    )
