"""Progress on standard error: a bar on a terminal, a few lines in files and pipes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

LINES = 5
# Short, and the bar takes what is left: the text after it fits into 80 columns.
FORM = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Print what takes a while, and afterwards how long."""
    print(f"{what}… ", end="", file=sys.stderr, flush=True)
    started, took = time.perf_counter(), ""
    try:
        yield
        took = f"{time.perf_counter() - started:.1f} s"
    finally:
        print(took, file=sys.stderr, flush=True)


def progress_bar(total: int, what: str = "update", done: int = 0, every: int | None = None) -> Bar:
    """A bar of tqdm, or a plain one without it.

    Its clock starts now, from `done` on: what compiles comes before. `every` is the distance of
    lines where standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        return _Lines(total, what, done, every)
    try:
        from tqdm import tqdm
    except ImportError:
        return Bar(total, what, done)
    return tqdm(total=total, desc=what, initial=done, file=sys.stderr, bar_format=FORM,
                dynamic_ncols=True)  # fmt: skip


class Bar:
    """What the commands use of a tqdm bar, in plain characters."""

    def __init__(self, total: int, what: str, done: int = 0):
        self.total, self.what, self.done, self.text = total, what, done, ""

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.text = text

    def update(self, n: int) -> None:
        self.done += n
        before, after = f"{self.what} {self.done}/{self.total} [", f"] {self.text}"
        columns = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        width = max(columns - len(before) - len(after), 1)
        line = f"{before}{'#' * (width * self.done // self.total):{width}}{after}"
        print(f"\r{line[:columns]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print(file=sys.stderr)


class _Lines(Bar):
    """A line now and then."""

    def __init__(self, total: int, what: str, done: int, every: int | None):
        super().__init__(total, what, done)
        self.every = every or -(-total // LINES)

    def update(self, n: int) -> None:
        before = self.done // self.every
        self.done += n
        if self.done // self.every > before or self.done == self.total:
            line = f"{self.what} {self.done}/{self.total}  {self.text}"
            print(line.rstrip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Quiet(Bar):
    """No bar."""

    def update(self, n: int) -> None:
        pass

    def close(self) -> None:
        pass
