"""What to do when an extra is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class MissingExtra(Exception):
    """A package is not installed; the message says what to install."""

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(f"{what} needs {package}: pip install 'braintrace[{extra}]'")


def draw_or_say(draw: Callable[..., None], path: Path, *shown: Any) -> None:
    """Write a figure and name it, or say what to install: a run must not end on a picture."""
    try:
        draw(path, *shown)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("No figure without matplotlib: pip install 'braintrace[plot]'", file=sys.stderr)
    else:
        print(f"Figure: {path}")
