"""Every derivative of every step as a dense matrix: the material the rules are made of.

A step is h' = F(h, θ) with loss L(h, θ), all states and parameters written as real vectors (a
complex array counts twice). Nothing here is clever: one Jacobian per question, reverse mode unless
the step contains a `while`, on a program in which the operators' inputs, operands or outputs, or
what mixes, are held constant. Letters as in `_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import Equation, Var, bind, bind_forward, evaluate
from ._sequence import Path, StepFn, at, unvector, vector
from ._structure import Structure

Array = jax.Array


@dataclass(frozen=True, eq=False, slots=True)
class DenseStep:
    """The derivatives of one step; `F`, `Y` have one entry per steady operator, `f`, `ct` one per
    traced operator (the first of them).

    loss gradients `g` = dL/dθ, `l` = dL/dh, `ct` = dL/dy, all exact inside the step;
    `A` = dh'/dh, `B` = dh'/dθ, `F` = dh'/dy exact; `D` = dh'/dh along the paths D-RTRL keeps;
    `f` = dh'/dy along the same paths; `Y` = dy/dθ with the operators' inputs held constant;
    `lam` = dL/dh with recurrent entries cut; `rest` = dL/dθ but for the traced operators' operands;
    `l_exit` = dL/dh' where every stored value is an input of its own, `bypass` = dL/dh beside them.
    """

    g: np.ndarray
    l: np.ndarray
    ct: tuple[np.ndarray, ...]
    A: np.ndarray
    B: np.ndarray
    F: tuple[np.ndarray, ...]
    D: np.ndarray
    f: tuple[np.ndarray, ...]
    Y: tuple[np.ndarray, ...]
    lam: np.ndarray
    rest: np.ndarray
    l_exit: np.ndarray
    bypass: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Dense:
    """The derivatives of all steps of a sequence, and how to read a gradient vector.

    `slots(n)`: SnAp's pattern, per steady operator (states, y), both as real vectors.
    """

    steps: tuple[DenseStep, ...]
    groups: tuple[tuple[Path, ...], ...]
    by_path: Callable[[np.ndarray], dict[Path, Any]]
    slots: Callable[[int], list[np.ndarray]]


def dense(model: brainstate.nn.Module, step_fn: StepFn, *sequences: Any) -> Dense:
    """Run the model from its present states; the model is left as it was."""
    step = Structure.of(model, step_fn, at(sequences, 0))
    one = jax.jit(lambda *a: observe(step, *a))
    h, others = vector([s.value for s in step.hidden]), [s.value for s in step.others]
    length = len(jax.tree.leaves(sequences)[0])
    steps = []
    for t in range(length):
        found, h, others = one(h, others, jax.tree.leaves(at(sequences, t)))
        steps.append(jax.tree.map(np.asarray, found))
    groups = tuple(tuple(step.hidden[k].path for k in g) for g in step.groups)

    def slots(n: int) -> list[np.ndarray]:
        rows = _elements([s.entry for s in step.hidden])
        pairs = zip(step.slots(n), step.steady, strict=True)
        return [found[np.ix_(rows, _elements([o.y]))] for found, o in pairs]

    return Dense(tuple(DenseStep(**s) for s in steps), groups, lambda v: by_path(step, v), slots)


def run_step(step: Structure, theta, h, taps, others, args, apply=bind, exits=None):
    """(loss, h', other states, operator outputs), with a tap on the outputs of steady operators.

    `exits` makes every stored value an input of its own: what reads it sees a constant plus these.
    """
    index = {o.equation: i for i, o in enumerate(step.steady[: len(taps)])}
    ys: list[Any] = [None] * len(index)
    stored: dict[Any, Any] = {}
    if exits is not None:
        parts = unvector(exits, [s.value for s in step.hidden])
        for slot, part in zip(step.hidden, parts, strict=True):
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


def observe(step: Structure, h: Array, others: list[Any], args: list[Any]):
    """All derivatives of one step, the next states."""
    theta = vector([s.value for s in step.params])
    taps = [jnp.zeros(o.y.size * (2 if o.y.is_complex else 1)) for o in step.steady]
    n = len(step.traced)
    operators = {o.equation: o for o in step.operators}
    trained = {o.equation: o.trained for o in step.traced}
    # A `while` has no reverse mode.
    plain, jacobian = (bind_forward, jax.jacfwd) if step.loops else (bind, jax.jacrev)

    def run(theta=theta, h=h, taps=taps, apply=plain, exits=None):
        return run_step(step, theta, h, taps, others, args, apply, exits)

    def still(eqn, values, places):
        return plain(
            eqn, [lax.stop_gradient(v) if i in places else v for i, v in enumerate(values)]
        )

    def kept(eqn, values):
        if eqn in operators:
            return lax.stop_gradient(plain(eqn, values))
        return still(eqn, values, [i for i in range(len(values)) if (eqn, i) in step.held])

    def without_input(equations):
        return lambda eqn, values: still(
            eqn, values, [operators[eqn].x_at] if eqn in equations else []
        )

    def without_operands(eqn, values):
        return still(eqn, values, trained.get(eqn, ()))

    _, new, next_others, _ = run()
    g, l, ct = jacobian(lambda *a: run(*a)[0], (0, 1, 2))(theta, h, taps)
    B, A, F = jacobian(lambda *a: run(*a)[1], (0, 1, 2))(theta, h, taps)
    D, f = jacobian(lambda h, taps: run(theta, h, taps, kept)[1], (0, 1))(h, taps[:n])
    Y = jacobian(lambda v: run(v, apply=without_input(operators))[3])(theta) if taps else []
    rest = jacobian(lambda v: run(v, apply=without_operands)[0])(theta)
    apart = lambda h, exits: run(h=h, exits=exits)[0]
    bypass, l_exit = jacobian(apart, (0, 1))(h, jnp.zeros_like(h))

    element = _elements([s.entry for s in step.hidden])
    group_of = np.zeros(len(step.hidden), int)
    for i, group in enumerate(step.groups):
        group_of[group] = i
    member = group_of[step.leaf_of()[element]]
    lam = jnp.zeros_like(h)
    for i, equations in enumerate(step.cut):
        cut = jacobian(lambda v, e=equations: run(h=v, apply=without_input(e))[0])(h)
        lam = jnp.where(member == i, cut, lam)
    D = jnp.where(step.kept[np.ix_(element, element)], D, 0)
    found = dict(
        g=g,
        l=l,
        ct=tuple(ct[:n]),
        A=A,
        B=B,
        F=tuple(F),
        D=D,
        f=tuple(f),
        Y=tuple(Y),
        lam=lam,
        rest=rest,
        l_exit=l_exit,
        bypass=bypass,
    )
    return found, new, next_others


def by_path(step: Structure, gradient: np.ndarray) -> dict[Path, Any]:
    """A gradient vector as arrays by path, complex ones as dL/d(re) - i dL/d(im)."""
    arrays = unvector(jnp.asarray(gradient), [s.value for s in step.params])
    found: dict[Path, list[Any]] = {}
    for slot, array in zip(step.params, arrays, strict=True):
        found.setdefault(slot.path, []).append(jnp.conj(array) if slot.entry.is_complex else array)
    return {
        path: jax.tree.unflatten(jax.tree.structure(state.value), found[path])
        if path in found
        else jax.tree.map(jnp.zeros_like, state.value)
        for path, state in step.states.items()
    }


def _elements(entries: Sequence[Var]) -> np.ndarray:
    """Per entry of the real vector, the number of the array element it is a part of."""
    out, start = [], 0
    for v in entries:
        out += [np.arange(start, start + v.size)] * (2 if v.is_complex else 1)
        start += v.size
    return np.concatenate(out)
