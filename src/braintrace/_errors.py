"""The error types of the library, the four-part message, and warnings with it."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

E = TypeVar("E", bound=Exception, covariant=True)


class CompilationError(Exception):
    """The model cannot be turned into an online learner; the message says why and what to do."""

    __module__ = "braintrace"


class NotSupportedError(Exception):
    """The request is understood, but no correct answer exists for it."""

    __module__ = "braintrace"


class NonFiniteError(ArithmeticError):
    """Training with `nonfinite="stop"` came to an update that is not finite.

    Attributes:
        results: what the call would have returned, as of the update before.
    """

    __module__ = "braintrace"

    def __init__(self, text: str, results: Any = None):
        super().__init__(text)
        self.results = results


class MissingExtra(Exception):
    """A package is not installed; its message names the extra that installs it."""

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(f"{what} needs {package}: pip install 'braintrace-online[{extra}]'")


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
    """A path of keys as one name; what a terminal would act on, or no file can hold, is escaped."""
    name = path.shown if isinstance(path, NamedPath) else ".".join(str(key) for key in path)
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def message(what: str, *, where: str | None = None, why: str, do: str) -> str:
    """Compose an error text: what is wrong, where in the user's code, why, and what to do."""
    lines = [what]
    if where:
        lines.append(f"  where: {where}")
    lines.append(f"  why:   {why}")
    lines.append(f"  do:    {do}")
    return "\n".join(lines)


class Composed(Protocol[E]):
    def __call__(self, what: str, *, where: str | None = None, why: str, do: str) -> E: ...


def error(kind: Callable[[str], E]) -> Composed[E]:
    """Errors of a kind, with such a message: `error(KeyError)(what, why=..., do=...)`."""
    return lambda what, **parts: kind(message(what, **parts))


_NOT_THE_USER = ("braintrace.", "jax.", "contextlib")  # JAX calls derivatives


def warn(what: str, *, where: str | None = None, why: str, do: str) -> None:
    """Warn with such a message, at the line of the user that called the library."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message(what, where=where, why=why, do=do), stacklevel=level)


value_error, type_error = error(ValueError), error(TypeError)
not_supported = error(NotSupportedError)


def refuse_pytorch(value: Any, what: str) -> None:
    """A module of PyTorch is no step of JAX; it has an entry point of its own."""
    if any(c.__module__.split(".")[0] == "torch" for c in type(value).__mro__):
        raise type_error(
            f"the {what} is a {type(value).__name__}, a module of PyTorch.",
            why="its step computes with tensors of PyTorch, and is translated first",
            do="import braintrace.torch as bt; bt.online(module, rule, state, x)",
        )


def check_takes(
    function: Callable[..., Any],
    arguments: Sequence[str],
    why: str,
    do: str,
    name: str = "step_fn",
    keywords: Iterable[str] = (),
    where: str | None = None,
) -> None:
    """Refuse a function that does not take these arguments, each in words, and keywords."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        called = ", ".join([*arguments, *(f"{k}=..." for k in keywords)])
        what = f"{name}{signature} is called with {called}: {error}."
        raise type_error(what, where=where, why=why, do=do) from None


def meant(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that a misspelt one may stand for."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(names), 1)), None)


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """The error for a name that there is not: the name that may be meant, or all of them."""
    names = list(names)
    close = meant(name, names)
    hint = f"choose from {', '.join(names)}" if close is None else f"did you mean {close}?"
    return f"there is no {kind} {name!r}: {hint}"
