"""`braintrace compare`: rules on tasks, as tables, records and figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from ._cells import CELLS
from ._commands import SEEDS
from ._comparison import Plan, Result, compare
from ._figures import draw_compare
from ._names import TASKS
from ._output import INTERRUPTED, save_figure, save_record
from ._rules import BASELINES, DEFAULTS, names, parse
from ._table import table
from .tasks import MAKE

QUICK = {"units": 8, "batch": 8, "updates": 10, "seeds": 1, "tests": 64, "points": 2, "rounds": 3}


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
    lines += [f"  {name:14}{cell.about}" for name, cell in CELLS.items()]
    lines += ["", "Baselines"]
    lines += [f"  {name:14}{about}" for name, about in BASELINES.items()]
    lines += ["", "Rules, with the defaults of this command for their options"]
    for name in names():
        if name not in BASELINES:
            defaults = ",".join(f"{k}={value}" for k, value in DEFAULTS.get(name, {}).items())
            lines.append(f"  {name:14}{defaults}".rstrip())
    lines += ["", "Every rule has window=K (windows of K steps) and block=K (steps at once)."]
    return "\n".join(lines)
