"""The figure of the measurement: memory and time against the length of the sequence."""

from __future__ import annotations

from pathlib import Path

from ._measure import CELL, Result

# Distinct for readers with colour-blindness too.
COLOURS = ("#222222", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
MARKS = "so^Dvx"
NAMES = {"bptt": "BPTT", "d_rtrl": "D-RTRL"}


def draw(path: Path, result: Result) -> None:
    """Write the figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    plan = result.plan
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    figure.suptitle(
        f"Gradient of one sequence, {CELL.upper()} of {plan.units} units, batch {plan.batch}"
    )
    memory, time = figure.subplots(1, 2)
    for n, choice in enumerate(plan.choices):
        points = [p for p in result.points if p.rule == choice.label]
        look = {"color": COLOURS[n % len(COLOURS)], "marker": MARKS[n % len(MARKS)], "ms": 4}
        lengths = [p.length for p in points]
        name = NAMES.get(choice.label, choice.label)
        memory.plot(lengths, [p.working / 1e6 for p in points], label=name, **look)
        run = [(p.length, 1e3 * p.median) for p in points if p.median is not None]
        if run:
            time.plot(*zip(*run, strict=True), **look)
    memory.set(title="working memory", ylabel="temporary buffers (MB)")
    time.set(title="time", ylabel="median (ms)")
    for axes in (memory, time):
        axes.set(xlabel="length of the sequence (steps)", xscale="log", yscale="log")
        axes.set_xticks(plan.lengths, [str(t) for t in plan.lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    memory.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
