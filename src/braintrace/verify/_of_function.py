"""The gradient of `braintrace.online` beside a reference: a plain loop over its step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from .._errors import type_error
from .._online import Online, total_loss
from .._online import split as split_params
from ..program import PyTree
from ._finite import of_parameter
from ._sequence import Grads

EPS = 1e-5  # half the distance of two points of a difference


def online_gradients(
    net: Online,
    loss: Callable[..., jax.Array],
    params: PyTree,
    state: PyTree,
    xs: PyTree,
    *targets: PyTree,
    block_size: int | None = None,
    against: str = "bptt",
) -> tuple[Grads, Grads]:
    """The learner's gradient of the summed losses from zero traces, and the reference."""
    inputs = xs if type(xs) is tuple else (xs,)
    carry = net.init(params, state, *jax.tree.map(lambda a: a[0], inputs))
    found = net.grad(loss, block_size=block_size)(params, carry, xs, *targets)[0]
    layout, trained, fixed = split_params(params)
    begin = state if callable(state) and jax.tree.leaves(state) == [state] else lambda params: state

    @jax.jit
    def total(trained: list[jax.Array]) -> jax.Array:
        params = layout.join(trained, fixed)
        return total_loss(net.step, loss, params, begin(params), inputs, targets)

    if against == "bptt":
        reference = jax.grad(total)(trained)
    else:

        def moved(k: int, value: jax.Array) -> float:
            return float(total([*trained[:k], value, *trained[k + 1 :]]))

        each = enumerate(trained)
        reference = [of_parameter(partial(moved, k), p, EPS, None) for k, p in each]
    paths = [layout.paths("params")[i] for i in layout.trained]
    leaves = [a for a in jax.tree.leaves(found) if a is not None]
    return dict(zip(paths, leaves, strict=True)), dict(zip(paths, reference, strict=True))


def check_arguments(arguments: tuple[PyTree, ...], chunk_size: int | None) -> None:
    """Refuse a call without parameters, state and inputs, or with windows of its own."""
    if len(arguments) < 3:
        raise type_error(
            f"compare got a learner of a function, its loss and {len(arguments)} more argument(s).",
            why="the learner owns no parameters and no state",
            do="compare(net, loss, params, state, xs, *targets), with loss(out, *targets)",
        )
    if chunk_size is not None:
        raise type_error(
            "chunk_size is given for a learner of a function.",
            why="its windows are part of the learner",
            do="braintrace.online(step, rule, window=...) instead",
        )
