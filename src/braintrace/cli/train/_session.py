"""A training run: everything that an update changes, and its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import brainstate
import jax
import numpy as np

from ..compare._gradient import online
from ..compare._judge import Judge
from ..compare._network import Network
from ..compare._optimizer import adam
from ..compare._rules import Choice
from ..compare.tasks import Task
from ._settings import Settings

TESTS = 512


class Session:
    """A network, its learner and optimizer, and the curves so far.

    The batch of an update is a function of the seed and the number of the update, so a run that
    goes on later sees what it would have seen.

    Attributes:
        done: updates so far.
        losses: of every update.
        at: updates at which there is a held-out score.
        scores: these scores.
    """

    def __init__(self, settings: Settings, task: Task, choice: Choice):
        self.settings, self.task = settings, task
        network = self._network()
        brainstate.nn.init_all_states(network, batch_size=settings.batch)
        gradient, self.learner = online(network, task, choice, settings.batch)
        start, step = adam(settings.lr)
        self.network = network
        self.moments = start(self.weights)
        self.judge = Judge(self._network(), task, TESTS)
        self.done, self.losses = 0, []
        self.at: list[int] = []
        self.scores: list[float] = []
        key = jax.random.key(settings.seed)

        @brainstate.transform.jit
        def update(moments, number):
            grads, loss = gradient(*task.batch(jax.random.fold_in(key, number), settings.batch))
            weights, moments = step(self.weights, moments, grads)
            for path, state in network.weights.items():
                state.value = weights[path]
            return moments, loss

        self._update = update

    losses: list[float]

    def _network(self) -> Network:
        s, task = self.settings, self.task
        with brainstate.random.seed_context(s.seed):
            return Network(s.cell, task.inputs, s.units, task.outputs, task.length)

    @property
    def weights(self) -> dict[Any, Any]:
        """The weights by path."""
        return {path: state.value for path, state in self.network.weights.items()}

    def advance(self) -> float:
        """One update; returns its loss."""
        self.moments, loss = self._update(self.moments, self.done)
        self.done += 1
        self.losses.append(float(loss))
        return self.losses[-1]

    def score(self) -> float:
        """The held-out score now, put on the curve."""
        if not self.at or self.at[-1] != self.done:
            self.at.append(self.done)
            self.scores.append(self.judge(self.weights))
        return self.scores[-1]

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        curves = {"losses": np.array(self.losses), "at": self.at, "scores": self.scores}
        self.learner.save(path, optimizer=self.moments, step=self.done, extra=curves)

    def load(self, path: Path) -> None:
        """Go back to a checkpoint.

        Raises:
            ValueError, FileNotFoundError: there is none that fits.
        """
        found = self.learner.load(path, optimizer=self.moments)
        assert found.step is not None
        self.done, self.moments = found.step, found.optimizer
        self.losses = found.extra["losses"].tolist()
        self.at, self.scores = found.extra["at"], found.extra["scores"]
