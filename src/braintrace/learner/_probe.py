"""Learning signals of a step: the derivative of its loss by the states after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import value_error
from ..engine import Values, run_with_exits
from ..graph import Graph
from ..program import PyTree
from ..rules import Rule
from ._data import Call

Array = jax.Array
Loss = Callable[[], Array]


def signal_probe(learner: Any) -> Callable[[Loss], tuple[list[Array], PyTree]]:
    """A function from a loss, which calls the learner once, to learning signals and outputs.

    There is one signal per hidden leaf. The states move on, the traces do not.
    """
    info = learner.graph.module_info
    entries = [info.step.entry(leaf) for leaf in info.step.hidden]
    zeros = [brainstate.ShortTermState(jnp.zeros(v.shape, v.dtype)) for v in entries]
    calls: list[tuple[Any, PyTree, list[Array]]] = []  # how signals are read, from what; outputs

    def run(
        rule: Rule, graph: Graph, call: Call, values: Values, extra: tuple[bool, ...], names: Any
    ) -> tuple[list[Array], Values]:
        if calls or call.length is not None:
            what = "twice" if call.length is None else "with a window"
            raise value_error(
                f"step_fn calls the learner {what}.",
                why="a learning signal belongs to one step",
                do="call the learner once in step_fn, with the inputs of one step",
            )
        exits = [z.value for z in zeros]
        outs, after, signals_of, inputs = run_with_exits(graph, rule, values, exits, extra, names)
        calls.append((signals_of, inputs, outs))
        return outs, after

    def signals(loss: Loss) -> tuple[list[Array], PyTree]:
        def with_exits() -> tuple[Array, PyTree]:
            calls.clear()
            with learner.instead(run):
                value = loss()
            if not calls:
                raise value_error(
                    "step_fn does not call the learner.",
                    why="a learning signal is the derivative of the loss by the learner's states",
                    do="call the learner that is recorded, once, in step_fn",
                )
            return value, calls[0][1:]

        gradient = brainstate.transform.grad(with_exits, zeros, has_aux=True, check_states=False)
        cotangents, (inputs, outs) = gradient()
        return calls[0][0](cotangents, inputs), jax.tree.unflatten(info.out_tree, outs)

    return signals
