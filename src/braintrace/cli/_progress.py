"""The progress bar: tqdm, or a plain one without it; lines where nobody watches."""

from __future__ import annotations

import sys
from typing import Any

LINES = 20


def progress_bar(total: int, what: str = "training", unit: str = "update", done: int = 0) -> Any:
    """A bar with `set_postfix_str`, `update` and `close`, on standard error."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _TextBar(total, done)
    return tqdm(total=total, desc=what, unit=unit, initial=done, file=sys.stderr)


def training_bar(total: int, done: int) -> Any:
    """The same, from some updates on; a few lines if standard error is not a terminal."""
    if sys.stderr.isatty():
        return progress_bar(total, done=done)
    return _Lines(total, done)


class _TextBar:
    """What the commands use of a tqdm bar."""

    def __init__(self, total: int, done: int = 0):
        self.total, self.done, self.text = total, done, ""

    def set_postfix_str(self, text: str) -> None:
        self.text = text

    def update(self, n: int) -> None:
        self.done += n
        filled = 30 * self.done // self.total
        line = f"\r[{'#' * filled:30}] {self.done}/{self.total}  {self.text}"
        print(line, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)


class _Lines(_TextBar):
    """A line now and then, for files and pipes."""

    def update(self, n: int) -> None:
        before = LINES * self.done // self.total
        self.done += n
        if LINES * self.done // self.total > before or self.done == self.total:
            print(f"{self.done}/{self.total}  {self.text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass
