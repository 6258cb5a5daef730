"""Every derivative of every step as a dense matrix: the material the rules are made of.

A step is h' = F(h, θ) with loss L(h, θ), all states and parameters written as real vectors (a
complex array counts twice). Nothing here is clever: one Jacobian per question, reverse mode unless
the step contains a `while`, on a program in which the operators' inputs, operands or outputs, or
what mixes, are held constant. Letters as in `_rules`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace._jaxpr import Equation, Var, bind, evaluate
from braintrace.verify._sequence import unvector, vector

from ._bound import Bound
from ._structure import Structure
from ._together import group_of

Array = jax.Array


@dataclass(frozen=True, eq=False, slots=True)
class DenseStep:
    """The derivatives of one step; `F`, `Y` have one entry per steady operator, `D`, `f`, `ct` one
    per traced operator (the first of them).

    loss gradients `g` = dL/dθ, `l` = dL/dh, `ct` = dL/dy, all exact inside the step;
    `A` = dh'/dh, `B` = dh'/dθ, `F` = dh'/dy exact; `D` = dh'/dh along the paths D-RTRL keeps;
    `f` = dh'/dy along the same paths; `Y` = dy/dθ with the operators' inputs held constant;
    `lam` = dL/dh with recurrent entries cut; `rest` = dL/dθ but for the traced operators' operands;
    `l_set` = dL/dh' of a state where it and those it is together with are inputs of their own, and
    `mu` = `lam` beside these; `h` = h' itself.
    """

    g: np.ndarray
    l: np.ndarray
    ct: tuple[np.ndarray, ...]
    A: np.ndarray
    B: np.ndarray
    F: tuple[np.ndarray, ...]
    D: tuple[np.ndarray, ...]
    f: tuple[np.ndarray, ...]
    Y: tuple[np.ndarray, ...]
    lam: np.ndarray
    rest: np.ndarray
    l_set: np.ndarray
    mu: np.ndarray
    h: np.ndarray


def run_step(step: Structure, theta, h, taps, others, args, apply=bind, exits=None, sealed=None):
    """(loss, h', other states, operator outputs), with a tap on the outputs of steady operators.

    `exits` makes stored values inputs of their own: what reads them sees a constant plus these; all
    of them, or those of the `sealed` slots.
    """
    index = {o.equation: i for i, o in enumerate(step.steady[: len(taps)])}
    ys: list[Any] = [None] * len(index)
    stored: dict[Any, Any] = {}
    if exits is not None:
        parts = unvector(exits, [s.value for s in step.hidden])
        for k, (slot, part) in enumerate(zip(step.hidden, parts, strict=True)):
            if sealed is None or k in sealed:
                stored.setdefault(slot.exit, part)  # a value in two states counts in the first

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
    for slots, arrays in (
        (step.params, unvector(theta, [s.value for s in step.params])),
        (step.hidden, unvector(h, [s.value for s in step.hidden])),
        (step.others, others),
    ):
        for slot, array in zip(slots, arrays, strict=True):
            inputs[place[slot.entry]] = array
    outs = evaluate(step.program, step.consts, inputs, tapped)
    new = vector([outs[s.output] for s in step.hidden])
    return outs[0], new, [outs[s.output] for s in step.others], [vector([y]) for y in ys]


def observe(
    step: Structure,
    sets: Sequence[frozenset[int]],
    bound: Bound,
    h: Array,
    others: list[Any],
    args: list[Any],
):
    """All derivatives of one step, the next states; `sets` are those of `together`."""
    theta = vector([s.value for s in step.params])
    taps = [jnp.zeros(o.y.size * (2 if o.y.is_complex else 1)) for o in step.steady]
    n, jacobian = len(step.traced), bound.jacobian

    def run(theta=theta, h=h, taps=taps, apply=bound.plain):
        return run_step(step, theta, h, taps, others, args, apply)

    without_inputs = bound.without_input([o.equation for o in step.operators])
    _, new, next_others, _ = run()
    g, l, ct = jacobian(lambda *a: run(*a)[0], (0, 1, 2))(theta, h, taps)
    B, A, F = jacobian(lambda *a: run(*a)[1], (0, 1, 2))(theta, h, taps)
    D, f = jacobian(lambda h, taps: run(theta, h, taps, bound.kept)[1], (0, 1))(h, taps[:n])
    Y = jacobian(lambda v: run(v, apply=without_inputs)[3])(theta) if taps else []
    rest = jacobian(lambda v: run(v, apply=bound.without_operands)[0])(theta)

    element = elements([s.entry for s in step.hidden])
    group, lam = group_of(step), jnp.zeros_like(h)
    for i, equations in enumerate(step.cut):
        cut = jacobian(lambda v, e=equations: run(h=v, apply=bound.without_input(e))[0])(h)
        lam = jnp.where(group[step.leaf_of()[element]] == i, cut, lam)
    l_set, mu = at_exits(step, sets, [step.cut[i] for i in group], bound, h, others, args)
    D = [jnp.where(step.kept[np.ix_(element, element)], D, 0)] * n
    if step.channels:  # their sums are kept
        wide = lambda h, taps: run(theta, h, taps, bound.apart)[1]
        whole, tails = jacobian(wide, (0, 1))(h, taps[:n])
        chosen = [o in step.channels for o in step.traced]
        D = [whole if c else d for c, d in zip(chosen, D, strict=True)]
        f = [t if c else old for c, t, old in zip(chosen, tails, f, strict=True)]
    found = dict(
        g=g,
        l=l,
        ct=tuple(ct[:n]),
        A=A,
        B=B,
        F=tuple(F),
        D=tuple(D),
        f=tuple(f),
        Y=tuple(Y),
        lam=lam,
        rest=rest,
        l_set=l_set,
        mu=mu,
        h=new,
    )
    return found, new, next_others


def at_exits(
    step: Structure,
    sets: Sequence[frozenset[int]],
    cut: Sequence[Collection[Equation]],
    bound: Bound,
    h: Array,
    others: list[Any],
    args: list[Any],
) -> tuple[Array, Array]:
    """Per state dL/dh' where the states of its set are inputs of their own, and dL/dh beside them
    with the inputs of the operators in `cut` held constant."""
    theta = vector([s.value for s in step.params])
    leaf = step.leaf_of()[elements([s.entry for s in step.hidden])]
    l = mu = none = jnp.zeros_like(h)
    for k, (sealed, equations) in enumerate(zip(sets, cut, strict=True)):

        def loss(h, exits, apply=bound.plain, sealed=sealed):
            return run_step(step, theta, h, [], others, args, apply, exits, sealed)[0]

        beside = lambda v, loss=loss, e=equations: loss(v, none, bound.without_input(e))
        l = jnp.where(leaf == k, bound.jacobian(loss, 1)(h, none), l)
        mu = jnp.where(leaf == k, bound.jacobian(beside)(h), mu)
    return l, mu


def elements(entries: Sequence[Var]) -> np.ndarray:
    """Per entry of the real vector, the number of the array element it is a part of."""
    out, start = [], 0
    for v in entries:
        out += [np.arange(start, start + v.size)] * (2 if v.is_complex else 1)
        start += v.size
    return np.concatenate(out)
