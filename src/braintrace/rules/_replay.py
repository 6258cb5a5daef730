"""The last inputs again, with the weights of now: a window that ends where the sequence is.

Stored are the last K - 1 inputs and the state before them. A call of m steps is evaluated with
these before it,

    state    x x x x x x x | x        K = 8, m = 1: the loss of the last step, through all eight

so the gradient of each loss has everything that a parameter did in the K steps that end with it, or
in up to K + m - 1. Nothing that was computed with older weights is in it but the state that it
begins with. That state follows the network: it moves on with the weights that a call finds. Before
the first inputs there are none: those steps leave the state as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..engine import (
    Block,
    Fresh,
    Rule,
    Values,
    after_step,
    evaluate_plain,
    map_steps,
    with_all_cotangents,
    with_derivative,
)
from ..graph import Graph, inputs_digest


def replayed(window: int) -> Rule:
    """Gradients through the last `window` steps, evaluated again."""

    def init(graph: Graph, values: Values) -> list[Any]:
        step = graph.step
        inputs = step.program.inputs[: step.n_args - step.fixed]
        kinds = (step.stored, step.others)
        zeros = lambda v, lead: _raw(jnp.zeros((*lead, *v.shape), v.dtype))
        states = [tuple(zeros(step.entry(leaf), ()) for leaf in of) for of in kinds]
        past = tuple(zeros(v, (window - 1,)) for v in inputs)
        count = jnp.zeros((), jnp.int32)
        return [_stored(past, states, count)]

    def advance(
        graph: Graph, block: Block, traces: Sequence[Any], observed: Any, fresh: Fresh
    ) -> list[Any]:
        (trace,), length = traces, block.axes.length
        past = _with_past(block, trace)
        first = jax.tree.map(lambda a: a[:length], (past.inputs, past.real))
        (hidden, others), _, _ = _moved(graph, block.path, past.states, *first)
        last = tuple(map(_raw, (a[length:] for a in past.inputs)))
        count = jnp.minimum(trace["count"] + length, window - 1)
        return [_stored(last, [tuple(map(_raw, of)) for of in (hidden, others)], count)]

    def replay(
        graph: Graph, values: Values, traces: Sequence[Any], block: Block, instead: Array | None
    ) -> list[Array]:
        size = block.axes.window or 1
        count = block.axes.length // size
        (trace,) = traces
        past = lax.stop_gradient(_with_past(block, trace))
        starts = _starts(graph, block.path, past, size, count)
        begin = jnp.arange(count) * size if instead is None else instead * size
        if instead is not None:
            starts = jax.tree.map(lambda a: a[instead], starts)
        index = begin[:, None] + jnp.arange(window - 1 + size)
        inputs, real = jax.tree.map(lambda a: a[index], (past.inputs, past.real))
        now = jax.tree.map(lambda a: a[begin[:, None] + jnp.arange(size)], _inputs(block, values))

        def one(states: Any, inputs: Any, real: Array, now: Any) -> list[Array]:
            constant = replace(values, consts=lax.stop_gradient(values.consts))
            _, before, outs = _moved(graph, constant, states, inputs, real, size)
            within = _within(graph, values, before, now)
            return with_derivative(with_all_cotangents(outs), within)

        outs = map_steps(count, one, starts, inputs, real, now)
        return [a.reshape((count * size, *a.shape[2:])) for a in outs]

    return Rule(
        init,
        lambda graph: [(0, ("inputs",))],
        advance,
        _no_credit,
        names=lambda graph: [f"inputs of {inputs_digest(graph.step)}"],
        takes_signal=False,
        constants={"window": window},
        replay=replay,
        steps_back=window,
    )


def _no_credit(graph: Graph, arrived: Any) -> Any:
    raise AssertionError("a rule that evaluates steps again has no traces that cotangents meet")


_KINDS = ("inputs", "hidden", "others")


def _stored(
    inputs: Sequence[Array], states: Sequence[Sequence[Array]], count: Array
) -> dict[str, Array]:
    """The trace: arrays by their kind and number, as a checkpoint stores them."""
    kinds = zip(_KINDS, (inputs, *states), strict=True)
    arrays = {f"{kind} {i}": a for kind, of in kinds for i, a in enumerate(of)}
    return {**arrays, "count": count}


def _of_kind(trace: dict[str, Array], kind: str) -> tuple[Array, ...]:
    there = (f"{kind} {i}" for i in range(len(trace)))
    return tuple(trace[name] for name in there if name in trace)


class _Past(NamedTuple):
    """The stored inputs and those of a block, which of them there were, and the first state."""

    inputs: tuple[Array, ...]
    real: Array
    states: tuple[tuple[Array, ...], tuple[Array, ...]]


def _with_past(block: Block, trace: dict[str, Any]) -> _Past:
    own, path = _inputs(block, block.path), block.path
    past, *states = (_of_kind(trace, kind) for kind in _KINDS)
    count, stored = trace["count"], len(past[0]) if own else 0
    # K = 4 stores 3 inputs. In the second call of one step, one input was there before: count 1,
    #
    #     inputs    _ _ a | b         real F F T T: the first two are evaluated with b, so that they
    #                                 are finite, and leave the state as it is
    real = jnp.arange(stored + block.axes.length) >= stored - count
    pairs = zip(past, own, strict=True)
    inputs = [jnp.concatenate([_like(old, new), new]) for old, new in pairs]
    # A step that there was not is evaluated with the first inputs: zeros could give NaN.
    held = lambda a: a[jnp.where(real, jnp.arange(len(real)), stored)]
    first = jax.tree.map(lambda a: a[0], (path.hidden, path.others))
    begun = lambda old, now: jnp.where(count == 0, now, _like(old, now))
    return _Past(tuple(map(held, inputs)), real, jax.tree.map(begun, tuple(states), first))


def _inputs(block: Block, values: Values) -> tuple[Array, ...]:
    return tuple(a for a, timed in zip(values.args, block.axes.args, strict=True) if timed)


def _at(values: Values, states: Any, inputs: Sequence[Array]) -> Values:
    """The arrays of one step."""
    args = (*inputs, *values.args[len(inputs) :])
    return replace(values, args=args, hidden=states[0], others=states[1])


def _moved(
    graph: Graph, values: Values, states: Any, inputs: Any, real: Array, size: int = 0
) -> tuple[Any, Any, list[Array]]:
    """The states after steps; of the last `size`, the states before each and the results."""

    def step(states: Any, now: Any) -> tuple[Any, Any]:
        at = _at(values, states, now[0])
        outs = evaluate_plain(graph, at)
        after = after_step(graph, at, outs)[1]
        moved = jax.tree.map(
            lambda new, old: jnp.where(now[1], new, old), (after.hidden, after.others), states
        )
        return moved, (states, outs) if size else None

    after, each = lax.scan(step, states, (inputs, real))
    before, outs = jax.tree.map(lambda a: a[-size:], each) if size else (None, [])
    return after, before, outs


def _starts(graph: Graph, path: Values, past: _Past, size: int, count: int) -> Any:
    """The state that each call begins with: the one before its oldest input."""

    def call(states: Any, now: Any) -> tuple[Any, Any]:
        return _moved(graph, path, states, *now)[0], states

    cut = lambda a: a[: size * count].reshape((count, size, *a.shape[1:]))
    return lax.scan(call, past.states, jax.tree.map(cut, (past.inputs, past.real)))[1]


def _within(graph: Graph, values: Values, before: Any, inputs: Any) -> list[Array]:
    """The results of the last steps, by what surrounds a step alone."""
    surrounded = replace(values, params=lax.stop_gradient(values.params))
    one = lambda states, now: evaluate_plain(graph, _at(surrounded, states, now))
    return jax.vmap(one)(lax.stop_gradient(before), inputs)


def _raw(a: Array) -> Array:
    """An array that can be stored as numbers: a key by its data."""
    return jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a


def _like(raw: Array, a: Array) -> Array:
    if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return raw
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(a))
