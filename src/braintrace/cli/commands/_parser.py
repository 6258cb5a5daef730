"""Parsers of commands, and the numbers that they take."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with the whole help."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: {message}\n")


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, examples: str
) -> Parser:
    """A parser for one command; `options.run(options)` runs it, `options.parser` is the parser."""
    lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    about = about[0].upper() + about[1:]
    parser = commands.add_parser(
        name, help=about, description=f"{about}.", epilog=f"examples:\n{lines}"
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def rate(text: str) -> float:
    """A positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def seed(text: str) -> int:
    """A whole number that random keys are made of."""
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def positive(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
