"""Backward rules that add a constant to their cotangent: the constant as a loss of its own.

A `custom_vjp` may add what no loss contains, ct_in = B ct_out + c (a penalty on activity). In
backpropagation c counts once in every step, whether or not the loss of the step does. Traces carry
what is linear, so `explicit` makes the backward rule ct_in = B ct_out and returns the *penalty*
Σ <c, in>, whose gradient is c, as one more output of the step.

    ct + 0.1 h   at h = [1, 2]   becomes   ct   and the penalty   0.1 h1 + 0.2 h2, c held constant
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..ops import zeros_in
from ..program import (
    Atom,
    Equation,
    Feed,
    Outcome,
    Program,
    Var,
    at_line_of,
    bind,
    close,
    deep_equations,
    is_inexact,
    is_traced,
    opened,
    pullback,
    pulled_zeros,
    run,
    shape_of,
    trace,
)
from ._reach import bits_of, closure, indices_of, reach, union_of
from ._sites import located
from ._while import rule_failure

Carried = Sequence[tuple[Var, Atom]]  # of every state its entry and its exit


def explicit(
    program: Program, n_results: int, carried: Carried, loss: int | None = None
) -> Program | None:
    """The program with linear backward rules, and two penalties as its last outputs.

    The first is of the rules that one of the first `n_results` outputs depends on, now or later:
    backpropagation runs these. The second is of the others, which run if a loss reads a state. With
    the index of a `loss` among the outputs, its derivative has the first penalty's in it instead.
    None if the rules are linear already.
    """
    affine = affine_equations(program, program.outputs)
    if not affine:
        return None
    counted = affine_equations(program, _lasting(program, program.outputs[:n_results], carried))

    def fun(consts: list[Any], inputs: list[Any]) -> list[Any]:
        outs, (penalty, other) = _run(program, consts, inputs, affine, counted)
        if loss is None:
            return [*outs, penalty, other]
        outs[loss] += penalty - jax.lax.stop_gradient(penalty)
        return outs

    n = len(program.consts)
    shapes = ([shape_of(v) for v in vs] for vs in (program.consts, program.inputs))
    linear = close(*trace(fun, *shapes))
    return Program(linear.inputs[:n], linear.inputs[n:], linear.equations, linear.outputs)


def _lasting(program: Program, results: Sequence[Atom], carried: Carried) -> list[Atom]:
    """The results, and the exits of states that results of later steps depend on."""
    # out = h, h' = f(h, g), g' = k(g), p' = q(p): out reads h now, so h is alive, so f is run by
    # later steps, which read g. Nothing that is returned ever reads p: its rules are not run.
    bits = reach(program, {entry: 1 << i for i, (entry, _) in enumerate(carried)})
    reads = [bits_of(out, bits) for _, out in carried]
    alive = closure(union_of(bits_of(out, bits) for out in results), reads)
    return [*results, *(carried[i][1] for i in indices_of(alive))]


def affine_equations(program: Program, outputs: Sequence[Atom]) -> frozenset[Equation]:
    """The custom reverse rules, in bodies too, that may add a constant to a cotangent.

    A rule on whose result these outputs do not depend, or only detached, is never run.
    """
    rules = [e for e in deep_equations(program) if e.name == "custom_vjp_call"]
    seeds = {o: 1 << i for i, e in enumerate(rules) for o in e.outputs}
    bits = reach(program, seeds) if rules else {}
    used = union_of(bits_of(out, bits) for out in outputs)
    return frozenset(e for i, e in enumerate(rules) if used >> i & 1 and _adds(e))


def _run(
    program: Program,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    affine: Collection[Equation],
    counted: Collection[Equation],
) -> tuple[list[Any], tuple[Array, Array]]:
    """Run a program with linear backward rules; then the penalties of `counted` and of others."""
    around = {e: [o for o, _ in bodies] for e, bodies in located(program) if e in affine}
    # The derivative of a `while` is taken as it stands.
    rules = [e for e, outer in around.items() if all(o.name != "while" for o in outer)]
    index = {e: i for i, e in enumerate(rules)}
    lengths = ([o.params["length"] for o in around[e] if o.name == "scan"] for e in rules)
    feed = {i: jnp.zeros(shape) for i, shape in enumerate(lengths)}

    def apply(eqn: Equation, values: list[Any], feed: Feed) -> Outcome:
        if eqn not in index:
            return bind(eqn, values), {}
        with at_line_of(eqn):
            outs, penalty = _divided(eqn, values)
        return outs, {index[eqn]: penalty}

    outs, seen = run(program, consts, inputs, apply, opened(program, index.get), feed)
    total = [jnp.zeros(()), jnp.zeros(())]
    for eqn, i in index.items():
        total[eqn not in counted] += seen[i].sum()
    return outs, (total[0], total[1])


def _divided(eqn: Equation, values: list[Any]) -> tuple[list[Any], Array]:
    """The equation with a linear backward rule, and its penalty."""
    inexact = [i for i, a in enumerate(eqn.inputs) if is_inexact(a.dtype)]

    @jax.custom_vjp
    def linear(*args):
        return bind(eqn, args)

    def forward(*args):
        outs, pull = pullback(eqn, args)
        return outs, (pull, pulled_zeros(eqn, pull))

    def backward(residuals, cotangents):
        pull, constant = residuals
        pulled = pull([c for c, o in zip(cotangents, eqn.outputs, strict=True) if o.is_inexact])
        rest = {i: a - b for i, a, b in zip(inexact, pulled, constant, strict=True)}
        return tuple(rest.get(i) for i in range(len(eqn.inputs)))

    linear.defvjp(forward, backward)
    constant = jax.lax.stop_gradient(pulled_zeros(eqn, pullback(eqn, values)[1]))
    # The cotangent of z in Re(c z) is c.
    terms = [(c * values[i]).real.sum() for c, i in zip(constant, inexact, strict=True)]
    penalty = sum(t.astype(jnp.zeros(()).dtype) for t in terms)
    return linear(*values), jnp.asarray(penalty)


def _adds(eqn: Equation) -> bool:
    """Whether the backward rule is not seen to take zeros to zeros."""
    shapes = [shape_of(a) for a in eqn.inputs]
    if rule_failure(eqn) is not None:  # refused where a derivative needs it: `bind_reversible`
        return False
    program, values = trace(lambda *args: pulled_zeros(eqn, pullback(eqn, args)[1]), *shapes)
    pairs = zip(program.consts, values, strict=True)
    zero = {v for v, c in pairs if v.is_inexact and not is_traced(c) and not np.any(c)}

    is_zero = zeros_in(program, zero)
    return not all(is_zero(o) for o in program.outputs)
