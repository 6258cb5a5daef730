"""`braintrace compare`: rules on tasks, as tables, records and figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import brainstate

from ..._errors import MissingExtra
from .._table import aligned
from ..comparison import CompareResult, compare
from ..comparison._output import INTERRUPTED, save_figure
from ..comparison._rules import BASELINES, DEFAULTS, parse
from ..comparison._sequences import sequences_of
from ..tasks import MAKE, Task
from ._commands import SEEDS
from ._names import CELLS, NEED_DATA, RULES, TASKS
from ._network import Network
from ._source import Failure, Mistake, find, load_module, make_value

QUICK = {"units": 8, "batch": 8, "updates": 10, "seeds": 1, "held_out": 64, "points": 2,
         "rounds": 3}  # fmt: skip
OWN = {"units": 32, "batch": 32, "updates": 500, "seeds": SEEDS}  # for a task of the user's
OWN_RATES = [1e-3, 3e-3, 1e-2]


@dataclass(frozen=True, slots=True)
class Job:
    """One comparison; `file` is the user's, if a model or task comes from one."""

    model: Any
    task: Task
    sizes: dict[str, Any]
    file: str | None


def run(options: argparse.Namespace) -> int:
    """Compare; a mistake in the options ends in the parser's error. Returns the exit status."""
    if options.list:
        print(_listing())
        return 0
    try:
        parse(options.rules)
        jobs = list(_jobs(options))
        for job in jobs:
            if not _save(options.out, _compared(options, job)):
                return INTERRUPTED
    except (ValueError, FileNotFoundError) as error:
        options.parser.error(str(error))
    return 0


def _compared(options: argparse.Namespace, job: Job) -> CompareResult:
    add_to, file = None, _path(options.out, getattr(job.task, "name", type(job.task).__name__))
    if options.add:
        add_to = file
        if not add_to.is_file():
            raise Mistake(
                f"there is no {add_to} to add to.",
                why="--add adds rows to the record of an earlier comparison",
                do="leave out --add, or name its folder with --out",
            )
    with _blamed(job.file):
        return compare(job.model, job.task, options.rules, add_to=add_to, progress=True,
                       update_every=options.update_every, optimizers=options.optimizers,
                       threshold=options.threshold, save_to=file, **job.sizes)  # fmt: skip


@contextmanager
def _blamed(file: str | None) -> Iterator[None]:
    """An error is a line of the user's file, if there is one."""
    try:
        yield
    except (Mistake, MissingExtra):
        raise
    except Exception as error:
        if file is None:
            raise
        do = "fix this; braintrace.compare and braintrace.tasks.Task say what is expected"
        raise Failure("the comparison failed.", error, file, do) from error


def _jobs(options: argparse.Namespace) -> Iterator[Job]:
    words = list(dict.fromkeys(options.task))
    if "all" in words:
        words = [name for name in TASKS if options.data or name not in NEED_DATA]
    for word in words:
        file = None
        if word in TASKS:
            defaults = TASKS[word]
            sizes = {n: getattr(defaults, n) for n in ("units", "batch", "updates")}
            sizes |= {"seeds": SEEDS} | (QUICK if options.quick else {})
            length = options.length or (defaults.quick if options.quick else defaults.length)
            data = {"data": options.data} if word in NEED_DATA else {}
            task, cell, rates = MAKE[word](length, **data), defaults.cell, [defaults.lr]
        else:
            if options.length:
                raise ValueError(f"--length is for built-in tasks, {word} has its own.")
            module, name = load_module(word)
            file, task = str(module.__file__), make_value(module, name, ())
            cell, rates, sizes = "gru", OWN_RATES, OWN | (QUICK if options.quick else {})
        sizes |= {size: value for size in sizes if (value := getattr(options, size, None))}
        units = sizes.pop("units")
        if getattr(task, "streaming", False) and options.updates is None:
            del sizes["updates"]  # follows from the length
        if options.model is None:
            with _blamed(file):
                model = _network(options.cell or cell, task, units)
        elif options.cell or options.units:
            raise ValueError("--cell and --units are for the built-in network: leave them out.")
        else:
            module, name = load_module(options.model)
            model, file = find(module, name, (brainstate.nn.Module,)), str(module.__file__)
        yield Job(model, task, sizes | {"rates": options.lr or rates}, file)


def _network(cell: str, task: Any, units: int) -> Callable[[int], Network]:
    """The built-in network for a task, of a seed."""
    sizes = task
    if not hasattr(task, "inputs"):
        x = sequences_of(task, 1)
        if not hasattr(task, "outputs") or not hasattr(x.x, "shape"):
            raise Mistake(
                f"the task {x.name} does not say how many outputs it has.",
                why="the built-in network has a read-out of this size",
                do="give the task an attribute `outputs`, or pass a network: --model net.py:Net",
            )
        sizes = SimpleNamespace(inputs=x.x.shape[-1], outputs=task.outputs, length=x.length)

    def make(seed: int) -> Network:
        return Network(cell, sizes, units, seed)

    make.__name__ = f"{cell} of {units} units"
    return make


def _path(out: Path, name: str) -> Path:
    return out / f"compare_{name}.json"


def _save(out: Path, result: CompareResult) -> bool:
    """Print the table and write the files; returns whether it is finished."""
    print(f"\n{result.table()}\n")
    path = _path(out, result.name)
    result.save(path)
    print(f"Record: {path}")
    save_figure(result.figure, path.with_suffix(".png"))
    return result.finished


def _listing() -> str:
    sizes = lambda task: f"{task.cell}, T = {task.length}, {task.units} units"
    options = lambda name: ",".join(f"{k}={v}" for k, v in DEFAULTS.get(name, {}).items())
    parts: dict[str, list[tuple[str, ...]]] = {
        "Tasks, with their default cell, steps and units": [
            (name, task.about, sizes(task)) for name, task in TASKS.items()
        ],
        "Cells": list(CELLS.items()),
        "Baselines": list(BASELINES.items()),
        "Rules, with the defaults of this command for their options": [
            (name, options(name)) for name in RULES if name not in BASELINES
        ],
    }
    lines = []
    for title, rows in parts.items():
        lines += [title, *(f"  {line}" for line in aligned(rows, left=len(rows[0]))), ""]
    return "\n".join(
        [*lines, "Every rule has window=K (windows of K steps) and block=K (steps at once)."]
    )
