"""The settings of a training run, written beside its checkpoints."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ._names import TASKS

NAME = "settings.json"
POINTS = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """A training run; `score_every` counts the updates between two held-out scores."""

    task: str
    rule: str
    cell: str
    length: int
    units: int
    batch: int
    lr: float
    seed: int
    updates: int
    score_every: int
    x64: bool


def new(options: argparse.Namespace, x64: bool) -> Settings:
    """The settings of a new run: those of the options, else the defaults of the task."""
    defaults = TASKS[options.task]
    names = ("cell", "length", "units", "batch", "lr", "updates")
    values: dict[str, Any] = {"rule": "d_rtrl", "seed": 0}
    values |= {name: getattr(defaults, name) for name in names}
    values |= {name: value for name, value in _passed(options).items() if name in values}
    every = -(-values["updates"] // POINTS)
    return Settings(task=options.task, score_every=every, x64=x64, **values)


def resumed(options: argparse.Namespace, folder: Path, x64: bool) -> Settings:
    """The settings of a run that is continued; only the number of updates may be another.

    Raises:
        ValueError: there is none, or the options say something else.
    """
    path = folder / NAME
    if not path.is_file():
        raise ValueError(
            f"there is nothing to resume in {folder}: {path} is missing. Leave out --resume, or "
            "name the folder with --out."
        )
    try:
        content = json.loads(path.read_text("utf-8"))
        old = Settings(**{f.name: content[f.name] for f in fields(Settings)})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}. Start anew in another folder.") from error
    passed = _passed(options) | {"x64": x64}
    updates = passed.pop("updates", old.updates)
    wrong = [
        f"{name} is {passed[name]} and was {value}"
        for name, value in asdict(old).items()
        if name in passed and passed[name] != value
    ]
    if wrong:
        raise ValueError(
            f"--resume continues the run in {folder}, but {', '.join(wrong)}. Leave these "
            "options out, or start anew with another --out."
        )
    return replace(old, updates=updates)


def _passed(options: argparse.Namespace) -> dict[str, Any]:
    """The options that are not left out."""
    return {name: value for name, value in vars(options).items() if value is not None}
