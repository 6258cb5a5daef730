"""Reverse mode through windows whose states are known.

The states before each step of a window were computed on the way, so only the reverse pass has to go
through its steps one after another, and only for the cotangents of the states. With the step
`h', out = step(h, rest)` of a window of three, and q the cotangent of h':

    outs               of all steps at once, at the known h
    q2 -> q1 -> q0     one after another, all windows side by side: q_k pulls q_(k+1) at h_(k+1)
    the rest           of all steps at once: pull at h_k of q_k and of the cotangent of out_k

The transpose of a scan would store what each step computes, and add up the gradient of a read-out
step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ..ops import in_use, reading
from ..program import is_inexact
from ._anchor import floating_of
from ._loops import as_running
from ._values import map_steps

Step = Callable[[Any, Any, Any], tuple[Any, list[Array]]]


def through_windows(step: Step, size: int, values: Any, hidden: Any, starts: Any, rest: Any) -> Any:
    """The results of all steps, with the derivative of windows of `size` steps.

    Args:
        step: from values, the states before a step and the rest of it to the states after it, and
            its results.
        size: steps per window.
        values: what all steps read.
        hidden: the states before every step, without derivatives.
        starts: those before every window, which get the cotangents that leave it.
        rest: what a step reads besides, with a leading axis of steps.
    """
    indices = in_use()
    found = list(indices.values())

    def all_steps(values: Any, hidden: Any, starts: Any, rest: Any, found: Any) -> list[Array]:
        one = lambda h, of_step: step(values, h, of_step)[1]
        return map_steps(_length(rest, hidden), one, hidden, rest)

    def forward(values: Any, hidden: Any, starts: Any, rest: Any, found: Any):
        arrays = jax.tree.map(lambda p: p.value, (values, hidden, starts, rest, found))
        return all_steps(*arrays), arrays

    def backward(arrays: Any, cotangents: Any):
        values, hidden, starts, rest, found = arrays
        with reading(dict(zip(indices, found, strict=True))):
            return (*_pulled(step, size, values, hidden, starts, rest, cotangents), None)

    results = jax.custom_vjp(all_steps)
    results.defvjp(forward, as_running(backward), symbolic_zeros=True)
    return results(values, lax.stop_gradient(hidden), starts, rest, found)


def _length(*trees: Any) -> int:
    return jax.tree.leaves(trees)[0].shape[0]


def _pulled(
    step: Step, size: int, values: Any, hidden: Any, starts: Any, rest: Any, cotangents: Any
) -> tuple[Any, None, Any, Any]:
    """The cotangents of values, starts and the rest."""
    # What computes a result that nobody reads is left out: its derivative may be infinite.
    read = [not isinstance(c, SymbolicZero) and is_inexact(c.dtype) for c in cotangents]
    outer = [c for c, is_read in zip(cotangents, read, strict=True) if is_read]
    length = _length(rest, hidden)
    split = lambda tree: jax.tree.map(lambda a: a.reshape((-1, size, *a.shape[1:])), tree)

    def at(values: Any, h: Any, of_step: Any) -> tuple[Any, list[Array]]:
        after, outs = step(values, h, of_step)
        return floating_of(after), [o for o, is_read in zip(outs, read, strict=True) if is_read]

    def window(hidden: Any, rest: Any, outer: Any) -> tuple[Any, Any]:
        def before(q: Any, sliced: Any) -> tuple[Any, Any]:
            h, of_step, ct = sliced
            _, pull = jax.vjp(
                lambda floats: at(values, _with_floats(h, floats), of_step), floating_of(h)
            )
            return pull((q, ct))[0], q

        last = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), floating_of(hidden))
        return lax.scan(before, last, (hidden, rest, outer), reverse=True)

    entry, after = map_steps(length // size, window, split(hidden), split(rest), split(outer))
    after = jax.tree.map(lambda a: a.reshape((-1, *a.shape[2:])), after)

    def everything(of_values: Any, of_rest: Any) -> Any:
        known, steps = _with_floats(values, of_values), _with_floats(rest, of_rest)
        return map_steps(length, lambda h, of_step: at(known, h, of_step), hidden, steps)

    _, pull = jax.vjp(everything, floating_of(values), floating_of(rest))
    of_values, of_rest = pull((after, outer))
    return (
        _cotangents(values, of_values),
        None,
        _cotangents(starts, entry),
        _cotangents(rest, of_rest),
    )


def _with_floats(tree: Any, floats: list[Array]) -> Any:
    items = iter(floats)
    new = lambda a: next(items) if is_inexact(jnp.result_type(a)) else a
    return jax.tree.map(new, tree)


def _cotangents(tree: Any, floats: list[Array]) -> Any:
    """As a reverse rule returns them: of what has no derivative, None."""
    items = iter(floats)
    return jax.tree.map(lambda a: next(items) if is_inexact(jnp.result_type(a)) else None, tree)
