"""The gradient of a sequence by a rule, with a learner that checkpoints can be made of."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from jax import Array

from ...engine import put
from ...learner import MultiStepData, compile
from ..comparison._rules import Choice
from ..tasks import SequenceTask
from ..tasks._task import Batch
from ._explain import learner_options
from ._network import Network, Path, Weights

Program = tuple[jax.stages.Compiled, list[tuple[brainstate.State, Path | None]], list[int]]


class Compiled:
    """The gradient of one rule for the sequences of a task; the first use compiles it.

    All states and traces are written back, so that random draws go on from call to call. The
    weights are those of a call, not of the network.
    """

    def __init__(
        self,
        choice: Choice,
        network: Network,
        task: SequenceTask,
        size: int,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.choice, self.network, self.task, self.size = choice, network, task, size
        x, options = jnp.zeros((size, task.inputs)), learner_options(choice)
        if mesh is not None:
            axes = {"batch": "data", "units": "model"}
            options |= {"mesh": mesh, **{k: n for k, n in axes.items() if n in mesh.axis_names}}
        self.learner = compile(network, choice.name, x, batch_size=size, **options)

    def _gradient(self, xs: Array, ys: Array) -> tuple[Weights, Array]:
        learner, loss, choice = self.learner, self.task.loss, self.choice
        windowed = choice.window is not None and choice.window > 1

        def step(x: Array, y: Array) -> Array:
            return jax.vmap(loss)(learner(MultiStepData(x)), y) if windowed else loss(learner(x), y)

        learner.reset()
        grads, value = learner.etrace_grad(
            xs,
            ys,
            step_fn=step,
            mask=self.task.mask,
            chunk_size=choice.window,
            block_size=choice.block and max(choice.block, choice.window or 1),
            loss_output="scalar",
            return_value=True,
        )
        return dict(grads), value

    @cached_property
    def _program(self) -> Program:
        """The program, its states with the paths of weights, which of the states it returns."""
        shapes = jax.eval_shape(lambda key: self.task.batch(key, self.size), jax.random.key(0))
        example = self._spread(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))
        stateful: Any = brainstate.transform.StatefulFunction(self._gradient)
        states, parameters = stateful.get_states(*example), self.network.parameters.items()
        paths = [next((path for path, p in parameters if p is state), None) for state in states]
        carried = [n for n, path in enumerate(paths) if path is None]

        def pure(values, xs, ys):
            new, out = stateful.jaxpr_call(values, xs, ys)
            return out, [new[n] for n in carried]

        program = jax.jit(pure).lower([state.value for state in states], *example).compile()
        return program, list(zip(states, paths, strict=True)), carried

    def _spread(self, batch: Batch) -> Batch:
        """A batch on the devices of its samples."""
        placement = self.learner.placement
        if placement is None:
            return batch
        return put(batch, placement.arrays(self.learner.graph.analysis, batch, 1))

    def __call__(self, weights: Weights, batch: Batch) -> tuple[Weights, Array]:
        """Gradients and loss of a batch at these weights."""
        program, states, carried = self._program
        values = [state.value if path is None else weights[path] for state, path in states]
        out, new = program(values, *self._spread(batch))
        for n, value in zip(carried, new, strict=True):
            states[n][0].value = value
        return out
