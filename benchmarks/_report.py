"""Comparison of gradients, tables and verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np
from _processes import Row

OURS = ("ours:d_rtrl", "ours:window", "ours:pp_prop", "ours:online")
EQUAL = 1e-3  # a parameter whose relative difference is larger has another gradient


def references(mode: str) -> tuple[str, ...]:
    """Modes that compute the same gradient in the plainest way, best first.

    BPTT computes the same one where D-RTRL is exact.
    """
    words = mode.split(":")[1:]
    if mode == "bptt:checkpoint":
        return ("bptt",)
    if mode == "bptt":
        return ("ours:d_rtrl:step", "ours:d_rtrl")
    if words[-1] in ("online", "step") and len(words) == 1:
        return ("ours:step", "ours:online")
    plain = f"ours:{words[0]}"
    return (f"{plain}:step", plain)


def compare(rows: list[Row]) -> None:
    """Fill in how far each gradient is from its reference, parameter by parameter."""
    fine = {row.mode: row for row in rows if row.setup and row.mode != "forward"}
    for row in fine.values():
        known = next((mode for mode in references(row.mode) if mode in fine), row.mode)
        if known != row.mode:
            row.reference = known
            row.differs = differences(row.gradient, fine[known].gradient)


def differences(found: str, wanted: str) -> dict[str, float]:
    a, b = np.load(found), np.load(wanted)
    if sorted(a) != sorted(b):
        raise ValueError(f"{found} and {wanted} hold different parameters")
    norm = lambda v: float(np.linalg.norm(v.astype(np.float64)))
    return {k: norm(a[k] - b[k]) / (norm(b[k]) or 1.0) for k in b}


def seconds(rows: Iterable[Row], mode: str) -> float:
    """Median time of a mode, or nan."""
    found = [row for row in rows if row.mode == mode and row.seconds]
    return median(found[0].seconds) if found else float("nan")


def counterpart(mode: str, rows: list[Row]) -> str:
    """Our mode that a mode is compared with."""
    plain = "ours:d_rtrl" if mode.startswith(("bptt", "forward")) else references(mode)[-1]
    here = [row.mode for row in rows if row.mode.startswith(OURS)]
    return plain if plain in here else next(iter(here), mode)


def table(rows: list[Row]) -> str:
    """One line per mode; ratios are its time over ours."""
    titles = ("seconds", "/ ours", "error", "compile+1st", "temp MB", "peak MB", "state MB")
    lines = [str(rows[0].workload), f"  {'':22}" + "".join(f"{t:>13}" for t in titles)]
    notes = []
    for row in rows:
        if not row.setup:
            lines.append(f"  {row.mode:22} {row.status}: {row.error}")
            continue
        ours = seconds(rows, counterpart(row.mode, rows))
        time = median(row.seconds) if row.seconds else float("nan")
        mega = lambda count: "-" if count is None else f"{count / 1e6:.3g}"
        equal = [v for v in row.differs.values() if v < EQUAL]
        cells = (
            f"{time:.4g}",
            f"{time / ours:.2f}",
            f"{max(equal):.1e}" if equal else "-",
            f"{row.setup['compile_s'] + row.setup['first_s']:.2f}",
            mega(row.setup["temp_bytes"]),
            mega(max(row.peaks, default=None)),
            mega(row.setup["state_bytes"]),
        )
        lines.append(f"  {row.mode:22}" + "".join(f"{c:>13}" for c in cells))
        if row.status != "ok":
            notes.append(f"  {row.mode}: {row.status} after {len(row.seconds)} repetitions")
        if row.setup["variant"]:
            notes.append(f"  {row.mode}: best with {row.setup['variant']}")
        if other := {k: v for k, v in row.differs.items() if v >= EQUAL}:
            notes.append(f"  {row.mode} differs from {row.reference}: {largest(other)}")
    return "\n".join(lines + notes)


def largest(differs: dict[str, float], count: int = 4) -> str:
    """The parameters that differ most."""
    names = sorted(differs, key=differs.get, reverse=True)
    rest = [f"{len(names) - count} more"] if len(names) > count else []
    return ", ".join([f"{k} {differs[k]:.2g}" for k in names[:count]] + rest)


@dataclass(frozen=True, slots=True)
class Target:
    """A quantity, the bound it has to keep, and whether larger is better."""

    name: str
    value: float
    bound: float | None
    at_least: bool = False

    def __str__(self) -> str:
        if np.isnan(self.value):
            return f"  {'not measured':>12}  {self.name}"
        if self.bound is None:
            return f"  {'':>12}  {self.name}: {self.value:.2f}"
        kept = self.value >= self.bound if self.at_least else self.value <= self.bound
        sign = ">=" if self.at_least else "<="
        verdict = "met" if kept else "MISSED"
        return f"  {verdict:>12}  {self.name}: {self.value:.2f} (target {sign} {self.bound:g})"


def first_call(rows: list[Row], mode: str, bound: float) -> Target:
    """Seconds until a mode has its first gradient: analysis, compilation and the call."""
    found = [r.setup["compile_s"] + r.setup["first_s"] for r in rows if r.mode == mode and r.setup]
    name = f"{rows[0].workload}: seconds until the first gradient of {mode}"
    return Target(name, found[0] if found else float("nan"), bound)


def faster(rows: list[Row], ours: str, other: str, bound: float) -> Target:
    """Our mode is to be at least `bound` times faster than the other one."""
    ratio = seconds(rows, other) / seconds(rows, ours)
    return Target(f"{rows[0].workload}: {ours} faster than {other}", ratio, bound, at_least=True)


def within(rows: list[Row], ours: str, other: str, bound: float) -> Target:
    """Our mode is to take at most `bound` times as long as the other one."""
    ratio = seconds(rows, ours) / seconds(rows, other)
    return Target(f"{rows[0].workload}: time of {ours} over {other}", ratio, bound)
