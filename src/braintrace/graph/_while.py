"""Reverse mode through a `while`, from forward mode.

How often a `while` runs is decided while it runs, so nothing can be stored for a reverse pass. But
it can be pushed forward again: its Jacobian is sparse where it is the dynamics of units, and one
tangent per colour gives all entries, after any number of iterations. The cotangent is then
multiplied with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import not_supported
from ..program import (
    Equation,
    Program,
    bind,
    bind_quietly,
    is_inexact,
    opened,
    prune,
    pullback,
    pulled_zeros,
    quiet,
    run_one,
    shape_of,
    trace,
)
from ._influence import influence
from ._pattern import colours_of, rows_of
from ._sets import NONE
from ._step import Component
from ._tangent import Tangent


def bind_reversible(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Apply an equation; a `while` can be differentiated backward too."""
    if eqn.name == "custom_vjp_call":
        return _with_rule(eqn, values)
    if eqn.name != "while":
        return bind(eqn, values)
    inexact = [i for i, a in enumerate(eqn.inputs) if is_inexact(a.dtype)]
    if not inexact:
        return bind(eqn, values)
    reals = [x for i in inexact for x in _parts(values[i])]
    reals_out, rest = map(iter, _reversible(eqn)(reals, list(values)))
    return [(_whole(reals_out, v.is_complex) if v.is_inexact else next(rest)) for v in eqn.outputs]


def _with_rule(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Apply a function with a reverse rule of its own; one that fails says so where it is run."""
    if (why := rule_failure(eqn)) is None:
        return bind(eqn, values)

    @jax.custom_vjp
    def call(*args):
        return bind(eqn, args)

    def backward(_, cotangents):
        raise not_supported(
            "the reverse rule of a custom_vjp fails.",
            where=eqn.where(),
            why=why,
            do="write it with what JAX can differentiate, such as lax.scan or a fori_loop with a "
            "fixed number of iterations, or put its arguments under stop_gradient",
        )

    call.defvjp(lambda *args: (call(*args), None), backward)
    return call(*values)


@lru_cache(maxsize=256)
def rule_failure(eqn: Equation) -> str | None:
    """What the reverse rule of a function raises where it is run; None if it can be run."""
    shapes = [shape_of(a) for a in eqn.inputs]
    try:
        trace(lambda *args: pulled_zeros(eqn, pullback(eqn, args)[1]), *shapes)
    except Exception as error:
        first = (*str(error).strip().splitlines(), "no message")[0]
        return f"{type(error).__name__}: {first}"
    return None


def _parts(value: Any) -> list[Any]:
    """A value as real arrays."""
    value = jnp.asarray(value)
    return [value.real, value.imag] if jnp.iscomplexobj(value) else [value]


def _reals(values: Sequence[Any]) -> list[Any]:
    return [x for v in values if is_inexact(v.dtype) for x in _parts(v)]


def _whole(parts: Any, is_complex: bool) -> Any:
    return jax.lax.complex(next(parts), next(parts)) if is_complex else next(parts)


def _forward(eqn: Equation, values: list[Any]) -> list[Any]:
    """Apply the equation so that it can be pushed forward, whatever derivatives are inside."""
    opens = opened(Program((), (), (eqn,), ()), quiet)
    return run_one(eqn, values, lambda e, inputs, feed: (bind_quietly(e, inputs), {}), opens, {})[0]


def _real(eqn: Equation, reals: Sequence[Any], values: Sequence[Any]) -> tuple[list, list]:
    """The equation on real arrays: inexact outputs as real parts, and the other outputs."""
    parts = iter(reals)
    full = [
        _whole(parts, jnp.iscomplexobj(v)) if is_inexact(jnp.result_type(v)) else v for v in values
    ]
    outs = _forward(eqn, full)
    inexact = [v.is_inexact for v in eqn.outputs]
    floats = [x for o, m in zip(outs, inexact, strict=True) if m for x in _parts(o)]
    return floats, [o for o, m in zip(outs, inexact, strict=True) if not m]


@lru_cache(maxsize=64)
def _reversible(eqn: Equation):
    sources = _sources(eqn)

    @jax.custom_vjp
    def call(reals, values):
        return _real(eqn, reals, jax.lax.stop_gradient(values))

    def forward(reals, values):
        return call(reals, values), (reals, values)

    def backward(residuals, cotangents):
        reals, values = residuals
        ct = jnp.concatenate([c.reshape(-1) for c in cotangents[0]])
        sizes = np.cumsum([x.size for x in reals])

        # Two units, c' = f(c), each result reads its own: one colour, sources [[0, 1]]. The tangent
        # of ones gives [f'(c_0), f'(c_1)], times ct, and each product goes to the source it belongs
        # to. With neighbours, c' = f(c, roll(c)), there are two: colour 0 moves c_0, colour 1 c_1.
        def column(seed, source):
            parts = jnp.split(seed, sizes[:-1])
            tangents = [
                p.reshape(x.shape).astype(x.dtype) for p, x in zip(parts, reals, strict=True)
            ]
            _, out, _ = jax.jvp(
                lambda r: _real(eqn, r, values), (reals,), (tangents,), has_aux=True
            )
            flat = jnp.concatenate([t.reshape(-1) for t in out]) * ct
            total = jnp.zeros(int(sizes[-1]), flat.dtype)
            return total.at[jnp.maximum(source, 0)].add(jnp.where(source == NONE, 0, flat))

        seeds = np.stack([np.isin(np.arange(sizes[-1]), s[s != NONE]) for s in sources])
        total = jax.vmap(column)(jnp.asarray(seeds, ct.dtype), jnp.asarray(np.stack(sources)))
        parts = jnp.split(total.sum(0), sizes[:-1])
        grads = [p.reshape(x.shape).astype(x.dtype) for p, x in zip(parts, reals, strict=True)]
        return grads, None

    call.defvjp(forward, backward)
    return call


def _sources(eqn: Equation) -> list[np.ndarray]:
    """Per colour, the source element that each output element reads (NONE for none)."""
    shapes = [shape_of(a) for a in eqn.inputs]
    reals = jax.eval_shape(_reals, shapes)

    def pushed(values, tangents):
        run = lambda r: _real(eqn, r, values)
        return jax.jvp(run, (_reals(values),), (tangents,), has_aux=True)[1]

    program, _ = trace(pushed, shapes, reals)
    program = prune(program, program.outputs)
    exits = program.outputs
    components = tuple(Component(i, None, False, o.shape) for i, o in enumerate(exits))
    entries = program.inputs[len(shapes) :]
    result = influence(Tangent(program, components, entries, (), exits, ()), [], {}, None)
    if result.cuts:
        raise not_supported(
            f"the reverse derivative of a while_loop would read {result.cuts[0].reason}.",
            where=eqn.where(),
            why="JAX has no reverse mode through a while_loop; it is taken by forward mode, "
            "one tangent for each element that a result reads",
            do="use lax.scan or fori_loop with a fixed number of iterations, keep the loop "
            "within units, or put its result under stop_gradient",
        )
    n_out = sum(prod(o.shape) for o in exits)
    n_in = int(result.offsets[-1])
    outs, ins = rows_of(result.rows, 0, n_in)
    colours, count = colours_of(outs, ins, n_in)
    table = np.full((max(count, 1), n_out), NONE)
    table[colours[ins], outs] = ins
    return list(table)
