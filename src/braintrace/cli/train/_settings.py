"""What a training run is, written beside its checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..commands._names import TASKS

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

    @property
    def command(self) -> str:
        """The words that name the run."""
        return f"braintrace train {self.task}"


def chosen(options: argparse.Namespace, x64: bool) -> Settings:
    """The settings of a new run: what is given, else what the task has by default."""
    entry = TASKS[options.task]
    pick = lambda given, default: default if given is None else given
    updates = pick(options.updates, entry.updates)
    return Settings(
        options.task,
        pick(options.rule, "d_rtrl"),
        pick(options.cell, entry.cell),
        pick(options.length, entry.length),
        pick(options.units, entry.units),
        pick(options.batch, entry.batch),
        pick(options.lr, entry.lr),
        pick(options.seed, 0),
        updates,
        -(-updates // POINTS),
        x64,
    )


def resumed(options: argparse.Namespace, folder: Path, x64: bool) -> Settings:
    """The settings of a run that goes on; only the number of updates may be another.

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
        raise ValueError(f"{path} is damaged: {error!r}. Begin anew in another folder.") from error
    given = {k: v for k, v in vars(options).items() if v is not None and k != "updates"}
    given["x64"] = x64
    wrong = [
        f"{name} is {given[name]} and was {value}"
        for name, value in asdict(old).items()
        if name in given and given[name] != value
    ]
    if wrong:
        raise ValueError(
            f"--resume goes on with the run in {folder}, but {', '.join(wrong)}. Leave these "
            "options out, or begin anew with another --out."
        )
    updates = old.updates if options.updates is None else options.updates
    return Settings(**{**asdict(old), "updates": updates})


def write(settings: Settings, folder: Path) -> None:
    """Write the settings into the folder, at once."""
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / NAME, asdict(settings))


def put(path: Path, content: dict[str, Any]) -> None:
    """Replace a file of JSON at once."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
