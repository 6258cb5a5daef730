"""Results as files: records and figures."""

from __future__ import annotations

import io
import json
import math
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..._files import replace_file
from ..._version import __version__

INTERRUPTED = 130  # exit status after Ctrl-C
PACKAGES = ("jax", "jaxlib", "brainstate", "saiunit", "optax", "numpy", "scikit-learn")


def save_figure(draw: Callable[..., Any], path: Path, *content: object) -> None:
    """Write `draw(*content)`, or say what to install: a run must not end on a picture."""
    try:
        figure = draw(*content)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(
            "No figure without matplotlib: pip install 'braintrace-online[plot]'", file=sys.stderr
        )
    else:
        image = io.BytesIO()
        figure.savefig(image, format=path.suffix[1:] or "png")
        replace_file(path, [image.getbuffer()])
        print(f"Figure: {path}")


def save_json(path: Path, content: dict[str, object]) -> None:
    """Replace a file at once, so that no half of it is ever there; nan and inf become null."""
    text = json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"
    replace_file(path, [text.encode()])


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_record(path: Path, content: dict[str, object]) -> None:
    """Write measurements, with the versions and the machine they were made on."""
    packages = {"braintrace": __version__, "python": platform.python_version()}
    machine = {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "x64": x64(),
    }
    versions = {**packages, **{name: _version(name) for name in PACKAGES}}
    save_json(path, {"schema": 1, **content, "versions": versions, "machine": machine})


def x64() -> bool:
    """Whether numbers have 64 bits."""
    return jnp.zeros(()).dtype.itemsize == 8


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
