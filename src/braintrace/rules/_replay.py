"""The last inputs again, with the weights of now: a window that ends where the sequence is.

Stored are the last K - 1 inputs, each with the state that the network had before it. A call of m
steps is evaluated with these before it, from the oldest of the states,

    state    x x x x x x x | x        K = 8, m = 1: the loss of the last step, through all eight

so the gradient of each loss has everything that a parameter did in the K steps that end with it, or
in up to K + m - 1. Nothing that was computed with older weights is in it but that state. It is the
one that the network had, so what is evaluated again differs from what the network did by the
changes of the weights in these steps alone, however long the memory of the states is. The outputs
of a call are those of this evaluation, on which the gradient is taken; the states go on as the
network has them. Before the first inputs there are none: those steps leave the state as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        kinds = inputs, *([step.entry(leaf) for leaf in of] for of in (step.stored, step.others))
        zeros = lambda v: _raw(jnp.zeros((window - 1, *v.shape), v.dtype))
        return [_stored([map(zeros, of) for of in kinds], jnp.zeros((), jnp.int32))]

    def advance(
        graph: Graph, block: Block, traces: Sequence[Any], observed: Any, fresh: Fresh
    ) -> list[Any]:
        (trace,), length = traces, block.axes.length
        past = _with_past(block, trace)
        last = jax.tree.map(lambda a: _raw(a[length:]), (past.inputs, *past.states))
        return [_stored(last, jnp.minimum(trace["count"] + length, window - 1))]

    def replay(
        graph: Graph, values: Values, traces: Sequence[Any], block: Block, instead: Array | None
    ) -> list[Array]:
        size = block.axes.window or 1
        count = block.axes.length // size
        (trace,) = traces
        past = lax.stop_gradient(_with_past(block, trace))
        begin = jnp.arange(count) * size if instead is None else instead * size
        starts = jax.tree.map(lambda a: a[begin], past.states)
        index = begin[:, None] + jnp.arange(window - 1 + size)
        inputs, real = jax.tree.map(lambda a: a[index], (past.inputs, past.real))
        now = jax.tree.map(lambda a: a[begin[:, None] + jnp.arange(size)], _inputs(block, values))

        def one(states: Any, inputs: Any, real: Array, now: Any) -> list[Array]:
            constant = replace(values, consts=lax.stop_gradient(values.consts))
            before, outs = _evaluated(graph, constant, states, inputs, real, size)
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


def _stored(kinds: Sequence[Iterable[Array]], count: Array) -> dict[str, Array]:
    """The trace: arrays by their kind and number, as a checkpoint stores them."""
    pairs = zip(_KINDS, kinds, strict=True)
    arrays = {f"{kind} {i}": a for kind, of in pairs for i, a in enumerate(of)}
    return {**arrays, "count": count}


def _of_kind(trace: dict[str, Array], kind: str) -> tuple[Array, ...]:
    there = (f"{kind} {i}" for i in range(len(trace)))
    return tuple(trace[name] for name in there if name in trace)


class _Past(NamedTuple):
    """The stored inputs and those of a block, which of them there were, the states before each."""

    inputs: tuple[Array, ...]
    real: Array
    states: tuple[tuple[Array, ...], tuple[Array, ...]]


def _with_past(block: Block, trace: dict[str, Any]) -> _Past:
    path = block.path
    stored = tuple(_of_kind(trace, kind) for kind in _KINDS)
    own = (_inputs(block, path), tuple(path.hidden), tuple(path.others))
    joined = jax.tree.map(lambda old, new: jnp.concatenate([_like(old, new), new]), stored, own)
    count, length = trace["count"], block.axes.length
    before = next((len(a) for of in stored for a in of), 0)
    # K = 4 stores 3 steps. In the second call of one step, one step was there before: count 1,
    #
    #     inputs    _ _ a | b         real F F T T: the first two are evaluated with b, so that they
    #     states    _ _ s | t         are finite, and leave s as it is, with which they begin
    index = jnp.arange(before + length)
    real = index >= before - count
    inputs = jax.tree.map(lambda a: a[jnp.where(real, index, before)], joined[0])
    states = jax.tree.map(lambda a: a[jnp.maximum(index, before - count)], joined[1:])
    return _Past(inputs, real, states)


def _inputs(block: Block, values: Values) -> tuple[Array, ...]:
    return tuple(a for a, timed in zip(values.args, block.axes.args, strict=True) if timed)


def _at(values: Values, states: Any, inputs: Sequence[Array]) -> Values:
    """The arrays of one step."""
    args = (*inputs, *values.args[len(inputs) :])
    return replace(values, args=args, hidden=states[0], others=states[1])


def _evaluated(
    graph: Graph, values: Values, states: Any, inputs: Any, real: Array, size: int
) -> tuple[Any, list[Array]]:
    """The states before each of the last `size` steps, and their results."""

    def step(states: Any, now: Any) -> tuple[Any, Any]:
        at = _at(values, states, now[0])
        outs = evaluate_plain(graph, at)
        after = after_step(graph, at, outs)[1]
        moved = jax.tree.map(
            lambda new, old: jnp.where(now[1], new, old), (after.hidden, after.others), states
        )
        return moved, (states, outs)

    return jax.tree.map(lambda a: a[-size:], lax.scan(step, states, (inputs, real))[1])


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
