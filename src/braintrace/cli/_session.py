"""A training run with checkpoints."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from ._gradient import Compiled
from ._network import network
from ._rules import Choice
from ._settings import Settings
from ._training import Run, Training, held_out
from .tasks import Task

TESTS = 512


class Session(Run):
    """A run with its settings.

    The batch of an update is a function of the seed and the number of the update, so a run that
    is continued later trains on the batches it would have had.
    """

    def __init__(self, settings: Settings, task: Task, choice: Choice):
        self.settings, self.task, s = settings, task, settings
        build = lambda: network(s.cell, task, s.units, s.seed)
        gradient = Compiled(choice, build(), task, s.batch)
        training = Training(build(), task, s.batch, s.lr, held_out(task, TESTS))
        key = jax.random.key(s.seed)
        super().__init__(
            training, gradient, gradient.network.weights, lambda n: jax.random.fold_in(key, n)
        )

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        self.gradient.network.weights = self.weights
        curves = {"losses": np.array(self.losses), "at": self.at, "scores": self.scores}
        self.gradient.learner.save(path, optimizer=self.moments, step=self.done, extra=curves)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            ValueError, FileNotFoundError: there is none that fits.
        """
        checkpoint = self.gradient.learner.load(path, optimizer=self.moments)
        assert checkpoint.step is not None
        self.weights, self.moments = self.gradient.network.weights, checkpoint.optimizer
        self.done, self.losses = checkpoint.step, checkpoint.extra["losses"].tolist()
        self.at, self.scores = checkpoint.extra["at"], checkpoint.extra["scores"]
