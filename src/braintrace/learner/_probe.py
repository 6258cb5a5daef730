"""Learning signals of a step: the derivative of its loss by the states after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import value_error
from ..engine import OWN, Values, run_with_exits
from ..program import PyTree
from ._data import Call
from ._steps import Stepping

Array = jax.Array
Loss = Callable[[], Array]


class _Probe(Stepping):
    """A function in which the learner's call has zeros added to the states after it."""

    def __init__(self, learner: Any, zeros: list[brainstate.State]):
        super().__init__(learner)
        self.zeros = zeros
        self.found: list[tuple[Any, PyTree, list[Array]]] = []  # how signals are read, from what

    def call(self, learner: Any, model: Callable, call: Call, extra: dict[str, PyTree]) -> PyTree:
        if self.found or call.length is not None:
            what = "twice" if call.length is None else "with a window"
            raise value_error(
                f"step_fn calls the learner {what}.",
                why="a learning signal belongs to one step",
                do="call the learner once in step_fn, with the inputs of one step",
            )
        args, kwargs = call.step
        prepared = learner._prepared_own(args, kwargs)
        info, plan = prepared.info, prepared.plan
        of_rule = learner._of_rule()
        given = {**extra, OWN: of_rule} if of_rule else extra
        leaves, names = jax.tree.flatten(given)
        now = info.read()
        states = now.params, now.hidden, now.others
        values = Values(info.consts, (*call.leaves, *now.fixed), *states, tuple(leaves))
        exits, flags = [z.value for z in self.zeros], (False,) * len(leaves)
        rule = plan.rule.record
        outs, after, signals, inputs = run_with_exits(plan.graph, rule, values, exits, flags, names)
        self.found.append((signals, inputs, outs))
        info.write({"hidden": after.hidden, "others": after.others})
        return jax.tree.unflatten(info.out_tree, outs)


def signal_probe(learner: Any) -> Callable[[Loss], tuple[list[Array], PyTree]]:
    """A function from a loss, which calls the learner once, to learning signals and outputs.

    There is one signal per hidden leaf. The states move on, the traces do not.
    """
    info = learner.graph.module_info
    entries = [info.step.entry(leaf) for leaf in info.step.hidden]
    zeros = [brainstate.ShortTermState(jnp.zeros(v.shape, v.dtype)) for v in entries]

    def signals(loss: Loss) -> tuple[list[Array], PyTree]:
        read: list[Any] = []

        def with_exits() -> tuple[Array, PyTree]:
            probe = _Probe(learner, zeros)
            with probe:
                value = loss()
            if not probe.found:
                raise value_error(
                    "step_fn does not call the learner.",
                    why="a learning signal is the derivative of the loss by the learner's states",
                    do="call the learner that is recorded, once, in step_fn",
                )
            read[:] = probe.found[:1]
            return value, probe.found[0][1:]

        gradient = brainstate.transform.grad(with_exits, zeros, has_aux=True, check_states=False)
        cotangents, (inputs, outs) = gradient()
        return read[0][0](cotangents, inputs), jax.tree.unflatten(info.out_tree, outs)

    return signals
