"""One thread at a time: a call reads arrays, gives their memory away, and writes new ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Self, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class OneThread:
    """A lock that a thread may take again; a copy is another one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()


def alone(method: Method) -> Method:
    """A method that waits until no other thread uses the learner."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.one_thread:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]
