"""Products of one input with several weights as one product.

    i = x @ W_i;  f = x @ W_f      is      y = x @ [W_i, W_f];  i = y[:n];  f = y[n:]

A loop would take them one after another, and a CPU takes longer for many small products. Not where
a loop may be a kernel, which would read copies of the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax import lax

from ..ops import ETPPrimitive, Operator
from ..program import Atom, Const, Equation, Var
from ._loops import kernels_allowed


@dataclass(frozen=True, slots=True)
class Joined:
    """Equations with joined products: those products, and the part that an equation became."""

    equations: list[Equation]
    products: frozenset[Equation] = frozenset()
    part_of: Mapping[Equation, Equation] = field(default_factory=dict)

    def place_of(self, eqn: Equation) -> Equation:
        """The equation that computes what this one did."""
        return self.part_of.get(eqn, eqn)


def products_joined(
    equations: Sequence[Equation],
    known: Collection[Atom],
    only: Collection[Equation] | None = None,
) -> Joined:
    """The equations of a step with joined products.

    Args:
        equations: in order.
        known: what is computed of this alone is constant: weights.
        only: the products that may be joined; None for all.
    """
    if kernels_allowed():
        return Joined(list(equations))
    fixed, rest, constant = list[Equation](), list[Equation](), set[Atom](known)
    for eqn in equations:  # weights come first
        now = not eqn.effects and all(isinstance(a, Const) or a in constant for a in eqn.inputs)
        (fixed if now else rest).append(eqn)
        constant.update(eqn.outputs if now else ())
    alike: dict[Any, list[Equation]] = {}
    for eqn in rest if only is None else [e for e in rest if e in only]:
        if (key := _joint_key(eqn, constant)) is not None:
            alike.setdefault(key, []).append(eqn)
    groups = {e: group for group in alike.values() if len(group) > 1 for e in group}
    out, products, part_of = fixed, list[Equation](), dict[Equation, Equation]()
    for eqn in rest:
        group = groups.get(eqn)
        if group is None:
            out.append(eqn)
        elif eqn is group[0]:
            before, product, parts = _as_one(group)
            out += [*before, product, *parts]
            products.append(product)
            part_of.update(zip(group, parts, strict=True))
    return Joined(out, frozenset(products), part_of)


def _joint_key(eqn: Equation, known: Collection[Atom]) -> Any:
    """Equal for products that may be joined; None if that is none."""
    at = getattr(eqn.primitive, "x_invar_index", None)
    if not isinstance(eqn.primitive, ETPPrimitive) or at is None:
        return None
    operator = Operator.of(eqn.primitive, eqn.params, eqn.inputs, eqn.outputs[0])
    axes = operator.joint
    weights = [eqn.inputs[i] for i in operator.positions.values()]
    if axes is None or not all(isinstance(a, Const) or a in known for a in weights):
        return None
    other = [
        (np.delete(a.shape, axes[k]).tobytes(), str(a.dtype))
        for k, a in zip((*operator.positions, "y"), (*weights, eqn.outputs[0]), strict=True)
    ]
    return eqn.primitive, tuple(sorted(eqn.params.items())), eqn.inputs[at], tuple(other)


def _as_one(group: Sequence[Equation]) -> tuple[list[Equation], Equation, list[Equation]]:
    """Joined weights, one product in the place of several, and the parts of its result."""
    first = group[0]
    operator = Operator.of(first.primitive, first.params, first.inputs, first.outputs[0])
    axes = operator.joint
    assert axes is not None
    before, inputs = [], list(first.inputs)

    def joined(atoms: Sequence[Atom], axis: int) -> Var:
        shape = list(atoms[0].shape)
        shape[axis] = sum(a.shape[axis] for a in atoms)
        return Var(tuple(shape), atoms[0].dtype)

    for k, i in operator.positions.items():
        parts = [e.inputs[i] for e in group]
        weight = inputs[i] = joined(parts, axes[k])
        params = {"dimension": axes[k]}
        what: Any = {"primitive": lax.concatenate_p, "inputs": tuple(parts), "params": params}
        before.append(replace(first, outputs=(weight,), **what))
    ys, axis = [e.outputs[0] for e in group], axes["y"]
    y = joined(ys, axis)
    after, start = [], 0
    for eqn, part in zip(group, ys, strict=True):
        starts, stops = [0] * len(y.shape), list(y.shape)
        starts[axis], stops[axis] = start, start + part.shape[axis]
        start = stops[axis]
        where = {"start_indices": tuple(starts), "limit_indices": tuple(stops), "strides": None}
        after.append(
            replace(eqn, primitive=lax.slice_p, inputs=(y,), outputs=(part,), params=where)
        )
    return before, replace(first, inputs=tuple(inputs), outputs=(y,)), after
