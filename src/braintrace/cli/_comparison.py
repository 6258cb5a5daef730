"""Several rules on one task: from the same weights and batches, scores and costs of each."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..tasks import Batch, SequenceTask
from ._gradient import REFUSALS, Compiled, Job, agreement, matching_window, time_in_turns
from ._network import Network, Weights
from ._progress import Bar, progress_bar, stage
from ._rules import BASELINES, BPTT, IMMEDIATE, TRUNCATED, Choice, Options
from ._training import Run, Training, held_out


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and how long."""

    name: str
    task: SequenceTask
    cell: str
    units: int
    batch: int
    updates: int
    rate: float
    seeds: int
    tests: int = 512  # held-out sequences, at most
    points: int = 20  # how often the held-out score is taken during training
    rounds: int = 9  # how often each gradient is timed

    def network(self, seed: int) -> Network:
        """The network of a seed, the same for every rule."""
        return Network(self.cell, self.task, self.units, seed)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Cosine and relative error to BPTT: of the cell's weights, and of all."""

    cosine: float
    error: float
    cosine_all: float
    error_all: float


@dataclass(frozen=True, slots=True)
class Seed:
    """One training run: scores at the updates `at`, losses of every update."""

    seed: int
    score: float
    at: list[int]
    scores: list[float]
    losses: list[float]
    initial: Agreement
    trained: Agreement


@dataclass(slots=True)
class Row:
    """The results of a rule so far; `kept_bytes` are those of states and traces."""

    label: str
    rule: str
    options: Options
    window: int | None = None
    block: int | None = None
    refused: str | None = None
    working_bytes: float = math.nan
    kept_bytes: int = 0
    milliseconds: float = math.nan  # of a gradient of the whole sequence
    seeds: list[Seed] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """The rows of a task; `finished` unless it was interrupted."""

    plan: Plan
    rows: list[Row]
    finished: bool = False


def compare(plan: Plan, choices: list[Choice]) -> Result:
    """Train every rule on every seed; Ctrl-C returns the results so far."""
    result = Result(plan, [])
    try:
        gradients = _prepare(plan, choices, result.rows)
        rows = [row for row in result.rows if row.refused is None]
        with stage(f"{plan.name}, timing the gradients"):
            trainer = Trainer(plan, gradients[BPTT])
            jobs: list[Job] = [(gradients[row.label], trainer.fixed, []) for row in rows]
            time_in_turns(jobs, plan.rounds)
            for row, (_, _, seconds) in zip(rows, jobs, strict=True):
                row.milliseconds = 1e3 * statistics.median(seconds)
        bar = progress_bar(plan.updates * plan.seeds * len(rows), plan.name)
        for seed in range(plan.seeds):
            for row in rows:
                if row.refused is None:
                    with _refusals(row):
                        trainer.train(gradients[row.label], row, seed, bar)
        bar.close()
        result.finished = True
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return result


class Trainer:
    """Trains each rule from each seed, and compares its gradients with those of BPTT."""

    def __init__(self, plan: Plan, bptt: Compiled):
        self.plan, self.bptt = plan, bptt
        xs, ys = held_out(plan.task, plan.tests)
        self.training = Training(plan.network(0), plan.task, plan.batch, plan.rate, (xs, ys))
        # Gradients are compared on held-out sequences; these are repeated if there are too few.
        index = jnp.arange(plan.batch) % xs.shape[1]
        self.fixed: Batch = (jnp.take(xs, index, axis=1), jnp.take(ys, index, axis=1))
        # Compile what all runs share, so that the clock of the progress bar counts training.
        weights, training = plan.network(0).weights, self.training
        training.score(weights)
        training.step(weights, training.start(weights), weights)
        training.draw(jax.random.key(0))

    def agreement(self, gradient: Compiled, weights: Weights) -> Agreement:
        """How close a gradient is to BPTT's at these weights, on the fixed batch."""
        both = [each(weights, self.fixed)[0] for each in (gradient, self.bptt)]
        cell = [{path: g for path, g in grads.items() if path[0] == "cell"} for grads in both]
        return Agreement(*agreement(*cell), *agreement(*both))

    def train(self, gradient: Compiled, row: Row, seed: int, bar: Bar) -> None:
        """Train one rule from the weights of a seed on its batches."""
        plan, measure = self.plan, self.plan.task.measure
        keys = jax.random.split(jax.random.key(seed), plan.updates)
        run = Run(self.training, gradient, plan.network(seed).weights, keys.__getitem__)
        at = np.linspace(0, plan.updates, plan.points + 1).round().astype(int).tolist()
        with brainstate.random.seed_context(seed):
            initial = self.agreement(gradient, run.weights)
            run.score()
            for start, end in pairwise(sorted(set(at))):
                for _ in range(start, end):
                    run.advance()
                text = f"{measure.name} {measure.text(run.score())}, seed {seed}, {row.label}"
                bar.set_postfix_str(text, refresh=False)
                bar.update(end - start)
            trained = self.agreement(gradient, run.weights)
        losses = [float(loss) for loss in run.losses]
        row.seeds.append(Seed(seed, run.scores[-1], run.at, run.scores, losses, initial, trained))


def _prepare(plan: Plan, choices: list[Choice], rows: list[Row]) -> dict[str, Compiled]:
    """Compile every gradient, and BPTT's in any case; a refusal becomes a row."""
    gradients: dict[str, Compiled] = {}

    def compiled(choice: Choice) -> Compiled:
        if choice.label not in gradients:
            bar.set_postfix_str(choice.label)
            gradient = Compiled(choice, plan.network(0), plan.task, plan.batch)
            gradient.compile()
            gradients[choice.label] = gradient
        return gradients[choice.label]

    bar = progress_bar(len(choices), f"{plan.name}, compiling")
    compiled(Choice(BPTT, BPTT, {}))
    for choice in choices:
        block = None if choice.name in BASELINES else choice.block
        row = Row(choice.label, choice.name, choice.options, choice.window, block)
        rows.append(row)
        with _refusals(row):
            if choice.name == TRUNCATED and choice.window is None:
                choice = _matched(plan.task.length, compiled)
                row.label, row.window = choice.label, choice.window
            gradient = compiled(choice)
            row.working_bytes, row.kept_bytes = gradient.working, gradient.stored
        bar.update(1)
    bar.close()
    return gradients


def _matched(length: int, compiled: Callable[[Choice], Compiled]) -> Choice:
    """Truncated BPTT that takes about as much memory as D_RTRL does."""
    limits = {1: Choice(IMMEDIATE, IMMEDIATE, {}), length: Choice(BPTT, BPTT, {})}

    def at(window: int) -> Choice:
        return Choice(f"{TRUNCATED}:window={window}", TRUNCATED, {}, window)

    wanted = compiled(Choice("d_rtrl", "d_rtrl", {})).working
    return at(matching_window(lambda w: compiled(limits.get(w) or at(w)).working, wanted, length))


@contextmanager
def _refusals(row: Row) -> Iterator[None]:
    """Write a refusal into the row."""
    try:
        yield
    except REFUSALS as error:
        row.refused = str(error) or type(error).__name__
