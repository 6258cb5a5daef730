"""The figure of a task: learning curves, final scores, memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ._result import Result, Row
from ._rules import BASELINES, BPTT

# Distinct for readers with colour-blindness too; baselines are grey and dashed.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7B3FA0")
GREYS = ("#222222", "#777777", "#B0B0B0")
STYLES = ("-", "--", ":", "-.")


def draw(path: Path, result: Result) -> None:
    """Write the figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    plan, measure = result.plan, result.plan.task.measure
    rows = [row for row in result.rows if row.refused is None]
    looks = _looks(rows)
    height = max(4.8, 2.2 + 0.34 * len(rows))
    figure = Figure(figsize=(14, height), dpi=150, layout="constrained")
    curves, finals, memory = figure.subplots(1, 3, width_ratios=(1.7, 1, 1))
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
    curves.axhline(measure.scale * plan.task.chance, color="grey", lw=1, ls=(0, (1, 3)))
    curves.annotate(
        "chance level",
        (1, measure.scale * plan.task.chance),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color="grey",
        fontsize=8,
    )
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
            finals.text(
                max(scores.max(), scores.mean()), place, f"  {text}", va="center", fontsize=8
            )
        megabytes = row.working_bytes / 1e6
        memory.barh(place + 0.17, megabytes, color=colour, height=0.32)
        memory.barh(place - 0.17, row.kept_bytes / 1e6, color=colour, alpha=0.35, height=0.32)
        for shift, size in ((0.17, megabytes), (-0.17, row.kept_bytes / 1e6)):
            if math.isfinite(size):
                memory.text(size, place + shift, f" {size:.3g}", va="center", fontsize=7)
    finals.axvline(measure.scale * plan.task.chance, color="grey", lw=1, ls=(0, (1, 3)), zorder=0)
    finals.set(title="after learning (dots: seeds)", xlabel=f"held-out {measure.name}")
    finals.set_xscale(scale)
    memory.set(title="memory (full: working, pale: kept)", xlabel="MB", xscale="log")
    finals.set_yticks(places, [row.label for row in rows], fontsize=8)
    memory.set_yticks(places, [""] * len(rows))
    for axes in (finals, memory):
        axes.margins(x=0.18)
        axes.tick_params(axis="y", length=0)
    for axes in (curves, finals, memory):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _looks(rows: list[Row]) -> dict[str, tuple[str, str]]:
    """Colour and line style by label."""
    looks, counts = {}, [0, 0]
    for row in rows:
        known = row.rule in BASELINES
        n, counts[known] = counts[known], counts[known] + 1
        colours = GREYS if known else COLOURS
        style = STYLES[(n if known else n // len(COLOURS)) % len(STYLES)]
        looks[row.label] = colours[n % len(colours)], style
    return looks


def _curve(axes: Any, row: Row, look: tuple[str, str], scale: float) -> None:
    colour, style = look
    scores = scale * np.array([seed.scores for seed in row.seeds])
    at = row.seeds[0].at
    width = 4 if row.rule == BPTT else 1.8  # seen under a rule that equals it
    axes.plot(at, scores.mean(axis=0), color=colour, ls=style, lw=width, label=row.label)
    if len(scores) > 1:
        band = (scores.min(axis=0), scores.max(axis=0))
        axes.fill_between(at, *band, color=colour, alpha=0.12, lw=0)


def _wide(rows: list[Row]) -> bool:
    """Whether scores differ by more than a factor of ten."""
    scores = np.array([seed.scores for row in rows for seed in row.seeds])
    return bool(scores.size) and bool(scores.min() > 0) and scores.max() > 10 * scores.min()
