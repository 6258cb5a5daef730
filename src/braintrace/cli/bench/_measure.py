"""Gradients of sequences of several lengths: compile each, then time them in turns."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field

import brainstate
import jax
import jax.numpy as jnp

from .._progress import progress_bar
from ..compare._gradient import Compiled
from ..compare._network import Network
from ..compare._rules import Choice
from ..compare.tasks import Array, Batch, Measure
from ..compare.tasks._task import ERROR

CELL = "gru"


@dataclass(frozen=True)
class Noise:
    """Random numbers in and out, for measures of cost: every step has a loss."""

    length: int
    inputs: int = 32
    outputs: int = 8
    chance: float = 1.0

    @property
    def title(self) -> str:
        """The task in a few words, with its sizes."""
        return f"random numbers, {self.inputs} in, {self.outputs} out"

    @property
    def measure(self) -> Measure:
        """Squared error."""
        return ERROR

    @property
    def mask(self) -> Array:
        """All steps count."""
        return jnp.ones(self.length)

    def batch(self, key: Array, size: int) -> Batch:
        """Inputs and targets."""
        for_xs, for_ys = jax.random.split(key)
        draw = lambda key, n: jax.random.normal(key, (self.length, size, n))
        return draw(for_xs, self.inputs), draw(for_ys, self.outputs)

    def test(self, size: int) -> Batch:
        """The same for every call."""
        return self.batch(jax.random.key(0), size)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; a gradient beyond `memory_limit` (bytes) is not run."""

    choices: tuple[Choice, ...]
    lengths: tuple[int, ...]
    units: int
    batch: int
    repeats: int
    memory_limit: float


@dataclass(slots=True)
class Point:
    """One gradient: seconds of compiling it, bytes, and seconds of every run after the first."""

    rule: str
    length: int
    compiling: float
    working: float
    kept: int
    seconds: list[float] = field(default_factory=list)
    left_out: bool = False

    @property
    def median(self) -> float | None:
        """Median seconds, None if it was not run."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(slots=True)
class Result:
    """The points so far; `finished` unless it was interrupted."""

    plan: Plan
    points: list[Point]
    finished: bool = False


def measure(plan: Plan) -> Result:
    """Measure everything; Ctrl-C returns what is there."""
    result = Result(plan, [])
    try:
        programs = _compile(plan, result.points)
        batches = {t: Noise(t).batch(jax.random.key(t), plan.batch) for t in plan.lengths}
        bar = progress_bar(plan.repeats + 1, "running, round")
        for number in range(plan.repeats + 1):
            for point, program in zip(result.points, programs, strict=True):
                if program is not None:
                    started = time.perf_counter()
                    jax.block_until_ready(program(*batches[point.length]))
                    if number:  # the first one warms up
                        point.seconds.append(time.perf_counter() - started)
            bar.update(1)
        bar.close()
        result.finished = True
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return result


def _compile(plan: Plan, points: list[Point]) -> list[Compiled | None]:
    programs: list[Compiled | None] = []
    bar = progress_bar(len(plan.choices) * len(plan.lengths), "compiling")
    for length in plan.lengths:
        for choice in plan.choices:
            bar.set_postfix_str(f"{choice.label}, T = {length}")
            task = Noise(length)
            with brainstate.random.seed_context(0):
                network = Network(CELL, task.inputs, plan.units, task.outputs, length)
            started = time.perf_counter()
            program = Compiled(choice, network, task, plan.batch)
            seconds = time.perf_counter() - started
            much = program.working > plan.memory_limit
            points.append(
                Point(choice.label, length, seconds, program.working, program.kept, left_out=much)
            )
            programs.append(None if much else program)
            bar.update(1)
    bar.close()
    return programs
