"""`braintrace compare`: what it does with its options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._missing import MissingExtra, draw_or_say
from ..commands._compare import SEEDS
from ..commands._names import TASKS
from ._cells import CELLS
from ._figure import draw
from ._record import record, write
from ._result import Plan, Result
from ._rules import BASELINES, DEFAULTS, known, parse
from ._run import compare
from ._table import table
from .tasks import MAKE

QUICK = {"units": 8, "batch": 8, "updates": 10, "seeds": 1}
INTERRUPTED = 130


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Do what the options say; a mistake in them ends in the parser's error.

    Returns:
        The exit status.
    """
    if options.list:
        print(_listing())
        return 0
    try:
        choices = parse(options.rules)
        plans = list(_plans(options))
    except (ValueError, MissingExtra) as error:
        parser.error(str(error))
    for plan in plans:
        try:
            result = compare(plan, choices)
        except MissingExtra as error:
            parser.error(str(error))
        _show(result, options.out)
        if not result.finished:
            return INTERRUPTED
    return 0


def _plans(options: argparse.Namespace) -> Iterator[Plan]:
    names = list(dict.fromkeys(name for word in options.task for name in word.split(",")))
    for name in TASKS if "all" in names else names:
        entry = TASKS[name]

        def pick(option: str, default: Any) -> Any:
            given = getattr(options, option)
            quick = QUICK.get(option, default) if options.quick else default
            return quick if given is None else given

        length = options.length or (entry.quick if options.quick else entry.length)
        plan = Plan(
            name,
            MAKE[name](length),
            options.cell or entry.cell,
            pick("units", entry.units),
            pick("batch", entry.batch),
            pick("updates", entry.updates),
            entry.lr if options.lr is None else options.lr,
            pick("seeds", SEEDS),
        )
        yield replace(plan, tests=64, points=2, rounds=3) if options.quick else plan


def _show(result: Result, out: Path) -> None:
    print("\n" + table(result) + "\n")
    path = out / f"compare_{result.plan.name}.json"
    write(path, record(result))
    print(f"Record: {path}")
    draw_or_say(draw, path.with_suffix(".png"), result)


def _listing() -> str:
    lines = ["Tasks, with the cell, steps and units they have by default"]
    for name, task in TASKS.items():
        sizes = f"{task.cell}, T = {task.length}, {task.units} units"
        lines.append(f"  {name:14}{task.about:34}{sizes}")
    lines += ["", "Cells"]
    lines += [f"  {name:14}{cell.about}" for name, cell in CELLS.items()]
    lines += ["", "Baselines"]
    lines += [f"  {name:14}{about}" for name, about in BASELINES.items()]
    lines += ["", "Rules, with options that this command gives them unless you do"]
    for name in known():
        if name not in BASELINES:
            given = ",".join(f"{key}={value}" for key, value in DEFAULTS.get(name, {}).items())
            lines.append(f"  {name:14}{given}".rstrip())
    lines += ["", "Every rule has window=K (windows of K steps) and block=K (steps at once)."]
    return "\n".join(lines)
