"""`braintrace compare`: rules on tasks, as tables, records and figures."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

from ..tasks import MAKE
from ._commands import SEEDS
from ._comparison import Plan, Result, Row, Seed, compare
from ._figures import draw_compare
from ._names import CELLS, RULES, TASKS
from ._output import INTERRUPTED, save_figure, save_record
from ._rules import BASELINES, DEFAULTS, parse

QUICK = {"units": 8, "batch": 8, "updates": 10, "seeds": 1, "tests": 64, "points": 2, "rounds": 3}

NOTES = (
    "mean ± standard deviation over seeds; cos and err: cosine and relative error to BPTT of the "
    "cell's weights,",
    "at initial and at trained weights; work: temporary buffers of a gradient; stored: states "
    "and traces;",
    "ms/step: median time of a sequence gradient divided by its steps",
)


def run(options: argparse.Namespace) -> int:
    """Compare; a mistake in the options ends in the parser's error. Returns the exit status."""
    if options.list:
        print(_listing())
        return 0
    try:
        choices, plans = parse(options.rules), list(_plans(options))
    except ValueError as error:
        options.parser.error(str(error))
    for plan in plans:
        result = compare(plan, choices)
        _save(result, options.out)
        if not result.finished:
            return INTERRUPTED
    return 0


def _plans(options: argparse.Namespace) -> Iterator[Plan]:
    words = list(dict.fromkeys(name for word in options.task for name in word.split(",")))
    for name in TASKS if "all" in words else words:
        task = TASKS[name]
        sizes = {"units": task.units, "batch": task.batch, "updates": task.updates, "seeds": SEEDS}
        sizes |= QUICK if options.quick else {}
        sizes |= {size: value for size in sizes if (value := getattr(options, size, None))}
        length = options.length or (task.quick if options.quick else task.length)
        cell, rate = options.cell or task.cell, options.lr or task.lr
        yield Plan(name, MAKE[name](length), cell, rate=rate, **sizes)


def _save(result: Result, out: Path) -> None:
    print("\n" + table(result) + "\n")
    plan, task = result.plan, result.plan.task
    path = out / f"compare_{plan.name}.json"
    save_record(path, {
        "finished": result.finished,
        "task": {
            "name": plan.name,
            "title": task.title,
            "length": task.length,
            "metric": task.measure.name,
            "scale": task.measure.scale,
            "higher_is_better": task.measure.rising,
            "chance": task.chance,
        },
        "settings": {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "task"},
        "rows": [asdict(row) for row in result.rows],
    })  # fmt: skip
    save_figure(draw_compare, path.with_suffix(".png"), result)


def _listing() -> str:
    lines = ["Tasks, with their default cell, steps and units"]
    for name, task in TASKS.items():
        sizes = f"{task.cell}, T = {task.length}, {task.units} units"
        lines.append(f"  {name:14}{task.about:34}{sizes}")
    lines += ["", "Cells"]
    lines += [f"  {name:14}{about}" for name, about in CELLS.items()]
    lines += ["", "Baselines"]
    lines += [f"  {name:14}{about}" for name, about in BASELINES.items()]
    lines += ["", "Rules, with the defaults of this command for their options"]
    for name in RULES:
        if name not in BASELINES:
            defaults = ",".join(f"{k}={value}" for k, value in DEFAULTS.get(name, {}).items())
            lines.append(f"  {name:14}{defaults}".rstrip())
    lines += ["", "Every rule has window=K (windows of K steps) and block=K (steps at once)."]
    return "\n".join(lines)


def table(result: Result) -> str:
    """Title, one line per rule, and what the columns mean."""
    plan, measure = result.plan, result.plan.task.measure
    title = [
        f"{plan.name}: {plan.task.title}",
        f"{plan.cell} of {plan.units} units, T = {plan.task.length}, batches of {plan.batch}, "
        f"{plan.updates} updates, rate {plan.rate:g}, seeds 0 to {plan.seeds - 1}; "
        f"{plan.task.chance_level}",
    ]
    if not result.finished:
        title.append("INTERRUPTED: results so far")
    three = "{:.3f}".format
    columns: dict[str, Callable[[Row], str]] = {
        "rule": lambda row: row.label,
        measure.name: lambda row: _over(row.seeds, lambda s: s.score, measure.text, True),
        "cos init": lambda row: _over(row.seeds, lambda s: s.initial.cosine, three),
        "trained": lambda row: _over(row.seeds, lambda s: s.trained.cosine, three),
        "err init": lambda row: _over(row.seeds, lambda s: s.initial.error, three),
        "trained ": lambda row: _over(row.seeds, lambda s: s.trained.error, three),
        "work MB": lambda row: _number(row.working_bytes / 1e6),
        "stored MB": lambda row: _number(row.kept_bytes / 1e6),
        "ms/step": lambda row: _number(row.milliseconds / plan.task.length),
        "seeds": lambda row: f"{len(row.seeds)} of {plan.seeds}",
    }
    cells = [[name.strip() for name in columns]]
    cells += [[column(row) for column in columns.values()] for row in result.rows]
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = ["  ".join([c[0].ljust(first), *map(str.rjust, c[1:], widths)]) for c in cells]
    for n, row in enumerate(result.rows, 1):
        if row.refused is not None:
            lines[n] = f"{row.label:{first}}  refused: {row.refused.splitlines()[0]}"
    return "\n".join([*title, "", *lines, "", *NOTES])


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
