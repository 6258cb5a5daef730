"""Everything that was measured, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from ..._version import __version__
from ._result import Result

SCHEMA = 1
PACKAGES = ("jax", "jaxlib", "brainstate", "saiunit", "optax", "numpy", "scikit-learn")


def record(result: Result) -> dict[str, Any]:
    """Settings, rows with their seeds and curves, versions, machine; what is no number is null."""
    plan, task = result.plan, result.plan.task
    settings = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name != "task"}
    return plain(
        {
            "schema": SCHEMA,
            "finished": result.finished,
            "task": {
                "name": plan.name,
                "title": task.title,
                "length": task.length,
                "metric": task.measure.name,
                "scale": task.measure.scale,
                "higher_is_better": task.measure.rising,
                "chance": task.chance,
            },
            "settings": settings,
            "rows": [dataclasses.asdict(row) for row in result.rows],
            "versions": versions(),
            "machine": machine(),
        }
    )


def versions() -> dict[str, str | None]:
    """Of this package, Python, and the packages that matter."""
    found = {name: _version(name) for name in PACKAGES}
    return {"braintrace": __version__, "python": platform.python_version(), **found}


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "x64": jax.numpy.zeros(()).dtype.itemsize == 8,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the record, with a folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def plain(value: Any) -> Any:
    """What JSON can hold; numbers that are none are null."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
