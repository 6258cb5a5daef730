"""The progress bar: tqdm, or a plain one without it."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(total: int, what: str = "training", unit: str = "update") -> Any:
    """A bar with `set_postfix_str`, `update` and `close`, on standard error."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _TextBar(total)
    return tqdm(total=total, desc=what, unit=unit, file=sys.stderr)


class _TextBar:
    """What the commands use of a tqdm bar."""

    def __init__(self, total: int):
        self.total, self.done, self.text = total, 0, ""

    def set_postfix_str(self, text: str) -> None:
        self.text = text

    def update(self, n: int) -> None:
        self.done += n
        filled = 30 * self.done // self.total
        line = f"\r[{'#' * filled:30}] {self.done}/{self.total}  {self.text}"
        print(line, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)
