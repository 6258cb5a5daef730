"""Learning signals of a step: what the loss says about the states it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import value_error
from ..engine import Values, run_with_exits
from ..graph import Graph
from ..rules import Rule
from ._data import Call

Array = jax.Array


class Listener:
    """Takes the place of the engine in one call of a learner."""

    def __init__(self, learner: Any):
        self.learner = learner
        info = learner.graph.module_info
        entries = [info.step.entry(leaf) for leaf in info.step.hidden]
        self.zeros = [brainstate.ShortTermState(jnp.zeros(v.shape, v.dtype)) for v in entries]
        self.made: Callable[..., list[Array]] | None = None
        self.told: Any = ()
        self.outs: list[Any] = []

    def run(
        self,
        rule: Rule,
        graph: Graph,
        call: Call,
        values: Values,
        extra: Any,
        names: Any,
    ) -> tuple[list[Any], Values]:
        """Results and new states of the one call."""
        if self.made is not None or call.length is not None:
            what = "a window" if call.length is not None else "twice"
            raise value_error(
                f"step_fn calls the learner {'with ' * (what != 'twice')}{what}.",
                why="a learning signal belongs to one step",
                do="call the learner once in step_fn, with the inputs of one step",
            )
        zeros = [z.value for z in self.zeros]
        self.outs, after, self.made, self.told = run_with_exits(
            graph, rule, values, zeros, extra, names
        )
        return self.outs, after

    def signals(self, loss: Callable[[], Array]) -> tuple[list[Array], Any]:
        """Per hidden leaf the signal of `loss`, and what the learner returned; states move on."""

        def heard() -> tuple[Array, Any]:
            self.made, self.told = None, ()
            with self.learner.instead(self.run):
                value = loss()
            if self.made is None:
                raise value_error(
                    "step_fn does not call the learner.",
                    why="a learning signal is what the loss says about the learner's states",
                    do="call the learner that is recorded, once, in step_fn",
                )
            return value, (self.told, self.outs)

        gradient = brainstate.transform.grad(heard, self.zeros, has_aux=True, check_states=False)
        cotangents, (told, outs) = gradient()
        assert self.made is not None
        info = self.learner.graph.module_info
        return self.made(cotangents, told), jax.tree.unflatten(info.out_tree, outs)
