"""The table of a task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from ._comparison import Result, Row, Seed

NOTES = (
    "mean ± standard deviation over seeds; cos and err: cosine and relative error to BPTT of the "
    "cell's weights,",
    "at initial and at trained weights; work: temporary buffers of a gradient; stored: states "
    "and traces;",
    "ms/step: median time of a sequence gradient divided by its steps",
)


def table(result: Result) -> str:
    """Title, one line per rule, and what the columns mean."""
    plan, measure = result.plan, result.plan.task.measure
    chance = measure.text(plan.task.chance)
    lines = [
        f"{plan.name}: {plan.task.title}",
        f"{plan.cell} of {plan.units} units, T = {plan.task.length}, batches of {plan.batch}, "
        f"{plan.updates} updates, rate {plan.rate:g}, seeds 0 to {plan.seeds - 1}; "
        f"chance level: {chance}",
    ]
    if not result.finished:
        lines.append("INTERRUPTED: results so far")
    three = "{:.3f}".format
    columns: list[tuple[str, Callable[[Row], str]]] = [
        (measure.name, lambda row: _over(row.seeds, lambda s: s.score, measure.text, True)),
        ("cos init", lambda row: _over(row.seeds, lambda s: s.initial.cosine, three)),
        ("trained", lambda row: _over(row.seeds, lambda s: s.trained.cosine, three)),
        ("err init", lambda row: _over(row.seeds, lambda s: s.initial.error, three)),
        ("trained", lambda row: _over(row.seeds, lambda s: s.trained.error, three)),
        ("work MB", lambda row: _number(row.working_bytes / 1e6)),
        ("stored MB", lambda row: _number(row.kept_bytes / 1e6)),
        ("ms/step", lambda row: _number(row.milliseconds / plan.task.length)),
    ]
    cells = [["rule", *(name for name, _ in columns), "seeds"]]
    for row in result.rows:
        if row.refused is None:
            values = [form(row) for _, form in columns]
            cells.append([row.label, *values, f"{len(row.seeds)} of {plan.seeds}"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = max([widths[0], *(len(row.label) for row in result.rows)])
    rows = iter(_line(line, widths) for line in cells)
    body = [next(rows)]
    for row in result.rows:
        refusal = f"{row.label:{widths[0]}}  refused: {first_line(row.refused)}"
        body.append(next(rows) if row.refused is None else refusal)
    return "\n".join([*lines, "", *body, "", *NOTES])


def first_line(text: str | None) -> str:
    """The first line of a message."""
    return (text or "").partition("\n")[0]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join([f"{cells[0]:{len(first)}}", *rest])


def _over(
    seeds: list[Seed],
    value: Callable[[Seed], float],
    form: Callable[[float], str],
    spread: bool = False,
) -> str:
    """Mean over the seeds; with `spread`, the standard deviation too."""
    values = [value(seed) for seed in seeds]
    if not values:
        return "-"
    mean = form(math.fsum(values) / len(values))
    if not spread or len(values) == 1:
        return mean
    finite = all(map(math.isfinite, values))
    return f"{mean} ± {form(statistics.stdev(values)) if finite else '-'}"


def _number(value: float) -> str:
    """Three digits that count."""
    if not math.isfinite(value):
        return "-"
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(digits, 0), 4)}f}"
