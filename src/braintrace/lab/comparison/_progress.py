"""Progress on standard error: a bar on a terminal, a few lines in files and pipes."""

from __future__ import annotations

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
    """A bar of tqdm on a terminal; lines without it, and elsewhere.

    Its clock starts now, from `done` on: what compiles comes before. `every` is the distance of
    lines.
    """
    lines = Bar(total, what, done, every)
    if not sys.stderr.isatty():
        return lines
    try:
        from tqdm import tqdm
    except ImportError:
        return lines
    return tqdm(total=total, desc=what, initial=done, file=sys.stderr, bar_format=FORM,
                dynamic_ncols=True)  # fmt: skip


class Bar:
    """What the commands use of a tqdm bar, as a line now and then."""

    def __init__(self, total: int, what: str, done: int = 0, every: int | None = None):
        self.total, self.what, self.done, self.text = total, what, done, ""
        self.every = every or -(-total // LINES)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.text = text

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
