"""Running a program with something else in place of chosen equations, inside bodies too.

A `cond`, `scan` or `while` is applied again with its bodies run by the caller. Arrays may be *fed*
to equations inside (sliced turn by turn where a scan lies between) and *seen* values come out the
same way (stacked over turns; zeros from a branch that was not taken).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._jaxpr import (
    Atom,
    Body,
    Const,
    Equation,
    Program,
    Var,
    bind_forward,
    deep_equations,
    made_by_cond,
    scan_layout,
)

Feed = Mapping[int, Any]
Seen = dict[int, Any]
Inside = Callable[[Body, Sequence[Any], Feed], tuple[list[Any], Seen]]
Opens = Mapping[Equation, Collection[int]]  # and the numbers of what is fed inside
Apply = Callable[[Equation, list[Any], Feed], tuple[list[Any], Seen]]


def run(
    program: Program,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    apply: Apply,
    opens: Opens,
    feed: Feed | None = None,
) -> tuple[list[Any], Seen]:
    """Run a program: the equations in `opens` body by body, any other by `apply`."""
    env: dict[Var, Any] = dict(zip(program.consts, consts, strict=True))
    env.update(zip(program.inputs, inputs, strict=True))
    seen: Seen = {}

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Const) else env[atom]

    for eqn in program.equations:
        outs, found = run_one(eqn, [read(a) for a in eqn.inputs], apply, opens, feed or {})
        seen |= found
        env.update(zip(eqn.outputs, outs, strict=True))
    return [read(o) for o in program.outputs], seen


def run_one(
    eqn: Equation, values: list[Any], apply: Apply, opens: Opens, feed: Feed
) -> tuple[list[Any], Seen]:
    """Run one equation, as `run` does."""
    if eqn not in opens:
        return apply(eqn, values, feed)

    def inside(body: Body, values: Sequence[Any], feed: Feed) -> tuple[list[Any], Seen]:
        return run(body.program, body.values, values, apply, opens, feed)

    return through(eqn, values, inside, {i: feed[i] for i in opens[eqn] if i in feed})


def opened(
    program: Program, numbers: Callable[[Equation], int | None]
) -> dict[Equation, frozenset[int]]:
    """The equations of control flow with a chosen equation somewhere inside, and whose numbers.

    `numbers` gives the number of a chosen equation (-1 for one that nothing is fed to), or None.
    """
    out = {}
    for eqn in deep_equations(program):
        inner = [numbers(e) for body in eqn.bodies for e in deep_equations(body.program)]
        found = frozenset(n for n in inner if n is not None)
        if found:
            out[eqn] = found
    return out


def quiet(eqn: Equation) -> int | None:
    """For `opened`: the equations that `bind_quietly` does not simply bind."""
    return -1 if eqn.name == "custom_vjp_call" or (eqn.effects and not eqn.outputs) else None


def bind_quietly(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Apply an equation for forward differentiation; a mere side effect is left out."""
    return [] if eqn.effects and not eqn.outputs else bind_forward(eqn, values)


def guards(program: Program) -> dict[Equation, Atom]:
    """What JAX makes of the operands of a `cond` under `vmap`, in bodies too, and what it means.

    A branch gets each operand `a` as `select_n(predicate, stop_gradient(a), a)`: the value is `a`
    in any case, and no derivative leaves the branch where it is not chosen. What the branch makes
    is selected by the same predicate, so that the derivative is that of `a`.
    """
    found = {}
    still: dict[Any, Atom] = {}
    for eqn in deep_equations(program):
        if eqn.name == "stop_gradient":
            still[eqn.outputs[0]] = eqn.inputs[0]
        elif eqn.name == "select_n" and made_by_cond(eqn):
            values = {still.get(a, a) for a in eqn.inputs[1:]}
            if len(values) == 1:
                found[eqn] = values.pop()
    return found


def through(
    eqn: Equation, values: Sequence[Any], inside: Inside, feed: Feed
) -> tuple[list[Any], Seen]:
    """Apply a `cond`, `scan` or `while` with its bodies run by `inside`.

    Values may be pytrees (but for the number of a branch and what stops a `while`).
    """
    return {"cond": _cond, "scan": _scan, "while": _while}[eqn.name](eqn, values, inside, feed)


def _cond(eqn, values, inside, feed):
    index, *operands = values

    def branch(body):
        return lambda ops, feed: inside(body, ops, feed)

    runs = [branch(b) for b in eqn.bodies]
    shapes: Seen = {}
    for r in runs if feed else ():  # what is seen belongs to what is fed
        shapes |= jax.eval_shape(r, operands, dict(feed))[1]

    def full(r):
        def call(ops, feed):
            outs, seen = r(ops, feed)
            none = {i: jax.tree.map(_zeros, s) for i, s in shapes.items() if i not in seen}
            return list(outs), {**none, **seen}

        return call

    return lax.switch(jnp.asarray(index, "int32"), [full(r) for r in runs], operands, dict(feed))


def _zeros(shape: Any) -> Any:
    return jnp.zeros(shape.shape, shape.dtype)


def _scan(eqn, values, inside, feed):
    first, n_carry = scan_layout(eqn.params)
    last = first + n_carry
    consts, init, xs = values[:first], values[first:last], values[last:]
    (body,) = eqn.bodies

    def turn(carry, slices):
        xs, fed = slices
        outs, seen = inside(body, [*consts, *carry, *xs], fed)
        return list(outs[:n_carry]), (list(outs[n_carry:]), seen)

    carry, (ys, seen) = lax.scan(
        turn,
        [jax.tree.map(jnp.asarray, c) for c in init],
        (list(xs), dict(feed)),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params.get("unroll", 1),
    )
    return [*carry, *ys], seen


def _while(eqn, values, inside, feed):
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
