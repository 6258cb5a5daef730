"""The two error types of the library and the four-part message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class CompilationError(Exception):
    """The model cannot be turned into an online learner; the message says why and what to do."""

    __module__ = "braintrace"


class NotSupportedError(Exception):
    """The request is understood, but no correct answer exists for it."""

    __module__ = "braintrace"


OWN_CELL = (
    "a function of arrays or a cell of another library learns by braintrace.online(step, rule), "
    "see docs/how-to/bring-your-own-cell.md"
)


class NamedPath(tuple):
    """A path of keys that is shown by a name of its own; it equals the plain tuple."""

    shown: str

    def __new__(cls, keys: Iterable[Any], shown: str) -> NamedPath:
        path = super().__new__(cls, keys)
        path.shown = shown
        return path

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.shown


def dotted(path: Iterable[Any]) -> str:
    """A path of keys as one name."""
    return path.shown if isinstance(path, NamedPath) else ".".join(str(key) for key in path)


def message(what: str, *, where: str | None = None, why: str, do: str) -> str:
    """Compose an error text: what is wrong, where in the user's code, why, and what to do."""
    lines = [what]
    if where:
        lines.append(f"  where: {where}")
    lines.append(f"  why:   {why}")
    lines.append(f"  do:    {do}")
    return "\n".join(lines)


def value_error(what: str, *, where: str | None = None, why: str, do: str) -> ValueError:
    """A `ValueError` with this message; likewise below."""
    return ValueError(message(what, where=where, why=why, do=do))


def type_error(what: str, *, where: str | None = None, why: str, do: str) -> TypeError:
    return TypeError(message(what, where=where, why=why, do=do))


def not_supported(what: str, *, where: str | None = None, why: str, do: str) -> NotSupportedError:
    return NotSupportedError(message(what, where=where, why=why, do=do))
