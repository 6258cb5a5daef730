"""A model from a file of the user's: `net.py:Network(3, 20)`."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import brainstate

from ..._errors import message
from ._parser import Ended

Arguments = tuple[list[Any], dict[str, Any]]


class Mistake(Ended):
    """The words of the command do not fit; the message says why and what to do."""

    status = 2

    def __init__(self, what: str, why: str, do: str):
        super().__init__(message(what, why=why, do=do))


class Failure(Ended):
    """The user's code raised an error; the message says where."""

    def __init__(self, what: str, error: BaseException, path: str, do: str):
        ours = Path(path).resolve()
        lines = [
            f"{frame.filename}:{frame.lineno} ({frame.name})"
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == ours
        ]
        if isinstance(error, SyntaxError) and error.filename:
            lines.append(f"{error.filename}:{error.lineno}")
        where = lines[-1] if lines else None
        notes = [n for n in getattr(error, "__notes__", []) if "JAX_TRACEBACK_FILTERING" not in n]
        why = "\n".join([f"{type(error).__name__}: {error}", *notes]).replace("\n", "\n    ")
        super().__init__(message(what, where=where, why=why, do=do))


def load_module(text: str) -> tuple[ModuleType, str]:
    """The file of `FILE:NAME` as a module, and the name.

    Its folder stays importable, for its functions may import, too.
    """
    # A path may hold colons, and so may the arguments after a name.
    colons = [i for i, letter in enumerate(text) if letter == ":"]
    last = max((i for i in colons if Path(text[:i]).is_file()), default=text.rfind(":"))
    path, word = text[: max(last, 0)], text[last + 1 :]
    if not path or not word:
        what = f"{path or word!r} is not FILE:NAME."
        raise Mistake(what, "a file may hold several models", "write net.py:Network")
    file = Path(path)
    do = "name a file of Python that defines the model"
    if not file.is_file():
        raise Mistake(f"there is no file {path}.", f"the folder is {Path.cwd()}", do)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise Mistake(f"{path} is not a Python file.", "its name does not end in .py", do)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))  # as if it were run: it may import neighbours
    before = sys.modules.get(file.stem)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Failure(f"{path} cannot be imported.", error, path, "fix this line") from error
    finally:
        if before is not None:
            sys.modules[file.stem] = before
    return module, word


def find(module: ModuleType, word: str, ready: tuple[type, ...]) -> Any:
    """What a word names; with arguments in brackets, a function that calls it with them."""
    name, arguments = _read(word)
    if not hasattr(module, name):
        names = [
            n
            for n, v in vars(module).items()
            if isinstance(v, ready) or getattr(v, "__module__", None) == module.__name__
        ]
        raise Mistake(
            f"{module.__file__} has no {name}.",
            why=f"it defines {', '.join(names) or 'no class and no model'}",
            do="name one of these, or a function that returns a model",
        )
    value = getattr(module, name)
    return value if arguments is None else partial(value, *arguments[0], **arguments[1])


def make_value(module: ModuleType, word: str, ready: tuple[type, ...]) -> Any:
    """What a word names, or what the function or class of this name returns; `ready` types are not
    called, even if they can be."""
    value = find(module, word, ready)
    if callable(value) and not isinstance(value, ready):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            name = word.partition("(")[0]
            do = f"fix this line, or pass it what it needs: '{name}(3, units=20)'"
            raise Failure(f"{word} raised an error.", error, str(module.__file__), do) from error
    return value


def make_model(module: ModuleType, word: str) -> brainstate.nn.Module:
    """The module that a word names, or that the function or class of this name returns."""
    value = make_value(module, word, (brainstate.nn.Module,))
    if not isinstance(value, brainstate.nn.Module):
        raise Mistake(
            f"{word} has type {type(value).__name__}.",
            why="a model is a brainstate.nn.Module, one step in `update`",
            do="name a module, a class of one, or a function that returns one",
        )
    return value


def _read(word: str) -> tuple[str, Arguments | None]:
    if word.isidentifier():
        return word, None
    try:
        match ast.parse(word, mode="eval").body:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                values = [ast.literal_eval(a) for a in args]
                return name, (values, {str(k.arg): ast.literal_eval(k.value) for k in keywords})
    except (SyntaxError, ValueError):
        pass
    raise Mistake(
        f"{word!r} is not a name.",
        why="after FILE: stands a name, with plain values in brackets if it needs arguments",
        do="write net.py:Network or 'net.py:Network(3, units=20)'",
    )
