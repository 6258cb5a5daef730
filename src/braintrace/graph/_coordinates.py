"""Traces in the coordinates of a parameter, for weights computed from one element by element.

A trace of the operand w = W(theta) says how the states changed with w. Pulled back at the present
theta it is exact as long as theta stays, or W is linear; if theta moves between steps, what was
deposited before has to be multiplied with the slope at that time. With one weight and two steps,

    h_2 = d h_1 + W(theta_2) x_2,   h_1 = W(theta_1) x_1
    dh_2/dtheta = d W'(theta_1) x_1 + W'(theta_2) x_2      not  W'(theta_2) (d x_1 + x_2)

Where W is element-wise the slope is an array like theta, and a deposit is multiplied with it. Where
W is linear in theta with constant coefficients there is nothing to do. Other maps (weight norm, low
rank) would need a trace per pair of elements: theirs is exact while the weights are constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..program import Program, Var, prune, shape_of, trace
from ._moves import sets_of
from ._sets import NONE
from ._step import Step


@dataclass(frozen=True, eq=False, slots=True)
class Mapped:
    """A weight of which each element is a function of one element of one parameter.

    `places` are these elements, counted through the parameter: a broadcast repeats them.
    """

    leaf: int
    places: np.ndarray

    def total(self, gradient: Array, like: Array) -> Array:
        """The gradient of the parameter from one per element of the weight."""
        flat, n = self.places.reshape(-1), like.size
        if np.array_equal(flat, np.arange(n)):
            return gradient.reshape(like.shape).astype(like.dtype)
        zeros = jnp.zeros(n, like.dtype)
        return zeros.at[flat].add(gradient.reshape(-1).astype(like.dtype)).reshape(like.shape)


Operands = Callable[[Sequence[Any], Sequence[Any]], list[dict[str, Any]]]


def coordinates(step: Step, operands: Operands, keys: Sequence[Sequence[str]]) -> list[dict]:
    """Per relation and key how a weight is mapped element by element, None for other maps.

    Keys of operands that are linear in the parameters are left out.
    """
    params = [step.entry(leaf) for leaf in step.params]
    inexact = [i for i, v in enumerate(params) if v.is_inexact]
    shapes = [shape_of(v) for v in params]
    names = [(i, k) for i, of in enumerate(keys) for k in of]

    def tangents(consts, fixed, directions):
        def of(values):
            full = list(fixed)
            for i, value in zip(inexact, values, strict=True):
                full[i] = value
            weights = operands(consts, full)
            return [weights[i][k] for i, k in names]

        return jax.jvp(of, ([fixed[i] for i in inexact],), (list(directions),))[1]

    consts = [shape_of(v) for v in step.program.consts]
    program, _ = trace(tangents, consts, shapes, [shapes[i] for i in inexact])
    # The tangents of all weights as one program of (constants, parameters, directions). Of w.T it
    # is `transpose(da)`, which reads no parameter: linear, nothing to do. Of softplus(a) it is
    # `mul(da, logistic(a))`, which reads a: mapped, if each element reads one of da at most.
    values = set(program.inputs[len(consts) : len(consts) + len(params)])
    directions = dict(zip(program.inputs[-len(inexact) :], inexact, strict=True)) if inexact else {}
    out: list[dict] = [{} for _ in keys]
    for (i, k), tangent in zip(names, program.outputs, strict=True):
        part = prune(program, [tangent])
        read = {a for a in part.read if isinstance(a, Var)}
        if read & values:
            out[i][k] = _mapped(part, {v: directions[v] for v in read if v in directions})
    return out


def _mapped(part: Program, directions: dict[Any, int]) -> Mapped | None:
    """How the output of a tangent program is mapped, if each element reads one of one parameter."""
    if len(directions) != 1:
        return None
    ((source, leaf),) = directions.items()
    own = np.arange(source.size).reshape((*source.shape, 1))
    sets = sets_of(part, {source: own}, {}, 1)
    if isinstance(sets, str) or part.outputs[0].dtype != source.dtype or source.is_complex:
        return None
    (places,) = sets
    if places.shape[-1] != 1 or (places == NONE).any():
        return None
    return Mapped(leaf, places[..., 0])


def slopes(
    operands: Operands,
    mapped: Sequence[Mapping[str, Mapped | None]],
    consts: Sequence[Any],
    params: Sequence[Any],
) -> list[dict[str, Any]]:
    """W'(theta) of every operand that is mapped element by element, per relation."""

    def pushed(leaf: int) -> list[dict[str, Any]]:
        """The derivatives of all operands by a parameter that moves everywhere at once."""
        of = lambda p: operands(consts, [*params[:leaf], p, *params[leaf + 1 :]])
        return jax.jvp(of, (params[leaf],), (jnp.ones_like(params[leaf]),))[1]

    out: list[dict[str, Any]] = [{} for _ in mapped]
    for leaf in sorted({m.leaf for of in mapped for m in of.values() if m is not None}):
        moved = pushed(leaf)
        for i, keys in enumerate(mapped):
            out[i] |= {k: moved[i][k] for k, m in keys.items() if m is not None and m.leaf == leaf}
    return out
