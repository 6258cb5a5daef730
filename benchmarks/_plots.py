"""Plots of measured rows: time and memory along every axis that has more than one size."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from _processes import Row, Workload

AXES = {"t": "steps", "n": "units", "b": "samples"}
STYLES = {"bptt": "--", "peer": ":"}
BLOCK = "ours:d_rtrl:block="
Curves = dict[str, dict[int, float]]


def held(row: Row) -> float:
    """Bytes that XLA needs during a call and the states that stay, without the data."""
    return row.setup["temp_bytes"] + row.setup["state_bytes"]


KINDS = {
    "time": ("seconds per sequence", lambda row: median(row.seconds)),
    "memory": ("temporary and kept bytes", held),
}


def plot_all(rows: list[Row], prefix: Path) -> None:
    """Write `prefix`_*.png."""
    rows = [row for row in rows if row.seconds]
    for axis in AXES:
        for fixed, group in grouped(rows, axis).items():
            for kind, (unit, read) in KINDS.items():
                curves: Curves = defaultdict(dict)
                for row in group:
                    curves[row.mode][getattr(row.workload, axis)] = read(row)
                draw(f"{prefix}_{kind}_{axis}", fixed, (AXES[axis], unit), curves)
    for workload in dict.fromkeys(row.workload for row in rows):
        plot_blocks([row for row in rows if row.workload == workload], workload, prefix)


def grouped(rows: list[Row], axis: str) -> dict[str, list[Row]]:
    """Rows that differ along the axis only, where they do, by what they share."""
    groups = defaultdict(list)
    for row in rows:
        if not row.mode.startswith(BLOCK):
            sizes = [f"{k.upper()}={getattr(row.workload, k)}" for k in AXES if k != axis]
            groups[" ".join([row.workload.model, *sizes])].append(row)
    varied = lambda group: len({getattr(row.workload, axis) for row in group}) > 1
    return {fixed: group for fixed, group in groups.items() if varied(group)}


def plot_blocks(rows: list[Row], workload: Workload, prefix: Path) -> None:
    given = {
        int(row.mode.removeprefix(BLOCK)): median(row.seconds)
        for row in rows
        if row.mode.startswith(BLOCK)
    }
    chosen = [median(row.seconds) for row in rows if row.mode == "ours:d_rtrl"]
    if given:
        curves = {"given": given, "chosen": {k: t for k in given for t in chosen[-1:]}}
        draw(f"{prefix}_block", str(workload), ("block size", KINDS["time"][0]), curves)


def draw(prefix: str, title: str, labels: tuple[str, str], curves: Curves) -> None:
    """Curves on doubly logarithmic axes; the title is part of the file's name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, points in curves.items():
        style = STYLES.get(name.split(":")[0], "-")
        axes.plot(*zip(*sorted(points.items()), strict=True), style, marker="o", ms=4, label=name)
    axes.set(title=title, xlabel=labels[0], ylabel=labels[1], xscale="log", yscale="log")
    places = sorted({x for points in curves.values() for x in points})
    axes.set_xticks(places, map(str, places))
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    figure.savefig(f"{prefix}_{title.replace(' ', '_').replace('=', '')}.png", dpi=150)
    plt.close(figure)
