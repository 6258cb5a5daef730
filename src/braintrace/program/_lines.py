"""The user's own file and line of what was traced."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from traceback import walk_stack, walk_tb
from typing import TYPE_CHECKING, Any

import jax

from ._jax import SourceInfo, is_traced, source_info_util

if TYPE_CHECKING:
    from ._records import Equation

_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_PYTHON = (*(sysconfig.get_path(k) + os.sep for k in ("stdlib", "scripts")), "<frozen")
_INSTALLED = {"site-packages", "dist-packages"}
_OWN_FOLDERS = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, _JAX]


def hide_frames_of(module: Any) -> None:
    """Never name a line inside this package as the user's own line."""
    folder = os.path.dirname(os.path.abspath(module.__file__)) + os.sep
    if folder not in _OWN_FOLDERS:
        _OWN_FOLDERS.append(folder)


def user_line(source: SourceInfo | None, own: bool = False) -> str | None:
    """`file:line (function)` of the innermost frame that belongs to the user.

    If there is none, that of the innermost package outside of JAX; with `own` there is no line.
    """
    if source is None or source.traceback is None:
        return None
    frames = source_info_util.user_frames(source.traceback)
    return _first_of_user(((f.file_name, f.start_line, f.function_name) for f in frames), own)


def line_of(value: Any) -> str | None:
    """`file:line (function)` of the user where a function begins, or a tracer was computed."""
    if is_traced(value):
        return user_line(value._line_info)
    code = getattr(value, "__code__", None)
    lines = () if code is None else [(code.co_filename, code.co_firstlineno, code.co_name)]
    return _first_of_user(lines)


def failing_line(error: BaseException) -> str | None:
    """`file:line (function)` of the innermost frame of an error that belongs to the user."""
    frames = [(f.f_code, line) for f, line in walk_tb(error.__traceback__)]
    return _first_of_user((c.co_filename, line, c.co_name) for c, line in reversed(frames))


def calling_line() -> str | None:
    """`file:line (function)` of the innermost frame that belongs to the user, of this call."""
    frames = [(f.f_code, line) for f, line in walk_stack(None)]
    return _first_of_user((c.co_filename, line, c.co_name) for c, line in frames)


def made_by_cond(eqn: Equation) -> bool:
    """Whether an equation is JAX's own translation of a `cond`, not of a function inside of it."""
    traceback: Any = eqn.source.traceback
    for frame in traceback.frames if traceback is not None else ():  # innermost first
        if not frame.file_name.startswith(_JAX):
            return False
        if os.path.basename(frame.file_name) == "conditionals.py":
            return True
    return False


def _first_of_user(frames: Iterable[tuple[str, int, str]], own: bool = False) -> str | None:
    """The innermost frame outside installed packages; if all are inside, that outside of JAX."""
    outside = [f for f in frames if not f[0].startswith(tuple(_OWN_FOLDERS))]
    installed = lambda file: file.startswith(_PYTHON) or _INSTALLED & {*file.split(os.sep)}
    users = [f for f in outside if not installed(f[0])]
    for name, line, function in users or ([] if own else outside):
        # Relative to the working folder if it is below it, as editors and terminals open it.
        return f"{name.removeprefix(os.path.join(os.getcwd(), ''))}:{line} ({function})"
    return None
