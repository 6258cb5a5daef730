"""The figure of a comparison; it raises ModuleNotFoundError where matplotlib is not installed."""

from __future__ import annotations

import math
import textwrap
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ._rules import BASELINES, BPTT

if TYPE_CHECKING:
    from ._result import CompareResult, Row

Figure: TypeAlias = Any  # of matplotlib
Axes: TypeAlias = Any

# Distinct for readers with colour-blindness too; baselines are grey and dashed.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7B3FA0")
GREYS = ("#222222", "#666666", "#909090", "#B8B8B8")
STYLES = ("-", "--", ":", "-.")


def new_figure(
    size: tuple[float, float], shape: int | tuple[int, int], **options: Any
) -> tuple[Figure, Any]:
    """A figure, and its axes in the order of reading; a number is that of columns."""
    from matplotlib import figure as matplotlib_figure

    figure = matplotlib_figure.Figure(figsize=size, dpi=150, layout="constrained")
    rows, columns = (1, shape) if isinstance(shape, int) else shape
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw(result: CompareResult, width: float = 14) -> Figure:
    """Learning curves, final scores and memory of every rule; one above the other if narrow."""
    s, metric = result.settings, result.metric
    rows = [row for row in result.rows if row.refused is None]
    looks = _looks(rows)
    bars = 0.34 * len(rows)
    if narrow := width < 8:
        high = (3, 1 + bars, 1 + bars)
        figure, axes = new_figure((width, 3.5 + sum(high)), (3, 1), height_ratios=high)
    else:
        figure, axes = new_figure((width, max(4.8, 2.2 + bars)), 3, width_ratios=(1.7, 1, 1))
    curves, finals, memory = axes
    run = f"T = {result.length}, batches of {s.batch}, {s.seeds} seed{'s' if s.seeds > 1 else ''}"
    lines = (result.heading, f"{s.model}, {run}")
    letters = int(11 * width)  # of a line of this size
    figure.suptitle("\n".join(textwrap.fill(line, letters) for line in lines), fontsize=11)
    trained = [row for row in rows if row.seeds]
    falling = result.streaming or not metric.higher_is_better
    scale = "log" if falling and _wide(trained) else "linear"
    for row in trained:
        _curve(curves, row, looks[row.label], 1 if result.streaming else metric.scale)
    chance = metric.scale * metric.chance
    if not result.streaming:
        curves.axhline(chance, color="grey", lw=1, ls=(0, (1, 3)))
        curves.annotate("chance level", (1, chance), xycoords=("axes fraction", "data"),
                        xytext=(-2, 3), textcoords="offset points", ha="right", color="grey",
                        fontsize=8)  # fmt: skip
    curves.set(
        title="while learning (line: mean, band: all seeds)",
        xlabel="weight update",
        ylabel="loss" if result.streaming else f"validation {metric.name}",
        xlim=(0, s.updates),
        yscale=scale,
    )
    if trained:
        columns = min(len(trained), 3 if narrow else 7)
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)

    places = np.arange(len(rows))[::-1]
    for place, row in zip(places, rows, strict=True):
        colour, _ = looks[row.label]
        scores = metric.scale * np.array([seed.score for seed in row.seeds])
        if len(scores):
            finals.barh(place, scores.mean(), color=colour, height=0.62)
            finals.plot(scores, np.full(len(scores), place), "o", color="white", mec="black", ms=4)
            text = metric.form.format(scores.mean())
            _beside(finals, text, (scores.max(), place), 5)
        for shift, alpha, count in ((0.17, 1, row.working_bytes), (-0.17, 0.35, row.stored_bytes)):
            size = count / 1e6
            memory.barh(place + shift, size, color=colour, alpha=alpha, height=0.32)
            if math.isfinite(size):
                _beside(memory, f"{size:.3g}", (size, place + shift), 2)
    finals.axvline(chance, color="grey", lw=1, ls=(0, (1, 3)), zorder=0)
    finals.set(title="after learning (dots: seeds)", xlabel=f"test {metric.name}")
    finals.set_xscale("linear" if result.streaming else scale)
    memory.set(title="memory (full: working, pale: stored)", xlabel="MB", xscale="log")
    names = [row.label for row in rows]
    finals.set_yticks(places, names, fontsize=8)
    memory.set_yticks(places, names if narrow else [""] * len(rows), fontsize=8)
    for axes in (curves, finals, memory):
        axes.title.set_fontsize(9)
    for axes in (finals, memory):
        axes.margins(x=0.18)
        axes.tick_params(axis="y", length=0)
    return figure


def _beside(axes: Axes, text: str, at: tuple[float, float], points: float) -> None:
    """A number to the right of a place."""
    offset = {"xytext": (points, 0), "textcoords": "offset points"}
    axes.annotate(text, at, va="center", fontsize=8, **offset)


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
