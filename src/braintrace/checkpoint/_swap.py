"""Many assignments of which all happen or none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

Assignment = tuple[Callable[[], Any], Callable[[], Any]]  # do it, undo it


def swap(assignments: list[Assignment]) -> None:
    """Assign all; if one fails, or is interrupted, the old values are back.

    Signals wait until it is done: Ctrl-C would raise between two assignments.
    """
    with _signals_later():
        done: list[Assignment] = []
        try:
            for pair in assignments:
                done.append(pair)
                pair[0]()
        except BaseException:
            for _, undo in reversed(done):
                undo()
            raise


def swap_states(states: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Give states, by name, other values: all of them or none."""
    put = lambda state, value: partial(setattr, state, "value", value)
    swap([(put(states[k], v), put(states[k], states[k].value)) for k, v in values.items()])


@contextmanager
def _signals_later() -> Iterator[None]:
    """Hold back the signals that Python has a function for; they come at the end."""
    late: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        late.append(number)

    try:
        if threading.current_thread() is threading.main_thread():  # no other one gets any
            for number in sorted(signal.valid_signals()):
                if callable(signal.getsignal(number)):
                    handlers[number] = signal.signal(number, note)
        yield
    finally:
        for held in reversed(handlers):  # SIGINT is one of the last
            signal.signal(held, handlers[held])
        for held in late:
            signal.raise_signal(held)
