"""Memory of an analysis: counted while it is taken, refused before the machine runs out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .._errors import not_supported

_SHARE = 0.8  # of the memory that is available


@dataclass(slots=True)
class Memory:
    """Bytes that one part of an analysis took at most, and what it may take (None: anything)."""

    most: int | None
    peak: int = 0


_memory: ContextVar[Memory] = ContextVar("memory of the analysis")


@contextmanager
def measured() -> Iterator[Memory]:
    """Count the bytes that calls of `taken` report inside."""
    free = available()
    memory = Memory(None if free is None else int(_SHARE * free))
    token = _memory.set(memory)
    try:
        yield memory
    finally:
        _memory.reset(token)


def taken(nbytes: int) -> None:
    """Note that a part of the analysis holds, or is about to hold, so many bytes.

    Raises:
        NotSupportedError: that is more than the machine has.
    """
    memory = _memory.get(None)
    if memory is None:
        return
    memory.peak = max(memory.peak, nbytes)
    if memory.most is not None and nbytes > memory.most:
        raise not_supported(
            f"the analysis of the step takes more than {nbytes / 1e9:,.3f} GB.",
            why=f"it follows every element of the states, and {memory.most / 1e9:,.3f} GB of memory"
            " are left for it on this machine",
            do="keep samples and units on one leading axis of all states, so that a few of them "
            "stand for all; or compile a smaller model, or on a machine with more memory",
        )


def available() -> int | None:
    """Bytes of memory that can be had without swapping; None if the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
