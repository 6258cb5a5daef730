"""Gradients of a sequence: by a rule, by BPTT, by truncated BPTT; compiled, with what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from ...learner import MultiStepData, compile
from ._network import Network
from ._rules import BPTT, TRUNCATED, Choice
from .tasks import Array, Task

Grads = dict[Any, Any]
Gradient = Callable[[Array, Array], tuple[Grads, Array]]


class Compiled:
    """The gradient of one rule, compiled for the sequences of a task.

    Attributes:
        choice: the rule.
        working: bytes of temporary buffers that XLA reports.
        kept: bytes of states and traces, which stay from step to step.
    """

    def __init__(self, choice: Choice, network: Network, task: Task, size: int):
        brainstate.nn.init_all_states(network, batch_size=size)
        self.choice, self.network = choice, network
        if choice.name in (BPTT, TRUNCATED):
            gradient, holder = reverse(network, task, choice.window), network
        else:
            gradient, holder = online(network, task, choice, size)
        shapes = jax.eval_shape(lambda key: task.batch(key, size), jax.random.key(0))
        example = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        stateful = brainstate.transform.StatefulFunction(gradient)
        self._states = tuple(stateful.get_states(*example))
        # Weights and sequence are arguments and gradients are results, so neither is temporary.
        # States and traces start anew and are not returned, so they are; random keys go on.
        drawn = [isinstance(s, brainstate.random.RandomState) for s in self._states]
        self._keys = [s for s, kept in zip(self._states, drawn, strict=True) if kept]

        def pure(values, xs, ys):
            new, out = stateful.jaxpr_call(values, xs, ys)
            return out, [v for v, kept in zip(new, drawn, strict=True) if kept]

        values = [s.value for s in self._states]
        self._program = jax.jit(pure).lower(values, *example).compile()
        found = self._program.memory_analysis()
        self.working = math.nan if found is None else found.temp_size_in_bytes
        self.kept = _kept(holder)

    def __call__(self, xs: Array, ys: Array) -> tuple[Grads, Array]:
        """Gradients and loss of a batch, at the network's present weights."""
        out, keys = self._program([s.value for s in self._states], xs, ys)
        for state, key in zip(self._keys, keys, strict=True):
            state.value = key
        return out


def reverse(network: Network, task: Task, window: int | None = None) -> Gradient:
    """Reverse mode in windows of some steps, default all: no gradient passes between two."""

    def piece(xs: Array, ys: Array, mask: Array) -> tuple[Grads, Array]:
        def loss():
            outputs = brainstate.transform.for_loop(network, xs)
            return (mask * jax.vmap(task.measure.loss)(outputs, ys)).sum()

        found: Any = brainstate.transform.grad(loss, network.weights, return_value=True)()
        return dict(found[0]), found[1]

    def gradient(xs: Array, ys: Array) -> tuple[Grads, Array]:
        brainstate.nn.reset_all_states(network, batch_size=xs.shape[1])
        steps = min(window or len(xs), len(xs))
        parts = (xs, ys, task.mask / task.mask.sum())
        if steps == len(xs):
            return piece(*parts)
        pieces = tuple(_cut(a, steps) for a in parts)
        zeros = {path: jax.tree.map(jnp.zeros_like, s.value) for path, s in network.weights.items()}
        add = lambda total, slices: (jax.tree.map(jnp.add, total, piece(*slices)), None)
        return brainstate.transform.scan(add, (zeros, jnp.zeros((), xs.dtype)), pieces)[0]

    return gradient


def _cut(a: Array, steps: int) -> Array:
    """A sequence as windows; zeros fill the last one, and as a mask they do not count."""
    missing = -len(a) % steps
    full = jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) if missing else a
    return full.reshape(-1, steps, *a.shape[1:])


def online(network: Network, task: Task, choice: Choice, size: int) -> tuple[Gradient, Any]:
    """The gradient of a rule, and its learner."""
    x = jnp.zeros((size, task.inputs))
    learner = compile(network, choice.name, x, batch_size=size, **choice.options)
    loss = task.measure.loss
    windowed = choice.window is not None and choice.window > 1

    def step(x: Array, y: Array) -> Array:
        return jax.vmap(loss)(learner(MultiStepData(x)), y) if windowed else loss(learner(x), y)

    def gradient(xs: Array, ys: Array) -> tuple[Grads, Array]:
        learner.reset()
        grads, value = learner.etrace_grad(
            xs,
            ys,
            step_fn=step,
            mask=task.mask,
            chunk_size=choice.window,
            block_size=choice.block and max(choice.block, choice.window or 1),
            loss_output="scalar",
            return_value=True,
        )
        return dict(grads), value

    return gradient, learner


def _kept(holder: Any) -> int:
    states = [s for s in holder.states().values() if not isinstance(s, brainstate.ParamState)]
    return sum(jnp.asarray(a).nbytes for s in states for a in jax.tree.leaves(s.value))


def matching_window(bytes_of: Callable[[int], float], wanted: float, length: int) -> int:
    """The window of truncated BPTT whose memory is closest to `wanted`, by interpolation."""
    sizes = {window: bytes_of(window) for window in (1, length)}
    for _ in range(2):
        below = max((w for w, size in sizes.items() if size <= wanted), default=1)
        above = min((w for w, size in sizes.items() if size > wanted), default=length)
        if below >= above - 1 or not sizes[below] < sizes[above]:
            break
        part = (wanted - sizes[below]) / (sizes[above] - sizes[below])
        guess = min(max(below + round(part * (above - below)), below + 1), above - 1)
        sizes[guess] = bytes_of(guess)
    return min(sizes, key=lambda window: (abs(sizes[window] - wanted), window))
