"""`braintrace bench`: time and memory of a gradient against the length of the sequence."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field

import jax
from jax import Array

from .._table import aligned
from ..comparison._gradient import REFUSALS, Compiled, Job, time_in_turns
from ..comparison._model import pure_model
from ..comparison._output import INTERRUPTED, save_figure, save_record
from ..comparison._progress import progress_bar
from ..comparison._rules import AUTO, TRUNCATED, Choice, parse
from ..comparison._sequences import sequences_of
from ..tasks import SequenceTask
from ..tasks._task import ERROR, Batch
from ._commands import BENCH, QUICK_BENCH
from ._figures import draw_bench
from ._network import Network

CELL = "gru"


class Noise(SequenceTask):
    """Random numbers in and out, for measures of cost: every step has a loss."""

    name = "noise"
    inputs, outputs = 32, 8
    measure = ERROR
    chance = 1.0
    title = f"random numbers, {inputs} in, {outputs} out"

    def __init__(self, length: int):
        super().__init__(length)
        self.asked = length

    def batch(self, key: Array, size: int) -> Batch:
        for_xs, for_ys = jax.random.split(key)
        draw = lambda key, n: jax.random.normal(key, (self.length, size, n))
        return draw(for_xs, self.inputs), draw(for_ys, self.outputs)


@dataclass(slots=True)
class Point:
    """One gradient, and what it costs."""

    rule: str
    length: int
    compiling: float  # seconds
    working: float  # bytes of temporary buffers
    stored: int  # bytes of states and traces
    seconds: list[float] = field(default_factory=list)  # of every run after the first
    left_out: bool = False

    @property
    def median(self) -> float | None:
        """Median seconds, None if it was not run."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(slots=True)
class Result:
    """What is measured, and the points so far."""

    choices: tuple[Choice, ...]
    lengths: tuple[int, ...]
    units: int
    batch: int
    repeats: int
    memory_limit: float  # in bytes; a gradient that takes more is not run
    points: list[Point] = field(default_factory=list)
    finished: bool = False  # unless it was interrupted


def run(options: argparse.Namespace) -> int:
    """Measure; a mistake in the options ends in the parser's error. Returns the exit status."""
    sizes = QUICK_BENCH if options.quick else BENCH
    sizes = sizes | {k: v for k in sizes if (v := getattr(options, k)) is not None}
    sizes["lengths"] = tuple(sorted(set(sizes["lengths"])))
    try:
        choices = tuple(parse(options.rules, block=None))  # the library picks the block size
    except ValueError as error:
        options.parser.error(str(error))
    if any(c.name == TRUNCATED and c.window is None for c in choices):
        options.parser.error("tbptt needs a window: tbptt:window=16")
    if any(c.name == AUTO for c in choices):
        options.parser.error("auto chooses on the batch of a task: braintrace compare has it")
    result = Result(choices, **sizes, memory_limit=options.memory_limit * 2**30)
    try:
        measure(result)
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 1
    print("\n" + table(result) + "\n")
    path = options.out / "bench.json"
    save_record(path, {
        "finished": result.finished,
        "settings": {
            "cell": CELL,
            "inputs": Noise.inputs,
            "outputs": Noise.outputs,
            **sizes,
            "memory_limit": result.memory_limit,
            "rules": {c.label: {**c.options, "block": c.block} for c in choices},
        },
        "points": [asdict(p) | {"median": p.median} for p in result.points],
    })  # fmt: skip
    print(f"Record: {path}")
    save_figure(draw_bench, options.out / "bench.png", result)
    return 0 if result.finished else INTERRUPTED


def measure(result: Result) -> None:
    """Measure everything; Ctrl-C leaves the points so far."""
    try:
        jobs = _compile(result)
        bar = progress_bar(result.repeats + 1, "running, round")
        time_in_turns(jobs, result.repeats, lambda: bar.update(1))
        bar.close()
        result.finished = True
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _compile(result: Result) -> list[Job]:
    """The points, not timed yet, and the gradients to time."""
    jobs: list[Job] = []
    bar = progress_bar(len(result.choices) * len(result.lengths), "compiling")
    for length in result.lengths:
        noise = Noise(length)
        task = sequences_of(noise, result.batch)
        batch = task.draw(jax.random.key(length))
        for choice in result.choices:
            bar.set_postfix_str(f"{choice.label}, T = {length}")
            network = Network(CELL, noise, result.units, seed=0)
            started = time.perf_counter()
            gradient = Compiled(choice, pure_model(network, result.batch, task.x), task)
            working = gradient.working
            seconds = time.perf_counter() - started
            point = Point(choice.label, length, seconds, working, gradient.stored)
            point.left_out = working > result.memory_limit
            result.points.append(point)
            if not point.left_out:
                jobs.append((gradient, batch, point.seconds))
            bar.update(1)
    bar.close()
    return jobs


def table(result: Result) -> str:
    """A row per length and gradient."""
    rows: list[tuple[str, ...]] = [("T", "rule", "working MB", "stored MB", "ms", "compile s")]
    for p in result.points:
        time = "left out" if p.left_out else "-" if p.median is None else f"{1e3 * p.median:.2f}"
        sizes = (f"{size / 1e6:.2f}" for size in (p.working, p.stored))
        rows.append((str(p.length), p.rule, *sizes, time, f"{p.compiling:.1f}"))
    lines = [
        f"{CELL.upper()} of {result.units} units, batches of {result.batch}, "
        f"{Noise.title}; median of {result.repeats} runs",
        "",
        *aligned(rows, left=2),
    ]
    if any(p.left_out for p in result.points):
        limit = f"{result.memory_limit / 2**30:g} GiB (--memory-limit)"
        lines.append(f"left out: more working memory than {limit}")
    if not result.finished:
        lines.append("INTERRUPTED")
    return "\n".join(lines)
