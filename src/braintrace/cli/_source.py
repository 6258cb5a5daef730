"""A model from a file of the user's: `net.py:Network(3, 20)`."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import brainstate

from .._errors import message

Arguments = tuple[list[Any], dict[str, Any]]


class Mistake(Exception):
    """The words of the command do not fit; the message says why and what to do."""


class Failure(Exception):
    """The user's code raised an error; the message says where."""


def failed(what: str, error: BaseException, path: str, do: str) -> Failure:
    """The failure that an error of the user's code is, with the last line of the file in it."""
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
    return Failure(message(what, where=where, why=why, do=do))


def divided(text: str) -> tuple[str, str]:
    """File and name; a path may hold colons, and so may the arguments after a name."""
    colons = [i for i, letter in enumerate(text) if letter == ":"]
    files = [i for i in colons if Path(text[:i]).is_file()]
    path, _, word = text.rpartition(":")
    return (text[: files[-1]], text[files[-1] + 1 :]) if files else (path, word)


def loaded(path: str, word: str) -> ModuleType:
    """The file as a module; its folder stays importable, for its functions may import, too.

    Raises:
        Mistake: there is no such file.
        Failure: it raised an error.
    """
    if not path or not word:
        raise Mistake(
            message(
                f"{path or word!r} is not FILE:NAME.",
                why="a file may hold several models",
                do="write net.py:Network",
            )
        )
    file = Path(path)
    if not file.is_file():
        raise Mistake(
            message(
                f"there is no file {path}.",
                why=f"the folder is {Path.cwd()}",
                do="name a file of Python that defines the model",
            )
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise Mistake(
            message(
                f"{path} is no file of Python.",
                why="its name does not end in .py",
                do="name a file of Python that defines the model",
            )
        )
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)  # as if it were run: it may import its neighbours
    kept = sys.modules.get(file.stem)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise failed(f"{path} cannot be imported.", error, path, "mend this line") from error
    finally:
        if kept is not None:
            sys.modules[file.stem] = kept
    return module


def found(module: ModuleType, word: str) -> tuple[Any, Arguments | None]:
    """What a word names in the module, and the arguments written after it."""
    name, arguments = _read(word)
    if not hasattr(module, name):
        base = brainstate.nn.Module
        known = [
            n
            for n, v in vars(module).items()
            if isinstance(v, base) or (isinstance(v, type) and v.__module__ == module.__name__)
        ]
        raise Mistake(
            message(
                f"{module.__file__} has no {name}.",
                why=f"it defines {', '.join(known) or 'no class and no model'}",
                do="name one of these, or a function that returns a model",
            )
        )
    return getattr(module, name), arguments


def made(thing: Any, arguments: Arguments | None, word: str, path: str) -> brainstate.nn.Module:
    """The model: the thing itself, or what it returns.

    Raises:
        Mistake: it is no model.
        Failure: it raised an error.
    """
    model = thing
    if arguments is not None or (callable(thing) and not isinstance(thing, brainstate.nn.Module)):
        args, kwargs = arguments or ([], {})
        try:
            model = thing(*args, **kwargs)
        except (Exception, SystemExit) as error:
            name = word.partition("(")[0]
            do = f"mend this line, or give it what it needs: '{name}(3, units=20)'"
            raise failed(f"{word} raised an error.", error, path, do) from error
    if not isinstance(model, brainstate.nn.Module):
        raise Mistake(
            message(
                f"{word} is a {type(model).__name__}.",
                why="a model is a brainstate.nn.Module, one step in `update`",
                do="name a module, a class of one, or a function that returns one",
            )
        )
    return model


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
        message(
            f"{word!r} is no name.",
            why="after FILE: stands a name, with plain values in brackets if it needs arguments",
            do="write net.py:Network or 'net.py:Network(3, units=20)'",
        )
    )
