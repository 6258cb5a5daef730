"""The figure of a training run: the loss, and the score on held-out sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ._session import Session


def draw(path: Path, session: Session) -> None:
    """Write the figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    s, measure = session.settings, session.task.measure
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    figure.suptitle(f"{s.task}: {session.task.title}\n{s.rule}, {s.cell} of {s.units} units")
    left, right = figure.subplots(1, 2)
    losses = np.array(session.losses)
    width = max(1, min(25, len(losses) // 4))
    left.plot(np.arange(1, len(losses) + 1), losses, color="#0072B2", alpha=0.25, lw=0.8)
    if len(losses):
        means = np.convolve(losses, np.ones(width) / width, "valid")
        left.plot(np.arange(width, len(losses) + 1), means, color="#0072B2")
    left.set(title="while learning", xlabel="weight update", ylabel="loss of the batch")
    scores = measure.scale * np.array(session.scores)
    right.plot(session.at, scores, "o-", color="#D55E00", ms=3)
    chance = measure.scale * session.task.chance
    right.axhline(chance, color="grey", ls=":", label="chance level")
    right.set(title="held out", xlabel="weight update", ylabel=measure.name)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
