"""Every cell of `braintrace.nn` under every rule as C, beside JAX; see `export.py --check`."""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import brainstate
import jax
import numpy as np

from braintrace import NotSupportedError

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "export")]
from cells import CASES, Cell  # noqa: E402
from compiled import COMPILERS  # noqa: E402

LIMITS = {"double": 1e-10, "float": 1e-5}


def check(out: Path, minutes: float, record: Path | None) -> int:
    """Judge what a file does not have yet, a line of JSON each; 1 if anything of it is wrong."""
    brainstate.environ.set(precision=64)
    jax.config.update("jax_enable_x64", True)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(row["cell"], row["rule"]) for row in rows}
    end = time.monotonic() + 60 * minutes
    # In any order, so that what is judged so far is of all cells and rules.
    for cell, rule in random.Random(0).sample(CASES, len(CASES)):
        if time.monotonic() > end:
            break
        if (cell, rule) in known:
            continue
        rows.append({"cell": cell, "rule": rule, **judged(cell, rule)})
        with out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        jax.clear_caches()
        gc.collect()
    found = summary(rows)
    print(json.dumps(found, indent=1))
    if record:
        pairs = sorted(f"{row['cell']} {row['rule']}" for row in rows)
        record.write_text(json.dumps({**found, "judged_pairs": pairs}, indent=1) + "\n")
    return int(bool(found["wrong"]))


def judged(cell: str, rule: str) -> dict[str, Any]:
    """The largest differences of 200 updates in double, of 20 single steps in float."""
    row: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as path:
            made = Cell(cell, rule, Path(path), 200, np.float64)
            row["double"] = {c: made.errors_after_updates(c) for c in COMPILERS}
            sizes = made.done.sizes
            row["scratch"] = sizes.scratch / max(sizes.live, 1)
        with tempfile.TemporaryDirectory() as path:
            made = Cell(cell, rule, Path(path), 20, np.float32)
            row["float"] = {c: made.error_of_steps(c) for c in COMPILERS}
    except NotSupportedError as error:
        row["refused"] = str(error)
    except AssertionError as error:
        row["failed"] = str(error)[:2000]
    return row


def is_wrong(row: dict[str, Any]) -> bool:
    large = any(max(row[k].values()) >= limit for k, limit in LIMITS.items() if k in row)
    return "failed" in row or large or row.get("scratch", 0) > 1.5


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the largest of each number."""
    refused = [r for r in rows if "refused" in r]
    held = [r for r in rows if "float" in r and not is_wrong(r)]
    return {
        "pairs": len(CASES),
        "judged": len(rows),
        "right": len(held),
        "refused": [f"{r['cell']} {r['rule']}: {r['refused'].splitlines()[0]}" for r in refused],
        "wrong": [f"{r['cell']} {r['rule']}" for r in rows if is_wrong(r)],
        "largest": {k: max((max(r[k].values()) for r in held), default=0.0) for k in LIMITS},
        "scratch": max((r["scratch"] for r in held), default=0.0),
    }
