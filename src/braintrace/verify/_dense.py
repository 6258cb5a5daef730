"""Every derivative of every step as a dense matrix: the material the rules are made of.

A step is h' = F(h, θ) with loss L(h, θ), all states and parameters written as real vectors (a
complex array counts twice). Nothing here is clever: one reverse-mode Jacobian per question, on a
program in which the operators' inputs, operands or outputs, or the mixing equations, are held
constant. Letters as in `_reference`.
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

from .._jaxpr import Equation, Var, bind, evaluate
from ._kinds import Kind
from ._sequence import Path, StepFn, at
from ._structure import Structure

Array = jax.Array


@dataclass(frozen=True, eq=False, slots=True)
class DenseStep:
    """The derivatives of one step; `f`, `Y`, `ct` have one entry per traced operator.

    loss gradients `g` = dL/dθ, `l` = dL/dh, `ct` = dL/dy, all exact inside the step;
    `A` = dh'/dh, `B` = dh'/dθ exact; `D` = dh'/dh along the paths D-RTRL keeps;
    `f` = dh'/dy along the same paths; `Y` = dy/dθ with the operator's input held constant;
    `lam` = dL/dh with recurrent entries cut; `rest` = dL/dθ but for the traced operators' operands.
    """

    g: np.ndarray
    l: np.ndarray
    ct: tuple[np.ndarray, ...]
    A: np.ndarray
    B: np.ndarray
    D: np.ndarray
    f: tuple[np.ndarray, ...]
    Y: tuple[np.ndarray, ...]
    lam: np.ndarray
    rest: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Dense:
    """The derivatives of all steps of a sequence, and how to read a gradient vector."""

    steps: tuple[DenseStep, ...]
    groups: tuple[tuple[Path, ...], ...]
    by_path: Callable[[np.ndarray], dict[Path, Any]]


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
    return Dense(tuple(DenseStep(**s) for s in steps), groups, lambda v: by_path(step, v))


def run_step(step: Structure, theta, h, taps, others, args, apply=bind):
    """(loss, h', other states, operator outputs), with a tap on every traced output."""
    index = {o.equation: i for i, o in enumerate(step.traced)}
    ys: list[Any] = [None] * len(step.traced)

    def tapped(eqn: Equation, values: list[Any]) -> list[Any]:
        outs = apply(eqn, values)
        if (i := index.get(eqn)) is not None:
            ys[i] = outs[0]
            outs = [outs[0] + _arrays(taps[i], [outs[0]])[0]]
        return outs

    place = {v: i for i, v in enumerate(step.program.inputs)}
    inputs: list[Any] = [*args, *[None] * (len(place) - step.n_args)]
    for slots, arrays in (
        (step.params, _arrays(theta, [s.value for s in step.params])),
        (step.hidden, _arrays(h, [s.value for s in step.hidden])),
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
    taps = [jnp.zeros(o.y.size * (2 if o.y.is_complex else 1)) for o in step.traced]
    operators = {o.equation: o for o in step.operators}
    traced = {o.equation: o for o in step.traced}

    def run(theta=theta, h=h, taps=taps, apply=bind):
        return run_step(step, theta, h, taps, others, args, apply)

    def kept(eqn, values):
        outs = bind(eqn, values)
        still = eqn in operators or step.kinds[eqn] is Kind.MIXES
        return lax.stop_gradient(outs) if still else outs

    def without_input(equations):
        def apply(eqn, values):
            if eqn in equations and (x := eqn.primitive.x_invar_index) is not None:
                values = [lax.stop_gradient(v) if i == x else v for i, v in enumerate(values)]
            return bind(eqn, values)

        return apply

    def without_operands(eqn, values):
        still = traced[eqn].trained if eqn in traced else ()
        return bind(eqn, [lax.stop_gradient(v) if i in still else v for i, v in enumerate(values)])

    _, new, next_others, _ = run()
    g, l, ct = jax.grad(lambda *a: run(*a)[0], (0, 1, 2))(theta, h, taps)
    B, A = jax.jacrev(lambda *a: run(*a)[1], (0, 1))(theta, h)
    D, f = jax.jacrev(lambda h, taps: run(theta, h, taps, kept)[1], (0, 1))(h, taps)
    Y = jax.jacrev(lambda v: run(v, apply=without_input(operators))[3])(theta) if taps else []
    rest = jax.grad(lambda v: run(v, apply=without_operands)[0])(theta)

    element = _elements([s.entry for s in step.hidden])
    group_of = np.zeros(len(step.hidden), int)
    for i, group in enumerate(step.groups):
        group_of[group] = i
    member = group_of[step.leaf_of()[element]]
    lam = jnp.zeros_like(h)
    for i, equations in enumerate(step.cut):
        cut = jax.grad(lambda v, e=equations: run(h=v, apply=without_input(e))[0])(h)
        lam = jnp.where(member == i, cut, lam)
    D = jnp.where(step.kept[np.ix_(element, element)], D, 0)
    found = dict(g=g, l=l, ct=tuple(ct), A=A, B=B, D=D, f=tuple(f), Y=tuple(Y), lam=lam, rest=rest)
    return found, new, next_others


def by_path(step: Structure, gradient: np.ndarray) -> dict[Path, Any]:
    """A gradient vector as arrays by path, complex ones as dL/d(re) - i dL/d(im)."""
    arrays = _arrays(jnp.asarray(gradient), [s.value for s in step.params])
    found: dict[Path, list[Any]] = {}
    for slot, array in zip(step.params, arrays, strict=True):
        found.setdefault(slot.path, []).append(jnp.conj(array) if slot.entry.is_complex else array)
    return {
        path: jax.tree.unflatten(jax.tree.structure(state.value), found[path])
        if path in found
        else jax.tree.map(jnp.zeros_like, state.value)
        for path, state in step.states.items()
    }


def vector(arrays: Sequence[Any]) -> Array:
    """Arrays as one real vector: each array's real part, then its imaginary part if it has one."""
    parts = [p.ravel() for a in arrays for p in ((a.real, a.imag) if jnp.iscomplexobj(a) else (a,))]
    return jnp.concatenate(parts) if parts else jnp.zeros(0)


def _arrays(flat: Array, like: Sequence[Any]) -> list[Array]:
    """The arrays of a real vector; the inverse of `vector`."""
    out, start = [], 0
    for a in like:
        real = flat[start : start + a.size].reshape(a.shape)
        start += a.size
        if jnp.iscomplexobj(a):
            real = lax.complex(real, flat[start : start + a.size].reshape(a.shape))
            start += a.size
        out.append(real.astype(a.dtype))
    return out


def _elements(entries: Sequence[Var]) -> np.ndarray:
    """Per entry of the real vector, the number of the array element it is a part of."""
    out, start = [], 0
    for v in entries:
        out += [np.arange(start, start + v.size)] * (2 if v.is_complex else 1)
        start += v.size
    return np.concatenate(out)
