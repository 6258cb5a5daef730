"""Running a program with something else in place of some equations, inside bodies too.

A `cond`, `scan` or `while` is applied again with its bodies run by the caller. Arrays may be *fed*
to equations inside (sliced by iteration where a scan lies between) and *seen* values come out the
same way (stacked over iterations; zeros from a branch that was not taken). Both are keyed by the
number that the caller gives to an equation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._evaluate import bind_forward, evaluate
from ._jax import scan_layout
from ._lines import made_by_cond
from ._records import Atom, Body, Equation, Program, Var, deep_equations, equations_inside

Feed = Mapping[int, Any]
Seen = dict[int, Any]
Values = Sequence[Any]  # arrays, or pytrees of arrays
Outcome = tuple[list[Any], Seen]
Inside = Callable[[Body, Values, Feed], Outcome]
Opens = Mapping[Equation, Collection[int]]  # and the numbers of what is fed inside
Apply = Callable[[Equation, list[Any], Feed], Outcome]


def run(
    program: Program,
    consts: Values,
    inputs: Values,
    apply: Apply,
    opens: Opens,
    feed: Feed | None = None,
) -> Outcome:
    """Run a program: the equations in `opens` body by body, any other by `apply`."""
    seen: Seen = {}

    def one(eqn: Equation, values: list[Any]) -> list[Any]:
        outs, inner = run_one(eqn, values, apply, opens, feed or {})
        seen.update(inner)
        return outs

    return evaluate(program, consts, inputs, one), seen


def run_one(eqn: Equation, values: list[Any], apply: Apply, opens: Opens, feed: Feed) -> Outcome:
    """Run one equation, as `run` does."""
    if eqn not in opens:
        return apply(eqn, values, feed)

    def inside(body: Body, values: Values, feed: Feed) -> Outcome:
        return run(body.program, body.values, values, apply, opens, feed)

    return through(eqn, values, inside, {i: feed[i] for i in opens[eqn] if i in feed})


def opened(
    program: Program, number: Callable[[Equation], int | None]
) -> dict[Equation, frozenset[int]]:
    """The equations of control flow with numbered equations somewhere inside, and these numbers.

    `number` gives the number of an equation (-1 for one that nothing is fed to), or None.
    """
    out = {}
    for eqn in deep_equations(program):
        inside = map(number, equations_inside(eqn))
        if numbers := frozenset(n for n in inside if n is not None):
            out[eqn] = numbers
    return out


def quiet(eqn: Equation) -> int | None:
    """For `opened`: the equations that `bind_quietly` does not simply bind."""
    return -1 if eqn.name == "custom_vjp_call" or (eqn.effects and not eqn.outputs) else None


def bind_quietly(eqn: Equation, values: Values) -> list[Any]:
    """Apply an equation for forward differentiation; a mere side effect is left out."""
    return [] if eqn.effects and not eqn.outputs else bind_forward(eqn, values)


def guards(program: Program) -> dict[Equation, Atom]:
    """The operands of a `cond` as JAX passes them on under `vmap`, and what each of them equals.

    A branch gets each operand `a` as `select_n(predicate, stop_gradient(a), a)`: the value is `a`
    in any case, and no derivative leaves the branch where it is not taken. The result of the branch
    is selected by the same predicate, so that the derivative is that of `a`.
    """
    out = {}
    stopped: dict[Any, Atom] = {}
    for eqn in deep_equations(program):
        if eqn.name == "stop_gradient":
            stopped[eqn.outputs[0]] = eqn.inputs[0]
        elif eqn.name == "select_n" and made_by_cond(eqn):
            values = {stopped.get(a, a) for a in eqn.inputs[1:]}
            if len(values) == 1:
                out[eqn] = values.pop()
    return out


Passed = list[tuple[Sequence[Atom], Sequence[Var]]]  # values, and what each of them becomes


def passed(eqn: Equation) -> tuple[Passed, Passed]:
    """What becomes of values of a `cond`, `scan` or `while`: in its bodies, and behind it.

    What says which branch is taken, or whether a loop goes on, is passed to all that follows.
    """
    bodies = [body.program for body in eqn.bodies]
    if eqn.name == "cond":
        behind: Passed = [(b.outputs, eqn.outputs) for b in bodies]
        which = eqn.inputs[:1] * len(eqn.outputs)
        return [(eqn.inputs[1:], b.inputs) for b in bodies], [*behind, (which, eqn.outputs)]
    if eqn.name == "scan":
        (body,), (first, n_carry) = bodies, scan_layout(eqn.params)
        carry, outs = body.inputs[first : first + n_carry], eqn.outputs
        # A scan of no iterations returns its carry as it came.
        behind = [(body.outputs, outs), (carry, outs[:n_carry])]
        return [(eqn.inputs, body.inputs), (body.outputs[:n_carry], carry)], behind
    test, body = bodies
    n_cond, carry = eqn.params["cond_nconsts"], body.inputs[eqn.params["body_nconsts"] :]
    inside: Passed = [(eqn.inputs[n_cond:], body.inputs), (body.outputs, carry)]
    inside += [(eqn.inputs[:n_cond], test.inputs[:n_cond]), (carry, test.inputs[n_cond:])]
    return [*inside, (test.outputs * len(carry), carry)], [(carry, eqn.outputs)]


def through(eqn: Equation, values: Values, inside: Inside, feed: Feed) -> Outcome:
    """Apply a `cond`, `scan` or `while` with its bodies run by `inside`.

    Values may be pytrees (but for the number of a branch and what stops a `while`).
    """
    return {"cond": _cond, "scan": _scan, "while": _while}[eqn.name](eqn, values, inside, feed)


def _cond(eqn: Equation, values: Values, inside: Inside, feed: Feed) -> Outcome:
    index, *operands = values
    runs = [partial(inside, body) for body in eqn.bodies]
    shapes: Seen = {}
    for r in runs if feed else ():  # what is seen belongs to what is fed
        shapes |= jax.eval_shape(r, operands, dict(feed))[1]

    def full(r, ops, feed):
        outs, seen = r(ops, feed)
        zeros = lambda s: jnp.zeros(s.shape, s.dtype)
        none = {i: jax.tree.map(zeros, s) for i, s in shapes.items() if i not in seen}
        return list(outs), {**none, **seen}

    branches = [partial(full, r) for r in runs]
    return lax.switch(jnp.asarray(index, "int32"), branches, operands, dict(feed))


def _scan(eqn: Equation, values: Values, inside: Inside, feed: Feed) -> Outcome:
    first, n_carry = scan_layout(eqn.params)
    last = first + n_carry
    consts, init, xs = values[:first], values[first:last], values[last:]
    (body,) = eqn.bodies

    def iteration(carry, slices):
        xs, fed = slices
        outs, seen = inside(body, [*consts, *carry, *xs], fed)
        return list(outs[:n_carry]), (list(outs[n_carry:]), seen)

    carry, (ys, seen) = lax.scan(
        iteration,
        [jax.tree.map(jnp.asarray, c) for c in init],
        (list(xs), dict(feed)),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params.get("unroll", 1),
    )
    return [*carry, *ys], seen


def _while(eqn: Equation, values: Values, inside: Inside, feed: Feed) -> Outcome:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = eqn.bodies
    before, consts = values[:n_cond], values[n_cond : n_cond + n_body]
    init = [jax.tree.map(jnp.asarray, c) for c in values[n_cond + n_body :]]
    outs = lax.while_loop(
        lambda carry: inside(test, [*before, *carry], {})[0][0],
        lambda carry: list(inside(body, [*consts, *carry], {})[0]),
        init,
    )
    return outs, {}
