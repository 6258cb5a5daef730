"""Gradients of sequences: by a rule, by BPTT, by truncated BPTT; compiled, with what they cost.

A method has a *carry*, what it keeps from step to step: states, traces, inputs. Its `start` makes
the carry of a new sequence, and `run` goes on from one: gradients of the loss of the next steps
(weighed by a mask), the carry after them, the loss, and the outputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..._errors import CompilationError, NotSupportedError, not_supported
from ..._online import Carry, online
from ...program import PyTree
from ...rules import BY_NAME, LearningRule
from ..tasks import Judged
from ._model import Params, PureModel
from ._rules import BPTT, REMATERIALISED, ROLLING, TRUNCATED, Choice
from ._sequences import Batch, Sequences

# What a rule raises that cannot be compiled, or cannot learn from a loss alone.
REFUSALS = (CompilationError, NotSupportedError, ValueError, TypeError, RuntimeError)

Loss = Callable[[PyTree, PyTree], Array]  # of the output and the target of one step
Steps = tuple[PyTree, PyTree, Array]  # inputs, targets, mask
Result = tuple[Params, PyTree, Array, PyTree]  # gradients, carry, loss, outputs


@dataclass(frozen=True, slots=True)
class Method:
    """How gradients are computed, see above."""

    start: Callable[[PyTree], PyTree]  # of the input of a step
    run: Callable[[Params, PyTree, Steps], Result]


def method_of(
    choice: Choice,
    model: PureModel,
    loss: Loss,
    length: int,
    every: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Method:
    """The method of a rule or baseline for sequences of a length, with updates every few steps."""
    if choice.name in (BPTT, REMATERIALISED) and every < length:
        return by_rule(_rolling(choice, length), model, loss, False, mesh)
    if choice.name == REMATERIALISED:
        return reverse(model, loss, apart=math.isqrt(length))
    if choice.name in (BPTT, TRUNCATED):
        return reverse(model, loss, choice.window)
    if choice.name == ROLLING:
        assert choice.window is not None
        choice = _rolling(choice, min(choice.window, length))
    return by_rule(choice, model, loss, every == length, mesh)


def _rolling(choice: Choice, window: int) -> Choice:
    return replace(choice, name=ROLLING, options={}, window=window)


def by_rule(
    choice: Choice, model: PureModel, loss: Loss, whole: bool, mesh: jax.sharding.Mesh | None
) -> Method:
    """The online gradient of a rule; its traces are the carry, unless sequences are `whole`.

    Of a mesh, the axis `data` is for the samples and `model` for the units.
    """
    if choice.value is None and BY_NAME[choice.name].make is None:
        raise not_supported(
            f"{choice.name} is not compared.",
            why="it learns another network besides the model, which has no place here",
            do="train that network with the learner of this rule, see braintrace.compile",
        )
    axes = {"batch": "data", "units": "model"}
    there = () if mesh is None else mesh.axis_names
    spread: dict[str, Any] = {"mesh": mesh, **{k: n for k, n in axes.items() if n in there}}
    rule, window = choice.value or choice.name, choice.window
    net = online(model.step, rule, window=window, **spread, **choice.of_rule)
    block = choice.block and max(choice.block, choice.window or 1)
    with_outputs = lambda output, target: (loss(output, target), output)
    options: dict[str, Any] = {"has_aux": True, "block_size": block}
    kept, ended = (net.grad(with_outputs, keep_traces=k, **options) for k in (True, False))

    def start(x: PyTree) -> Carry:
        return net.init(model.params, model.state, *_inputs(x))

    def run(params: Params, carry: Carry, steps: Steps) -> Result:
        xs, targets, mask = steps
        gradient = ended if whole and not any(_is_draw(carry)) else kept
        extra = {}
        if "modulator" in net.rule.takes and isinstance(targets, Judged):
            extra = {"modulator": _modulator(net.rule, model, params, targets)}
        grads, (carry, losses, outputs) = gradient(params, carry, xs, targets, mask=mask, **extra)
        return grads, carry, weighed(mask, losses), outputs

    return Method(start, run)


def _modulator(rule: LearningRule, model: PureModel, params: Params, judged: Judged) -> Array:
    """What a unit gets of a reward: by the read-out, as it speaks for the choice, if known."""
    sign = -1 if rule.name == "three_factor" else 1  # its modulator is a derivative of a loss
    if model.readout is None:
        return sign * judged.reward
    return sign * judged.chosen @ params[model.readout].T


def judged(model: PureModel, task: Sequences, params: Params, batch: Batch) -> Batch:
    """A batch with what was done in place of its targets, for a task of rewards.

    The trial is run once to know what it is worth. Gradients are then those of choices that were
    made, as if each sample kept its own until its reward comes.
    """
    if task.judge is None:
        return batch
    xs, targets = batch
    weights = jax.lax.stop_gradient(params)
    _, outputs = jax.lax.scan(lambda h, x: model.step(weights, h, x), model.state, xs)
    return xs, task.judge(outputs, targets)


def reverse(model: PureModel, loss: Loss, window: int | None = None, apart: int = 0) -> Method:
    """Reverse mode in windows of some steps, default all: no gradient passes between two.

    With `apart` only states so many steps apart are stored; those between are computed again.
    """

    def through(params: Params, state: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        """The state after some steps, and their outputs."""
        return jax.lax.scan(lambda h, x: model.step(params, h, x), state, xs)

    def again(params: Params, state: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        length = jax.tree.leaves(xs)[0].shape[0]
        part = jax.checkpoint(lambda state, xs: through(params, state, xs))
        head = jax.tree.map(lambda a: a[: length // apart * apart], xs)
        parts = jax.tree.map(lambda a: a.reshape(-1, apart, *a.shape[1:]), head)
        state, outputs = jax.lax.scan(part, state, parts)
        outputs = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)
        if not length % apart:
            return state, outputs
        rest = jax.tree.map(lambda a: a[length // apart * apart :], xs)
        state, last = part(state, rest)
        return state, jax.tree.map(lambda *a: jnp.concatenate(a), outputs, last)

    def block(params: Params, state: PyTree, steps: Steps) -> Result:
        def total(params: Params) -> tuple[Array, tuple[PyTree, PyTree]]:
            after, outputs = (again if apart else through)(params, state, steps[0])
            losses = jax.vmap(loss)(outputs, steps[1])
            return weighed(steps[2], losses), (after, outputs)

        (value, (after, outputs)), grads = jax.value_and_grad(total, has_aux=True)(params)
        return grads, after, value, outputs

    def run(params: Params, state: PyTree, steps: Steps) -> Result:
        length = len(steps[2])
        size = min(window or length, length)
        if size == length:
            return block(params, state, steps)

        # Whole windows, then what is left.
        count = length // size
        head, rest = _cut(steps, count * size)
        windows = jax.tree.map(lambda a: a.reshape(count, size, *a.shape[1:]), head)

        def add(total: Any, window: Steps) -> tuple[Any, PyTree]:
            grads, state, value = total
            more, state, loss, outputs = block(params, state, window)
            return (jax.tree.map(jnp.add, grads, more), state, value + loss), outputs

        zero = (jax.tree.map(jnp.zeros_like, params), state, jnp.zeros(()))
        total, outputs = jax.lax.scan(add, zero, windows)
        outputs = jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:]), outputs)
        if length > count * size:
            total, last = add(total, rest)
            outputs = jax.tree.map(lambda *a: jnp.concatenate(a), outputs, last)
        return *total, outputs

    return Method(lambda x: model.state, run)


def _inputs(x: PyTree) -> tuple[PyTree, ...]:
    return x if type(x) is tuple else (x,)


def weighed(mask: Array, losses: Array) -> Array:
    """What a weight of 0 leaves out may be anything."""
    return jnp.where(mask == 0, 0, mask * losses).sum()


def _cut(steps: Steps, at: int) -> tuple[Steps, Steps]:
    first = jax.tree.map(lambda a: a[:at], steps)
    return first, jax.tree.map(lambda a: a[at:], steps)


class Compiled:
    """The gradient of a rule or baseline for whole sequences; the first use compiles it.

    What random draws depend on goes on from call to call: keys among the states, counts among the
    traces. Everything else starts anew.
    """

    def __init__(
        self,
        choice: Choice,
        model: PureModel,
        task: Sequences,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.choice, self.model, self.task, self.mesh = choice, model, task, mesh
        self.method = method_of(choice, model, task.loss, task.length, task.length, mesh)
        self._draws: list[Array] | None = None

    @cached_property
    def _start(self) -> PyTree:
        return self.method.start(self.task.x)

    @property
    def draws(self) -> list[Array]:
        """What the random draws of the next call depend on."""
        return draws_of(self._start) if self._draws is None else self._draws

    @draws.setter
    def draws(self, draws: list[Array]) -> None:
        self._draws = draws

    @cached_property
    def _program(self) -> Any:
        # Weights and sequence are arguments and gradients are results, so neither is temporary;
        # states and traces are.
        def gradient(params: Params, draws: list[Array], batch: Batch) -> Any:
            carry = with_draws(self.method.start(self.task.x), draws)
            batch = judged(self.model, self.task, params, batch)
            mask = self.task.mask
            # A reward comes at a step without a loss, and what is judged has its zeros itself.
            weights = mask if self.task.judge is None else jnp.ones_like(mask)
            steps = (*batch, weights / mask.sum())
            grads, carry, loss, _ = self.method.run(params, carry, steps)
            return (grads, loss), draws_of(carry)

        if self.mesh is not None:
            return gradient  # the learner compiles it for the devices that its arrays lie on
        arguments = (self.model.params, draws_of(self._start), self.task.shapes)
        return jax.jit(gradient).lower(*arguments).compile()

    def compile(self) -> None:
        """Compile it now, so that a refusal comes now."""
        _ = self._program

    def reset(self) -> None:
        """Draw random numbers from the first one on."""
        self._draws = None

    @property
    def working(self) -> float:
        """Bytes of temporary buffers that XLA reports; not every backend does."""
        memory = self._program.memory_analysis()
        return math.nan if memory is None else memory.temp_size_in_bytes

    @property
    def stored(self) -> int:
        """Bytes of what stays from step to step: states, and traces or inputs."""
        return sum(a.nbytes for a in jax.tree.leaves(self._start))

    def __call__(self, params: Params, batch: Batch) -> tuple[Params, Array]:
        """Gradients and loss of a batch at these weights."""
        out, self.draws = self._program(params, self.draws, batch)
        return out


def _is_draw(carry: PyTree) -> list[bool]:
    """Which leaves random draws depend on: keys, and the counts of draws in traces."""
    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    if not isinstance(carry, Carry):
        return [is_key(a) for a in jax.tree.leaves(carry)]
    traces, _ = jax.tree_util.tree_flatten_with_path(carry.traces)
    counts = [jax.tree_util.DictKey("draws") in path for path, _ in traces]
    return [*map(is_key, jax.tree.leaves(carry.state)), *counts, False]


def draws_of(carry: PyTree) -> list[Array]:
    """What random draws depend on."""
    leaves = jax.tree.leaves(carry)
    return [a for a, draw in zip(leaves, _is_draw(carry), strict=True) if draw]


def with_draws(carry: PyTree, draws: list[Array]) -> PyTree:
    """A carry whose random draws go on from these."""
    leaves, tree = jax.tree.flatten(carry)
    rest = iter(draws)
    new = [next(rest) if draw else a for a, draw in zip(leaves, _is_draw(carry), strict=True)]
    return jax.tree.unflatten(tree, new)


Job = tuple[Compiled, Batch, list[float]]


def time_in_turns(
    jobs: list[Job], rounds: int, after_round: Callable[[], object] = lambda: None
) -> None:
    """Append the seconds of each gradient to its list, in turns so that all meet the same load."""
    for n in range(rounds + 1):
        for gradient, batch, seconds in jobs:
            started = time.perf_counter()
            jax.block_until_ready(gradient(gradient.model.params, batch))
            if n:  # the first round warms up
                seconds.append(time.perf_counter() - started)
        after_round()


def agreement(grads: Params, reference: Params, names: list[str]) -> tuple[float, float]:
    """Cosine between two gradients of these parameters, and relative error of the first."""
    a, b = (jnp.concatenate([g[name].ravel() for name in names]) for g in (grads, reference))
    norm = jnp.linalg.norm
    cosine = jnp.vdot(b, a).real / (norm(a) * norm(b))
    return float(cosine), float(norm(a - b) / norm(b))


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
