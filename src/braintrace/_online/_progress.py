"""A progress bar that compiled loops advance."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._errors import message


@contextlib.contextmanager
def ticking(shown: bool, total: int) -> Iterator[Callable[[int], None] | None]:
    """A function that moves the bar by a number of calls, None if it is not shown."""
    if not shown:
        yield None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            message(
                "progress=True needs tqdm.",
                why="it draws the progress bar",
                do="pip install 'braintrace-online[progress]'",
            )
        ) from error
    with tqdm(total=total, unit="step") as bar:
        _bars.append(bar)
        try:
            yield _tick
            jax.effects_barrier()
        finally:
            _bars.remove(bar)


_bars: list[Any] = []  # the ones on screen, outermost first


def _tick(calls: int) -> None:
    if _bars:
        _bars[-1].update(int(calls))
