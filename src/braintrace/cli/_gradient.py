"""Gradients of a sequence: by a rule, by BPTT, by truncated BPTT; compiled, with what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from jax import Array

from .._errors import CompilationError, NotSupportedError
from ..learner import ETraceAlgorithm, MultiStepData, compile
from ..tasks import Batch, SequenceTask
from ._network import Network, Path, Weights
from ._rules import BPTT, TRUNCATED, Choice

Program = tuple[jax.stages.Compiled, list[tuple[brainstate.State, Path | None]], list[int]]
Gradient = Callable[[Array, Array], tuple[Weights, Array]]
# What a rule raises that cannot be compiled, or cannot learn from a loss alone.
REFUSALS = (CompilationError, NotSupportedError, ValueError, TypeError, RuntimeError)


class Compiled:
    """The gradient of one rule for the sequences of a task; the first use compiles it.

    Random keys continue from call to call. With `carry` all states and traces are written back, so
    that counts of random draws inside of a trace continue, too; they are no temporary memory then.
    The weights are those of a call, not of the network.
    """

    def __init__(
        self, choice: Choice, network: Network, task: SequenceTask, size: int, carry: bool = False
    ):
        brainstate.nn.init_all_states(network, batch_size=size)
        self.choice, self.network, self.task, self.size = choice, network, task, size
        self.carry = carry
        self.learner: Network | ETraceAlgorithm = network  # where there is no other
        if choice.name in (BPTT, TRUNCATED):
            self._gradient = reverse(network, task, choice.window)
        else:
            self._gradient, self.learner = online(network, task, choice, size)

    @cached_property
    def _program(self) -> Program:
        """The program, its states with the paths of weights, which of the states it returns."""
        shapes = jax.eval_shape(lambda key: self.task.batch(key, self.size), jax.random.key(0))
        example = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        stateful: Any = brainstate.transform.StatefulFunction(self._gradient)
        states, parameters = stateful.get_states(*example), self.network.parameters.items()
        paths = [next((path for path, p in parameters if p is state), None) for state in states]
        random = brainstate.random.RandomState
        carried = [
            n
            for n, (state, path) in enumerate(zip(states, paths, strict=True))
            if isinstance(state, random) or (self.carry and path is None)
        ]

        # Weights and sequence are arguments and gradients are results, so neither is temporary.
        # States and traces are reset in every call; they are temporary unless they are returned.
        def pure(values, xs, ys):
            new, out = stateful.jaxpr_call(values, xs, ys)
            return out, [new[n] for n in carried]

        program = jax.jit(pure).lower([state.value for state in states], *example).compile()
        return program, list(zip(states, paths, strict=True)), carried

    def compile(self) -> None:
        """Compile it now, so that a refusal comes now."""
        _ = self._program

    @property
    def working(self) -> float:
        """Bytes of temporary buffers that XLA reports; not every backend does."""
        memory = self._program[0].memory_analysis()
        return math.nan if memory is None else memory.temp_size_in_bytes

    @property
    def stored(self) -> int:
        """Bytes of states and traces, which stay from step to step."""
        states = self.learner.states().values()
        values = [s.value for s in states if not isinstance(s, brainstate.ParamState)]
        return sum(jnp.asarray(a).nbytes for a in jax.tree.leaves(values))

    def __call__(self, weights: Weights, batch: Batch) -> tuple[Weights, Array]:
        """Gradients and loss of a batch at these weights."""
        program, states, carried = self._program
        values = [state.value if path is None else weights[path] for state, path in states]
        out, new = program(values, *batch)
        for n, value in zip(carried, new, strict=True):
            states[n][0].value = value
        return out


def reverse(network: Network, task: SequenceTask, window: int | None = None) -> Gradient:
    """Reverse mode in windows of some steps, default all: no gradient passes between two."""

    def block(xs: Array, ys: Array, mask: Array) -> tuple[Weights, Array]:
        def loss():
            outputs = brainstate.transform.for_loop(network, xs)
            return (mask * jax.vmap(task.measure.loss)(outputs, ys)).sum()

        grad: Any = brainstate.transform.grad(loss, network.parameters, return_value=True)
        grads, value = grad()
        return dict(grads), value

    def gradient(xs: Array, ys: Array) -> tuple[Weights, Array]:
        brainstate.nn.reset_all_states(network, batch_size=xs.shape[1])
        steps = min(window or len(xs), len(xs))
        sequence = (xs, ys, task.mask / task.mask.sum())
        if steps == len(xs):
            return block(*sequence)
        blocks = tuple(_windows(a, steps) for a in sequence)
        zeros = jax.tree.map(jnp.zeros_like, network.weights)
        add = lambda total, window: (jax.tree.map(jnp.add, total, block(*window)), None)
        return brainstate.transform.scan(add, (zeros, jnp.zeros((), xs.dtype)), blocks)[0]

    return gradient


def _windows(a: Array, steps: int) -> Array:
    """A sequence as windows; zeros fill the last one, and as a mask they do not count."""
    missing = -len(a) % steps
    full = jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) if missing else a
    return full.reshape(-1, steps, *a.shape[1:])


def online(
    network: Network, task: SequenceTask, choice: Choice, size: int
) -> tuple[Gradient, ETraceAlgorithm]:
    """The gradient of a rule, and its learner."""
    x = jnp.zeros((size, task.inputs))
    learner = compile(network, choice.name, x, batch_size=size, **choice.options)
    loss = task.measure.loss
    windowed = choice.window is not None and choice.window > 1

    def step(x: Array, y: Array) -> Array:
        return jax.vmap(loss)(learner(MultiStepData(x)), y) if windowed else loss(learner(x), y)

    def gradient(xs: Array, ys: Array) -> tuple[Weights, Array]:
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


Job = tuple[Compiled, Batch, list[float]]


def time_in_turns(
    jobs: list[Job], rounds: int, after_round: Callable[[], object] = lambda: None
) -> None:
    """Append the seconds of each gradient to its list, in turns so that all meet the same load."""
    weights = [gradient.network.weights for gradient, _, _ in jobs]
    for n in range(rounds + 1):
        for at, (gradient, batch, seconds) in zip(weights, jobs, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(gradient(at, batch))
            if n:  # the first round warms up
                seconds.append(time.perf_counter() - started)
        after_round()


def agreement(grads: Weights, reference: Weights) -> tuple[float, float]:
    """Cosine between two gradients, and relative error of the first."""
    a, b = (
        jnp.concatenate([leaf.ravel() for path in reference for leaf in jax.tree.leaves(g[path])])
        for g in (grads, reference)
    )
    norm = jnp.linalg.norm
    return float(a @ b / (norm(a) * norm(b))), float(norm(a - b) / norm(b))


def matching_window(bytes_of: Callable[[int], float], wanted: float, length: int) -> int:
    """The window of truncated BPTT whose memory is closest to `wanted`, by interpolation."""
    sizes = {window: bytes_of(window) for window in (1, length)}
    for _ in range(2):
        below = max((w for w, size in sizes.items() if size <= wanted), default=1)
        above = min((w for w, size in sizes.items() if size > wanted), default=length)
        if below >= above - 1 or not sizes[below] < sizes[above]:
            break
        share = (wanted - sizes[below]) / (sizes[above] - sizes[below])
        guess = min(max(below + round(share * (above - below)), below + 1), above - 1)
        sizes[guess] = bytes_of(guess)
    return min(sizes, key=lambda window: (abs(sizes[window] - wanted), window))
