"""The figures of the commands.

Every function returns a figure, and raises ModuleNotFoundError where matplotlib is not installed.
"""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..tasks import SequenceTask
from ._rules import BASELINES, BPTT

if TYPE_CHECKING:
    from ._bench import Result as BenchResult
    from ._comparison import Result, Row
    from ._session import Session

Figure: TypeAlias = Any  # of matplotlib
Axes: TypeAlias = Any

# Distinct for readers with colour-blindness too; baselines are grey and dashed.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7B3FA0")
GREYS = ("#222222", "#777777", "#B0B0B0")
STYLES = ("-", "--", ":", "-.")
MARKS = "so^Dvx"
NAMES = {"bptt": "BPTT", "d_rtrl": "D-RTRL"}


def _figure(size: tuple[float, float], columns: int, **options: Any) -> tuple[Figure, Any]:
    from matplotlib import figure as matplotlib_figure

    figure = matplotlib_figure.Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots(1, columns, **options)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


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

    figure, (left, right) = _figure((10, 4), 2)
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
    figure, (left, right) = _figure((10, 4), 2)
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


def draw_bench(result: BenchResult) -> Figure:
    """Memory and time against the length of the sequence."""
    from matplotlib.ticker import NullLocator

    figure, (memory, time) = _figure((10, 4.2), 2)
    figure.suptitle(f"Gradient of one sequence, GRU of {result.units} units, batch {result.batch}")
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


def draw_compare(result: Result) -> Figure:
    """Learning curves, final scores and memory of every rule."""
    plan, measure = result.plan, result.plan.task.measure
    rows = [row for row in result.rows if row.refused is None]
    looks = _looks(rows)
    height = max(4.8, 2.2 + 0.34 * len(rows))
    figure, (curves, finals, memory) = _figure((14, height), 3, width_ratios=(1.7, 1, 1))
    figure.suptitle(
        f"{plan.name}: {plan.task.title}\n"
        f"{plan.cell} of {plan.units} units, T = {plan.task.length}, batches of {plan.batch}, "
        f"{plan.seeds} seed{'s' if plan.seeds > 1 else ''}",
        fontsize=11,
    )
    trained = [row for row in rows if row.seeds]
    scale = "linear" if measure.rising or not _wide(trained) else "log"
    for row in trained:
        _curve(curves, row, looks[row.label], measure.scale)
    chance = measure.scale * plan.task.chance
    curves.axhline(chance, color="grey", lw=1, ls=(0, (1, 3)))
    curves.annotate("chance level", (1, chance), xycoords=("axes fraction", "data"),
                    xytext=(-2, 3), textcoords="offset points", ha="right", color="grey",
                    fontsize=8)  # fmt: skip
    curves.set(
        title="while learning (line: mean, band: all seeds)",
        xlabel="weight update",
        ylabel=f"held-out {measure.name}",
        xlim=(0, plan.updates),
        yscale=scale,
    )
    if trained:
        figure.legend(loc="outside lower center", ncols=min(len(trained), 7), frameon=False)

    places = np.arange(len(rows))[::-1]
    for place, row in zip(places, rows, strict=True):
        colour, _ = looks[row.label]
        scores = measure.scale * np.array([seed.score for seed in row.seeds])
        if len(scores):
            finals.barh(place, scores.mean(), color=colour, height=0.62)
            finals.plot(scores, np.full(len(scores), place), "o", color="white", mec="black", ms=4)
            text = measure.form.format(scores.mean())
            finals.text(scores.max(), place, f"  {text}", va="center", fontsize=8)
        for shift, alpha, count in ((0.17, 1, row.working_bytes), (-0.17, 0.35, row.kept_bytes)):
            size = count / 1e6
            memory.barh(place + shift, size, color=colour, alpha=alpha, height=0.32)
            if math.isfinite(size):
                memory.text(size, place + shift, f" {size:.3g}", va="center", fontsize=7)
    finals.axvline(chance, color="grey", lw=1, ls=(0, (1, 3)), zorder=0)
    finals.set(title="after learning (dots: seeds)", xlabel=f"held-out {measure.name}")
    finals.set_xscale(scale)
    memory.set(title="memory (full: working, pale: stored)", xlabel="MB", xscale="log")
    finals.set_yticks(places, [row.label for row in rows], fontsize=8)
    memory.set_yticks(places, [""] * len(rows))
    for axes in (finals, memory):
        axes.margins(x=0.18)
        axes.tick_params(axis="y", length=0)
    return figure


def _looks(rows: list[Row]) -> dict[str, tuple[str, str]]:
    """Colour and line style by label."""
    baselines = zip(cycle(GREYS), cycle(STYLES), strict=True)
    others = ((colour, style) for style in cycle(STYLES) for colour in COLOURS)
    return {row.label: next(baselines if row.rule in BASELINES else others) for row in rows}


def _curve(axes: Axes, row: Row, look: tuple[str, str], scale: float) -> None:
    colour, style = look
    scores = scale * np.array([seed.scores for seed in row.seeds])
    at = row.seeds[0].at
    width = 4 if row.rule == BPTT else 1.8  # visible under a rule that equals it
    axes.plot(at, scores.mean(axis=0), color=colour, ls=style, lw=width, label=row.label)
    if len(scores) > 1:
        band = (scores.min(axis=0), scores.max(axis=0))
        axes.fill_between(at, *band, color=colour, alpha=0.12, lw=0)


def _wide(rows: list[Row]) -> bool:
    """Whether scores differ by more than a factor of ten."""
    scores = np.array([seed.scores for row in rows for seed in row.seeds])
    return bool(scores.size) and bool(scores.min() > 0) and scores.max() > 10 * scores.min()
