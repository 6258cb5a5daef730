"""One task: every rule from the same weights, on the same batches."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import jax

from ..._errors import CompilationError, NotSupportedError
from .._progress import progress_bar, stage
from ._bench import Bench, network
from ._gradient import Compiled, matching_window
from ._result import Plan, Result, Row
from ._rules import BASELINES, BPTT, IMMEDIATE, TRUNCATED, Choice
from .tasks import Batch

REFUSALS = (CompilationError, NotSupportedError, ValueError, TypeError, RuntimeError)


def compare(plan: Plan, choices: list[Choice]) -> Result:
    """Train every rule on every seed; Ctrl-C returns what is there.

    Raises:
        MissingExtra: a package is not installed.
    """
    result = Result(plan, [])
    try:
        gradients = _prepare(plan, choices, result.rows)
        rows = [row for row in result.rows if row.refused is None]
        with stage(f"{plan.name}, timing the gradients"):
            bench = Bench(plan, gradients[BPTT])
            bench.prepare()
            _time([gradients[row.label] for row in rows], rows, bench.fixed, plan.rounds)
        bar = progress_bar(plan.updates * plan.seeds * len(rows), plan.name)
        for seed in range(plan.seeds):
            for row in rows:
                _attempt(row, partial(bench.train, gradients[row.label], row, seed, bar))
        bar.close()
        result.finished = True
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return result


def _prepare(plan: Plan, choices: list[Choice], rows: list[Row]) -> dict[str, Compiled]:
    """Compile every gradient, and BPTT's in any case; a refusal becomes a row."""
    gradients: dict[str, Compiled] = {}

    def compiled(choice: Choice) -> Compiled:
        if choice.label not in gradients:
            bar.set_postfix_str(choice.label)
            found = Compiled(choice, network(plan, 0), plan.task, plan.batch)
            gradients[choice.label] = found
        return gradients[choice.label]

    def build(choice: Choice, row: Row) -> None:
        if choice.name == TRUNCATED and choice.window is None:
            choice = _matched(plan.task.length, compiled)
            row.label, row.window = choice.label, choice.window
        found = compiled(choice)
        row.working_bytes, row.kept_bytes = found.working, found.kept

    bar = progress_bar(len(choices), f"{plan.name}, compiling")
    compiled(Choice(BPTT, BPTT, {}))
    for choice in choices:
        block = None if choice.name in BASELINES else choice.block
        row = Row(choice.label, choice.name, choice.options, choice.window, block)
        rows.append(row)
        _attempt(row, partial(build, choice, row))
        bar.update(1)
    bar.close()
    return gradients


def _matched(length: int, compiled: Callable[[Choice], Compiled]) -> Choice:
    """Truncated BPTT that takes about as much memory as D_RTRL does."""
    known = {1: Choice(IMMEDIATE, IMMEDIATE, {}), length: Choice(BPTT, BPTT, {})}

    def at(window: int) -> Choice:
        return Choice(f"{TRUNCATED}:window={window}", TRUNCATED, {}, window)

    wanted = compiled(Choice("d_rtrl", "d_rtrl", {})).working
    return at(matching_window(lambda w: compiled(known.get(w) or at(w)).working, wanted, length))


def _attempt(row: Row, action: Callable[[], None]) -> None:
    if row.refused is None:
        try:
            action()
        except REFUSALS as error:
            row.refused = str(error) or type(error).__name__


def _time(gradients: list[Compiled], rows: list[Row], batch: Batch, rounds: int) -> None:
    """Median time of each gradient, taken in turns so that all meet the same load."""
    seconds: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds + 1):
        for gradient, found in zip(gradients, seconds, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(gradient(*batch))
            found.append(time.perf_counter() - started)
    for row, found in zip(rows, seconds, strict=True):
        row.milliseconds = 1e3 * statistics.median(found[1:])
