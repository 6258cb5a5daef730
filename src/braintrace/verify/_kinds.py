"""What an equation does to elements, decided from its name and shapes alone.

POINTWISE: an output element reads its operands at its own place. MOVES: it reads one known place of
an operand. FLAT: the derivative is zero. MIXES: everything else; a rule holds the result constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from .._jaxpr import Const, Equation, Var, inner_jaxprs


class Kind(Enum):
    """What becomes of a dependence at an equation."""

    POINTWISE = "pointwise"
    MOVES = "moves"
    FLAT = "flat"
    MIXES = "mixes"


_POINTWISE = set(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp complex conj
    convert_element_type copy copy_p cos cosh div erf erf_inv erfc exp exp2 expm1 imag integer_pow
    lgamma log log1p logistic max min mul neg pow real reduce_precision rsqrt select_n sin sinh sqrt
    square sub tan tanh
    """.split()
)
_FLAT = set(
    "and ceil eq floor ge gt is_finite le lt ne not or round sign stop_gradient xor".split()
)
_MOVES = set(
    """
    broadcast_in_dim concatenate expand_dims pad reshape rev slice split squeeze stack tile
    transpose unstack
    """.split()
)
# Moves whose places are operands, from this position on.
_INDEXED = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2}


def kind_of(eqn: Equation, known: Mapping[Var, Any]) -> Kind:
    """The kind of an equation; `known` are the values that depend on no input."""
    name = eqn.name
    if name in _FLAT:
        return Kind.FLAT
    if name in _POINTWISE or (name.startswith("custom_") and _all_pointwise(eqn)):
        return Kind.POINTWISE
    if name in _MOVES:
        return Kind.MOVES
    if name in _INDEXED:
        places = eqn.inputs[_INDEXED[name] :]
        return Kind.MOVES if all(_is_known(a, known) for a in places) else Kind.MIXES
    if name in ("scatter", "scatter-add", "scatter_add"):
        return Kind.MOVES if _is_known(eqn.inputs[1], known) else Kind.MIXES
    if name == "reduce_sum" and all(_shape(eqn.inputs[0])[a] == 1 for a in eqn.params["axes"]):
        return Kind.MOVES
    if name == "dot_general" and all(
        _shape(eqn.inputs[0])[a] == 1 for a in eqn.params["dimension_numbers"][0][0]
    ):
        return Kind.MOVES  # an outer or an element-wise product
    return Kind.MIXES


def _is_known(atom: Any, known: Mapping[Var, Any]) -> bool:
    return isinstance(atom, Const) or atom in known


def _shape(atom: Any) -> tuple[int, ...]:
    return np.shape(atom.value) if isinstance(atom, Const) else atom.shape


def _all_pointwise(eqn: Any) -> bool:
    """Whether a function with its own derivative computes each element from its own place."""
    return all(
        inner.primitive.name in _POINTWISE | _FLAT
        or (inner.primitive.name == "broadcast_in_dim" and not inner.invars[0].aval.shape)
        or (
            (inner.primitive.name in ("jit", "pjit") or inner.primitive.name.startswith("custom_"))
            and _all_pointwise(inner)
        )
        for jaxpr in inner_jaxprs(eqn.params)
        for inner in jaxpr.eqns
    )
