"""The figure of the demo: what is learned, and what it costs."""

from __future__ import annotations

import math
from pathlib import Path

from ._task import Recall

COLOURS = ("tab:orange", "tab:blue")
SMOOTH = 10


def draw(
    path: Path,
    task: Recall,
    losses: dict[str, list[float]],
    memory: dict[str, dict[int, float]],
) -> None:
    """Write the loss curves and the memory against sequence length as one image.

    Args:
        path: the file to write.
        task: the task that was learned.
        losses: losses of every update, by name.
        memory: bytes by sequence length, by name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for colour, (name, loss) in zip(COLOURS, losses.items(), strict=True):
        left.plot(range(1, len(loss) + 1), loss, color=colour, alpha=0.2, linewidth=0.8)
        width = min(SMOOTH, len(loss))
        means = [sum(loss[i - width : i]) / width for i in range(width, len(loss) + 1)]
        left.plot(range(width, len(loss) + 1), means, color=colour, label=name)
    left.axhline(math.log(task.symbols), color="grey", linestyle=":", label="chance")
    left.set(
        title=f"Delayed recall, {task.symbols} symbols, T = {task.length} steps",
        xlabel="weight update",
        ylabel="cross-entropy (nats)",
        ylim=(0, None),
    )
    for colour, (name, sizes) in zip(COLOURS, memory.items(), strict=True):
        megabytes = [b / 1e6 for b in sizes.values()]
        right.plot(list(sizes), megabytes, "o-", color=colour, label=name)
    right.axvline(task.length, color="grey", linestyle=":", label="length in training")
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
