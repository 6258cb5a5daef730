"""The figures of the commands.

Every function returns a figure, and raises ModuleNotFoundError where matplotlib is not installed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..comparison._figure import COLOURS, GREYS, Axes, Figure, new_figure
from ..tasks import SequenceTask

if TYPE_CHECKING:
    from ._bench import Result as BenchResult
    from ._session import Session

MARKS = "so^Dvx"
NAMES = {"bptt": "BPTT", "remat": "BPTT, rematerialised", "d_rtrl": "D-RTRL"}


def _losses(axes: Axes, losses: list[float], width: int, colour: str, label: str | None) -> None:
    """The losses of all updates, and their mean over the last `width` ones."""
    axes.plot(np.arange(1, len(losses) + 1), losses, color=colour, alpha=0.2, lw=0.8)
    if losses:
        means = np.convolve(losses, np.ones(width) / width, "valid")
        axes.plot(np.arange(width, len(losses) + 1), means, color=colour, label=label)
    axes.set(xlabel="weight update")


def draw_demo(
    task: SequenceTask, losses: dict[str, list[float]], memory: dict[str, dict[int, float]]
) -> Figure:
    """The losses of every update, and bytes by sequence length, both by name."""
    from matplotlib.ticker import NullFormatter

    figure, (left, right) = new_figure((10, 4), 2)
    for colour, name in zip(("tab:orange", "tab:blue"), losses, strict=True):
        _losses(left, losses[name], min(10, len(losses[name])), colour, name)
        megabytes = [size / 1e6 for size in memory[name].values()]
        right.plot(list(memory[name]), megabytes, "o-", color=colour, label=name)
    left.axhline(math.log(task.outputs), color="grey", ls=":", label="chance level")
    left.set(
        title=f"Delayed recall, {task.outputs} symbols, T = {task.length} steps",
        ylabel="cross-entropy (nats)",
        ylim=(0, None),
    )
    right.axvline(task.length, color="grey", ls=":", label="length in training")
    right.set(
        title="Working memory of one sequence gradient",
        xlabel="sequence length T (steps)",
        ylabel="temporary buffers (MB)",
        xscale="log",
        yscale="log",
    )
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.legend(frameon=False)
    return figure


def draw_train(session: Session) -> Figure:
    """The loss of a training run, and its score on held-out sequences."""
    s, measure = session.settings, session.task.measure
    figure, (left, right) = new_figure((10, 4), 2)
    figure.suptitle(f"{s.task}: {session.task.title}\n{s.rule}, {s.cell} of {s.units} units")
    width = max(1, min(25, len(session.losses) // 4))
    _losses(left, session.losses, width, "#0072B2", None)
    left.set(title="while learning", ylabel="loss of the batch")
    right.plot(session.at, measure.scale * np.array(session.scores), "o-", color="#D55E00", ms=3)
    chance = measure.scale * session.task.chance
    right.axhline(chance, color="grey", ls=":", label="chance level")
    right.set(title="held out", xlabel="weight update", ylabel=measure.name)
    right.legend(frameon=False)
    return figure


def draw_bench(result: BenchResult, width: float = 10) -> Figure:
    """Memory and time against the length of the sequence; one above the other if narrow."""
    from matplotlib.ticker import NullLocator

    size, shape = ((width, 4.2), (1, 2)) if width >= 8 else ((width, 7.5), (2, 1))
    figure, (memory, time) = new_figure(size, shape)
    figure.suptitle(
        f"Gradient of one sequence, GRU of {result.units} units, batch {result.batch}",
        fontsize="medium" if width < 8 else None,
    )
    colours = (GREYS[0], *COLOURS[:5])
    for n, choice in enumerate(result.choices):
        points = [p for p in result.points if p.rule == choice.label]
        look = {"color": colours[n % len(colours)], "marker": MARKS[n % len(MARKS)], "ms": 4}
        name = NAMES.get(choice.label, choice.label)
        sizes = [p.working / 1e6 for p in points]
        memory.plot([p.length for p in points], sizes, label=name, **look)
        run = [(p.length, 1e3 * p.median) for p in points if p.median is not None]
        if run:
            time.plot(*zip(*run, strict=True), **look)
    memory.set(title="working memory", ylabel="temporary buffers (MB)")
    time.set(title="time", ylabel="median (ms)")
    for axes in (memory, time):
        axes.set(xlabel="length of the sequence (steps)", xscale="log", yscale="log")
        axes.set_xticks(result.lengths, [str(t) for t in result.lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.2)
    memory.legend(frameon=False)
    return figure
