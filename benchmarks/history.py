"""The headline figures over time: history.csv, and from it docs/history.md and docs/history.svg.

    python benchmarks/speed.py --suite headline
    python benchmarks/history.py --add results/headline-cpu.json --machine "two CPU cores"
    python benchmarks/history.py  # draws the page again

A row of `history.csv` is a median of one run on one machine; rows are added and never changed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "history.csv"
MODES = {"ours:d_rtrl:drop": "traces dropped", "ours:d_rtrl": "traces kept"}
PAGE = """# Measured over time

Time of one gradient by D-RTRL beside BPTT of the same model in the same run, by commit: the figures
of [performance](performance.md) when they were measured. `benchmarks/history.py` adds a run to
`benchmarks/history.csv` and writes this page. Runs are not of equally quiet machines (JAX 0.10.2 on
the CPU, 0.11.2 on the GPU), so a line says more than the place of a point.

![Time of a gradient as a multiple of BPTT's, by commit](history.svg)

| machine | workload | commit | date | ms | BPTT, ms | time / BPTT |
|---|---|---|---|---|---|---|
"""
Row = dict[str, str]


def rows() -> list[Row]:
    with RECORD.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def page(found: list[Row]) -> str:
    """The page of these rows, those of a workload together."""
    lines = []
    for row in sorted(found, key=lambda r: (r["machine"], r["workload"])):
        ours, bptt = float(row["milliseconds"]), float(row["bptt"])
        cells = (row["machine"], row["workload"], row["commit"], row["date"])
        lines.append(f"| {' | '.join(cells)} | {ours:g} | {bptt:g} | {ours / bptt:.2f} |\n")
    return PAGE + "".join(lines)


def measured(results: Path, machine: str, date: str, commit: str) -> list[Row]:
    """The rows of a run of `speed.py --suite headline`."""
    medians: dict[tuple[str, str], float] = {}
    for row in json.loads(results.read_text("utf-8"))["rows"]:
        w = row["workload"]
        place = f"{w['model'].upper()}, N={w['n']}, B={w['b']}, T={w['t']}"
        if row["status"] == "ok":
            medians.setdefault((place, row["mode"]), 1e3 * statistics.median(row["seconds"]))
    return [
        {
            **dict(date=date, commit=commit, machine=machine, workload=f"{place}, {MODES[mode]}"),
            **dict(milliseconds=f"{value:.3g}", bptt=f"{medians[place, 'bptt']:.3g}"),
        }
        for (place, mode), value in medians.items()
        if mode in MODES and (place, "bptt") in medians
    ]


def draw(found: list[Row]) -> None:
    from matplotlib.figure import Figure

    sys.path.insert(0, str(ROOT / "docs"))
    import svg

    commits = list(dict.fromkeys(row["commit"] for row in found))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in found:
        ratio = float(row["milliseconds"]) / float(row["bptt"])
        name = f"{row['machine']}: {row['workload']}"
        lines.setdefault(name, []).append((commits.index(row["commit"]), ratio))
    figure = Figure(figsize=(svg.WIDTH, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.axhline(1, color="#000000", lw=0.8, ls=":")
    axes.set_xticks(range(len(commits)), commits)
    axes.set(ylabel="time / BPTT", ylim=(0, None))
    figure.legend(loc="outside lower center", fontsize="small", frameon=False)
    svg.write(figure, ROOT / "docs" / "history.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, help="results of speed.py --suite headline")
    parser.add_argument("--machine", help="that it ran on, in a few words")
    given = parser.parse_args()
    if given.add:
        if not given.machine:
            parser.error("--add needs --machine")
        git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        found = measured(given.add, given.machine, str(datetime.date.today()), commit)
        with RECORD.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, list(found[0]), lineterminator="\n").writerows(found)
    (ROOT / "docs" / "history.md").write_text(page(rows()), "utf-8")
    draw(rows())


if __name__ == "__main__":
    main()
