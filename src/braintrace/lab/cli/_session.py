"""A training run: its settings, its checkpoint, and the signals that stop it."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import value_error
from ...checkpoint import CheckpointMixin, Named, named, renewed
from ..comparison._gradient import Compiled
from ..comparison._model import builder
from ..comparison._rules import Choice
from ..comparison._sequences import sequences_of
from ..comparison._training import Optimizer, Run, by_sequence, scorer
from ..tasks import SequenceTask
from ._names import CELLS, TASKS
from ._network import Network

TESTS, POINTS = 512, 20  # held-out sequences, and scores on them during training
SETTINGS = "settings.json"  # file name
LARGEST = 10**7  # of the numbers in it


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

    def __post_init__(self) -> None:
        choices = {"task": list(TASKS), "cell": list(CELLS)}
        sizes = ("length", "units", "batch", "updates", "score_every")
        ranges = {"seed": (0, 2**32)} | dict.fromkeys(sizes, (1, LARGEST))
        wrong = [k for k, names in choices.items() if getattr(self, k) not in names]
        for name, (least, end) in ranges.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value < end:
                wrong.append(name)
        if type(self.lr) not in (int, float) or not 0 <= self.lr < math.inf:
            wrong.append("lr")
        wrong += [] if isinstance(self.rule, str) else ["rule"]
        wrong += [] if isinstance(self.x64, bool) else ["x64"]
        if wrong:
            values = ", ".join(f"{name} = {str(getattr(self, name))[:40]!r}" for name in wrong)
            raise ValueError(
                f"{values}. Sizes are whole numbers from 1 to below {LARGEST}, a seed may be 0, "
                "a rate is positive."
            )


def new_settings(options: argparse.Namespace, x64: bool) -> Settings:
    """The settings of a new run: those of the options, else the defaults of the task."""
    defaults = TASKS[options.task]
    names = ("cell", "length", "units", "batch", "lr", "updates")
    values: dict[str, Any] = {"rule": "d_rtrl", "seed": 0}
    values |= {name: getattr(defaults, name) for name in names}
    values |= {name: value for name, value in _passed(options).items() if name in values}
    every = -(-values["updates"] // POINTS)
    return Settings(task=options.task, score_every=every, x64=x64, **values)


def resumed_settings(options: argparse.Namespace, folder: Path, x64: bool) -> Settings:
    """The settings of a run that is continued; only the number of updates may be another."""
    path = folder / SETTINGS
    if not path.is_file():
        raise ValueError(
            f"there is nothing to resume in {folder}: {path} is missing. Leave out --resume, or "
            "name the folder with --out."
        )
    try:
        content = json.loads(path.read_text("utf-8"))
        old = Settings(**{f.name: content[f.name] for f in fields(Settings)})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}. Start again in another folder.") from error
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
            "options out, or start again with another --out."
        )
    return replace(old, updates=updates)


def _passed(options: argparse.Namespace) -> dict[str, Any]:
    """The options that are not left out."""
    return {name: value for name, value in vars(options).items() if value is not None}


def mesh_of(options: argparse.Namespace) -> jax.sharding.Mesh | None:
    """The mesh of `--devices` or `--mesh`, with the axes data, model or both, in this order."""
    if options.devices is not None and options.mesh is not None:
        raise ValueError("--devices N is --mesh data=N: leave out one of them.")
    sizes = options.mesh or ({} if options.devices is None else {"data": options.devices})
    if not sizes:
        return None
    count, there = prod(sizes.values()), jax.devices()
    if count > len(there):
        raise ValueError(
            f"the mesh has {count} devices, and there are {len(there)}. A CPU counts as many with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    names = [name for name in ("data", "model") if name in sizes]
    shape = [sizes[name] for name in names]
    return jax.sharding.Mesh(np.array(there[:count]).reshape(shape), names)


class Session(CheckpointMixin, Run):
    """A run with its settings.

    The batch of an update is a function of the seed and the number of the update, so a run that
    is continued later trains on the batches it would have had.
    """

    def __init__(
        self,
        settings: Settings,
        task: SequenceTask,
        choice: Choice,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.settings, self.task, s = settings, task, settings
        sequences = sequences_of(task, s.batch)
        network = lambda: Network(s.cell, task, s.units, s.seed)
        build = builder(network, lambda size: jnp.zeros((size, task.inputs)))
        model, adam, key = build(0, s.batch), Optimizer("adam"), jax.random.key(s.seed)
        self.gradient = Compiled(choice, model, sequences, mesh)
        super().__init__(
            by_sequence(self.gradient, adam, s.lr),
            model.params,
            adam.init(model.params),
            lambda n: sequences.draw(jax.random.fold_in(key, n)),
            scorer(build, sequences, sequences.split("test", TESTS)),
        )

    def named_arrays(self) -> Named:
        """The weights, and what random draws depend on."""
        return named("weights", self.weights) | named("states/draws", self.gradient.draws)

    def assign(self, values: Named) -> None:
        """Give them other values."""
        self.weights = renewed("weights", self.weights, values)
        self.gradient.draws = renewed("states/draws", self.gradient.draws, values)

    def check_optimizer(self, optimizer: object) -> None:
        """There is one only."""

    def identity(self) -> dict[str, Any]:
        """The rule; `load_run` compares the rest."""
        return {"rule": self.settings.rule}

    def save_run(self, path: Path) -> None:
        """Write a checkpoint."""
        curves = {"losses": np.array(self.losses), "at": self.at, "scores": self.scores}
        extra = {**curves, "settings": asdict(self.settings)}
        self.save(path, optimizer=self.moments, step=self.done, extra=extra)

    def load_run(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            ValueError: it cannot be loaded, or is that of another run.
        """
        checkpoint = self.load(path, optimizer=self.moments)
        saved = checkpoint.extra.get("settings", {}) if type(checkpoint.extra) is dict else {}
        wrong = [
            f"{name}: {saved.get(name)!r} in the checkpoint, {value!r} in {SETTINGS}"
            for name, value in asdict(self.settings).items()
            if name not in ("updates", "score_every") and saved.get(name) != value
        ]
        if wrong or checkpoint.step is None:
            raise value_error(
                f"{path} is the checkpoint of another run.\n    " + "\n    ".join(wrong),
                why="a run goes on with the batches it would have had",
                do="put the files of one run into its folder, or start again with another --out",
            )
        self.moments, self.done = checkpoint.optimizer, checkpoint.step
        self.losses = checkpoint.extra["losses"].tolist()
        self.at, self.scores = checkpoint.extra["at"], checkpoint.extra["scores"]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that the first SIGINT or SIGTERM is appended to; a second one acts as usual."""
    received: list[int] = []
    handlers: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        handlers.clear()

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()
        print("\nstopping after this update; once more stops at once", file=sys.stderr, flush=True)

    if threading.current_thread() is threading.main_thread():  # elsewhere there are no signals
        numbers = (signal.SIGINT, signal.SIGTERM)
        handlers.update({number: signal.signal(number, note) for number in numbers})
    try:
        yield received
    finally:
        restore()
