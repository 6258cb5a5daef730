"""What an analysis of a program may depend on, as a key."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from ._evaluate import bind, pullback
from ._flatten import CUSTOM_DERIVATIVE, flatten, inner_equations, trace
from ._jax import is_traced, open_jaxpr
from ._primitives import at_positions
from ._records import Atom, Const, Equation, Program, Var, is_inexact, pattern, shape_of


def fingerprint(program: Program, consts: Sequence[Any], *, values: bool = False) -> tuple:
    """What an analysis of the program may depend on, hashable.

    Floating values are left out unless `values` is set, but for the `pattern` of their zeros (an
    analysis reads nothing else); integers count, since indices decide which element is read. A
    primitive counts as an object: a name may be registered again for another function.
    """
    number: dict[Var, int] = {}

    def name(atom: Atom) -> Hashable:
        return _value_key(atom.value, True) if isinstance(atom, Const) else number[atom]

    def declare(var: Var) -> tuple:
        return (number.setdefault(var, len(number)), var.shape, str(var.dtype))

    heads = tuple(declare(v) for v in (*program.consts, *program.inputs))
    body = tuple(
        (
            e.primitive,
            tuple(name(a) for a in e.inputs),
            tuple(declare(v) for v in e.outputs),
            _params_key(e, derivatives=not values),
        )
        for e in program.equations
    )
    constants = tuple(_value_key(c, values) for c in consts)
    return heads, body, tuple(name(o) for o in program.outputs), constants


def _value_key(value: Any, exact: bool) -> Hashable:
    dtype = Const(value).dtype
    traced = is_traced(value)
    if traced and exact:
        return object()  # belongs to a running trace: equal to nothing met later
    if traced or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return ("traced" if traced else "key", np.shape(value), str(dtype))
    if is_inexact(dtype) and not exact:
        nonzero = pattern(value)
        zeros = None if nonzero is None else np.packbits(nonzero).tobytes()
        return ("value", np.shape(value), str(dtype), zeros)
    array = np.asarray(value)
    return (array.shape, str(array.dtype), array.tobytes())


# Parameters that are new objects in every trace; `_derivative_key` stands for what they compute.
_THUNKS = {"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"}


def _params_key(eqn: Equation, derivatives: bool) -> Hashable:
    plain = tuple((k, _param_key(v)) for k, v in sorted(eqn.params.items()) if k not in _THUNKS)
    names = [eqn.name, *(e.primitive.name for e in inner_equations(eqn))]
    custom = derivatives and any(n in CUSTOM_DERIVATIVE for n in names)
    return (plain, _derivative_key(eqn)) if custom else plain


def _param_key(value: Any) -> Hashable:
    if hasattr(open_jaxpr(value), "eqns"):
        return fingerprint(*flatten(value), values=True)
    if isinstance(value, (tuple, list)):
        return tuple(_param_key(v) for v in value)
    if isinstance(value, np.ndarray):
        return _value_key(value, True)
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def _derivative_key(eqn: Equation) -> tuple:
    """A custom derivative is a Python function: recognise it by what it computes.

    One that raises is recognised by its error, which whoever takes the derivative meets again.
    """
    try:
        return _derivative(eqn)
    except Exception as error:
        return type(error), str(error)


def _derivative(eqn: Equation) -> tuple:
    """The fingerprint of the derivative of an equation."""
    point = [shape_of(a) for a in eqn.inputs]
    inexact = [i for i, p in enumerate(point) if is_inexact(p.dtype)]

    if eqn.name == "custom_vjp_call":  # its backward rule need not be linear
        cotangents = [shape_of(o) for o in eqn.outputs if o.is_inexact]
        pulled = lambda values, cotangents: pullback(eqn, values)[1](cotangents)
        return fingerprint(*trace(pulled, point, cotangents), values=True)

    def pushed(values, tangents):
        function = at_positions(lambda full: bind(eqn, full), values, inexact)
        return jax.jvp(function, tuple(values[i] for i in inexact), tangents)

    program, consts = trace(pushed, point, tuple(point[i] for i in inexact))
    return fingerprint(program, consts, values=True)
