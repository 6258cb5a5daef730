"""Parsers of commands, and the words that they take."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ..._errors import unknown
from ._names import ALIASES, CELLS, NEED_DATA, RULES, STREAMS, TASKS

BETWEEN = re.compile(r",(?![^(\[]*[)\]])")  # commas outside of brackets
# Options of an old spelling: they work, and help does not show them.
HIDDEN: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}


class Ended(Exception):
    """A command ends with this message, on standard error, and this exit status."""

    status = 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are short, and name what may be meant; a command has no `commands`."""

    commands: tuple[str, ...] = ()

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        self._check(words)
        options, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return options, rest

    def _check(self, words: list[str]) -> None:
        """Unknown options and commands first: errors that follow from them would mislead."""
        if self.commands and not words:
            self.error(f"name a command: {', '.join(self.commands)}")
        hidden = {n: a.help == argparse.SUPPRESS for a in self._actions for n in a.option_strings}
        for word in words:
            if self.commands and not word.startswith("-"):
                if word not in self.commands:
                    self.error(unknown("command", word, self.commands))
                return
            name = word.partition("=")[0]
            if name.startswith("--") and not any(n.startswith(name) for n in hidden):
                self.error(unknown("option", name, [n for n in hidden if not hidden[n]]))

    def _usage(self) -> str:
        words = [f"{a.metavar}{' ...' * (a.nargs == '*')}" for a in self._actions
                 if not a.option_strings]  # fmt: skip
        return " ".join([self.prog, *words, "[options]"])

    def format_help(self) -> str:
        self.usage = self._usage()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        usage = f"usage: {self._usage()}; {self.prog} --help says more"
        self.exit(2, f"{self.prog}: {message}\n{usage}\n")


def _number(
    read: Callable[[str], float], valid: Callable[[float], bool], what: str
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = read(text)
        except ValueError:
            value = math.nan
        if not valid(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


number = _number(float, lambda x: 0 < x < math.inf, "a positive number")
positive = _number(int, lambda n: n >= 1, "a positive whole number")
seed = _number(int, lambda n: 0 <= n < 1 << 32, f"a whole number from 0 to {2**32 - 1}")


def memory(text: str) -> int:
    """A number of bytes with a unit: 2GB, 500MB, 1.5GiB."""
    from ...report import bytes_of  # not for every command

    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition("\n")[0]) from None


def mesh(text: str) -> dict[str, int]:
    """The axes of a mesh of devices: data=4,model=2."""
    pairs = [word.partition("=")[::2] for word in text.split(",")]
    sizes = {name.strip(): positive(size) for name, size in pairs if size.strip().isdigit()}
    if len(sizes) != len(pairs) or not {*sizes} <= {"data", "model"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh such as data=4 or data=4,model=2")
    return {name: int(size) for name, size in sizes.items()}


def _one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(unknown(kind, text, names))
        return text

    return parse


OPTIMIZERS = ("adam", "rmsprop", "sgd")
cell = _one_of("cell", CELLS)
# For `train`, which neither scores streams nor stores where data is.
task = _one_of("task", [name for name in TASKS if name not in (*STREAMS, *NEED_DATA)])
optimizer = _one_of("optimizer", OPTIMIZERS)


def tasks(text: str) -> list[str]:
    """Names of tasks with commas between them, or `all`; or FILE:NAME."""
    return [text] if ":" in text else [_one_of("task", (*TASKS, "all"))(n) for n in text.split(",")]


class Tasks(argparse.Action):
    """All tasks of all words, in one list."""

    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        options.task = [*options.task, *(name for names in values for name in names)]


def rules(text: str) -> str:
    """Rules with commas between them, or `all`; options of rules are checked later."""
    for rule in BETWEEN.split(text):
        name = rule.partition(":")[0].lower()
        if "=" not in name and name not in (*ALIASES, "all"):
            _one_of("rule", RULES)(name)
    return text
