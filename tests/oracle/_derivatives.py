"""Every derivative of a step as a dense matrix: the material of the rules.

A step is h' = F(h, θ) with loss L(h, θ), all states and parameters written as real vectors (a
complex array counts twice). Nothing here is clever: one Jacobian per question, reverse mode unless
the step contains a `while`, on a program in which the operators' inputs, operands or outputs, or
what mixes, are held constant. Letters as in `_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace.program import Equation, Var, bind, evaluate
from braintrace.verify._sequence import unvector, vector

from ._sharing import group_of
from ._structure import Structure
from ._variants import Variants

Array = Any  # of JAX while it is computed, then of numpy


class DenseStep(NamedTuple):
    """The derivatives of one step; `F`, `Y` have one entry per steady operator, `D`, `f`, `ct` one
    per traced operator (the first of them).

    loss gradients `g` = dL/dθ, `l` = dL/dh, `ct` = dL/dy, all exact inside the step;
    `A` = dh'/dh, `B` = dh'/dθ, `F` = dh'/dy exact; `D` = dh'/dh along the paths D-RTRL keeps;
    `f` = dh'/dy along the same paths; `Y` = dy/dθ with the operators' inputs held constant;
    `lam` = dL/dh with recurrent entries cut; `rest` = dL/dθ but for the traced operators' operands;
    `h` = h' itself. What few rules read is computed when they do: `exits()` of these two.
    `l_set` = dL/dh' of a state where it and those it shares a trace with are inputs of their own,
    and `mu` = `lam` beside these.
    """

    g: Array
    l: Array
    ct: list[Array]
    A: Array
    B: Array
    F: list[Array]
    D: list[Array]
    f: list[Array]
    Y: list[Array]
    lam: Array
    rest: Array
    h: Array
    exits: Callable[[], tuple[Array, Array]] | None = None

    @property
    def l_set(self) -> Array:
        return self.exits()[0]

    @property
    def mu(self) -> Array:
        return self.exits()[1]


def run_step(step: Structure, theta, h, taps, others, args, apply=bind, exits=None, sealed=None):
    """(loss, h', other states, operator outputs), with a tap on the outputs of steady operators.

    `exits` makes stored values inputs of their own: what reads them sees a constant plus these; all
    of them, or those of the `sealed` leaves.
    """
    index = {o.equation: i for i, o in enumerate(step.steady[: len(taps)])}
    ys: list[Any] = [None] * len(index)
    stored: dict[Any, Any] = {}
    if exits is not None:
        parts = unvector(exits, [leaf.value for leaf in step.hidden])
        for k, (leaf, part) in enumerate(zip(step.hidden, parts, strict=True)):
            if sealed is None or k in sealed:
                stored.setdefault(leaf.exit, part)  # a value in two states counts in the first

    def tapped(eqn: Equation, values: list[Any]) -> list[Any]:
        outs = apply(eqn, values)
        if (i := index.get(eqn)) is not None:
            ys[i] = outs[0]
            outs = [outs[0] + unvector(taps[i], [outs[0]])[0]]
        return [
            lax.stop_gradient(o) + stored[v] if v in stored else o
            for v, o in zip(eqn.outputs, outs, strict=True)
        ]

    place = {v: i for i, v in enumerate(step.program.inputs)}
    inputs: list[Any] = [*args, *[None] * (len(place) - step.n_args)]
    for leaves, arrays in (
        (step.params, unvector(theta, [leaf.value for leaf in step.params])),
        (step.hidden, unvector(h, [leaf.value for leaf in step.hidden])),
        (step.others, others),
    ):
        for leaf, array in zip(leaves, arrays, strict=True):
            inputs[place[leaf.entry]] = array
    outs = evaluate(step.program, step.consts, inputs, tapped)
    new = vector([outs[leaf.output] for leaf in step.hidden])
    return outs[0], new, [outs[leaf.output] for leaf in step.others], [vector([y]) for y in ys]


def derivatives(
    variants: Variants, h: Array, others: list[Any], args: list[Any]
) -> tuple[DenseStep, list[Any]]:
    """All derivatives of one step but those at its exits, and its other states."""
    step, jacobian = variants.step, variants.jacobian
    theta = vector([leaf.value for leaf in step.params])
    taps = [jnp.zeros(o.y.size * (2 if o.y.is_complex else 1)) for o in step.steady]
    n = len(step.traced)

    def run(theta=theta, h=h, taps=taps, apply=variants.plain):
        return run_step(step, theta, h, taps, others, args, apply)

    without_inputs = variants.without_input([o.equation for o in step.operators])

    def whole(*a):
        loss, new, next_others, _ = run(*a)
        return (loss, new), (new, next_others)

    found, (new, next_others) = jacobian(whole, (0, 1, 2), has_aux=True)(theta, h, taps)
    (g, l, ct), (B, A, F) = found
    D, f = jacobian(lambda h, taps: run(theta, h, taps, variants.kept)[1], (0, 1))(h, taps[:n])
    Y = jacobian(lambda v: run(v, apply=without_inputs)[3])(theta) if taps else []
    rest = jacobian(lambda v: run(v, apply=variants.without_operands)[0])(theta)

    element = elements([leaf.entry for leaf in step.hidden])
    group, lam = group_of(step), jnp.zeros_like(h)
    for i, equations in enumerate(step.cut):
        cut = jacobian(lambda v, e=equations: run(h=v, apply=variants.without_input(e))[0])(h)
        lam = jnp.where(group[step.leaf_of()[element]] == i, cut, lam)
    D = [jnp.where(step.kept[np.ix_(element, element)], D, 0)] * n
    if step.channels:  # nothing is cut of these but operators
        outside = lambda h, taps: run(theta, h, taps, variants.outside_operators)[1]
        all_D, all_f = jacobian(outside, (0, 1))(h, taps[:n])
        for k, o in enumerate(step.traced):
            if o in step.channels:
                D[k], f[k] = all_D, all_f[k]
    return DenseStep(g, l, ct[:n], A, B, F, D, f, Y, lam, rest, new), next_others


def at_exits(
    variants: Variants,
    sets: Sequence[frozenset[int]],
    cut: Sequence[Collection[Equation]],
    h: Array,
    others: list[Any],
    args: list[Any],
) -> tuple[Array, Array]:
    """Per state dL/dh' where the states of its set are inputs of their own, and dL/dh beside them
    with the inputs of the operators in `cut` held constant."""
    step, jacobian = variants.step, variants.jacobian
    theta = vector([leaf.value for leaf in step.params])
    leaf = step.leaf_of()[elements([leaf.entry for leaf in step.hidden])]
    l = mu = none = jnp.zeros_like(h)
    for k, (sealed, equations) in enumerate(zip(sets, cut, strict=True)):

        def loss(h, exits, apply=variants.plain, sealed=sealed):
            return run_step(step, theta, h, [], others, args, apply, exits, sealed)[0]

        beside = lambda v, loss=loss, e=equations: loss(v, none, variants.without_input(e))
        l = jnp.where(leaf == k, jacobian(loss, 1)(h, none), l)
        mu = jnp.where(leaf == k, jacobian(beside)(h), mu)
    return l, mu


def elements(entries: Sequence[Var]) -> np.ndarray:
    """Per entry of the real vector, the number of the array element it is a part of."""
    out, start = [], 0
    for v in entries:
        out += [np.arange(start, start + v.size)] * (2 if v.is_complex else 1)
        start += v.size
    return np.concatenate(out)
