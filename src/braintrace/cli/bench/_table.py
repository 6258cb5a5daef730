"""What was measured, as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..compare._record import machine, plain, versions
from ._measure import CELL, Noise, Result

SCHEMA = 1


def table(result: Result) -> str:
    """A row per length and gradient."""
    plan = result.plan
    lines = [
        f"{CELL.upper()} of {plan.units} units, batches of {plan.batch}, "
        f"{Noise(1).title}; median of {plan.repeats} runs",
        "",
        f"{'T':>6}  {'rule':24}{'working MB':>12}{'kept MB':>10}{'ms':>10}{'compile s':>11}",
    ]
    for p in result.points:
        time = "left out" if p.left_out else "-" if p.median is None else f"{1e3 * p.median:.2f}"
        sizes = f"{p.working / 1e6:>12.2f}{p.kept / 1e6:>10.2f}"
        lines.append(f"{p.length:>6}  {p.rule:24}{sizes}{time:>10}{p.compiling:>11.1f}")
    if any(p.left_out for p in result.points):
        limit = f"{plan.memory_limit / 2**30:g} GiB (--memory-limit)"
        lines.append(f"left out: more working memory than {limit}")
    if not result.finished:
        lines.append("INTERRUPTED")
    return "\n".join(lines)


def record(result: Result) -> dict[str, Any]:
    """Everything, with every run."""
    plan = result.plan
    return plain(
        {
            "schema": SCHEMA,
            "finished": result.finished,
            "settings": {
                "cell": CELL,
                "units": plan.units,
                "batch": plan.batch,
                "inputs": Noise(1).inputs,
                "outputs": Noise(1).outputs,
                "lengths": list(plan.lengths),
                "repeats": plan.repeats,
                "memory_limit": plan.memory_limit,
                "rules": {c.label: {**c.options, "block": c.block} for c in plan.choices},
            },
            "points": [dataclasses.asdict(p) | {"median": p.median} for p in result.points],
            "versions": versions(),
            "machine": machine(),
        }
    )
