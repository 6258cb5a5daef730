"""Commands and their options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from . import compare
from ._demo import FULL, QUICK, run


class _Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with the whole help."""

    def error(self, message: str) -> NoReturn:
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words of the command line; default those of the process.

    Returns:
        The exit status.

    Raises:
        SystemExit: with status 2, after the help, if the words make no command.
    """
    options = _parser().parse_args(arguments)
    if options.command == "compare":
        return compare.run(options, options.parser)
    setting = QUICK if options.quick else FULL
    run(setting, steps=options.steps or setting.steps, seed=options.seed, out=options.out)
    return 0


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m braintrace",
        description="Online learning of recurrent and spiking networks in JAX.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo = commands.add_parser("demo", help="train a network online and by BPTT, and compare")
    demo.add_argument("--steps", type=_positive, metavar="N", help="number of weight updates")
    demo.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for demo.png")
    demo.add_argument("--seed", type=int, default=0, metavar="S", help="of weights and batches")
    demo.add_argument("--quick", action="store_true", help="a few seconds, too short to learn")
    rules = commands.add_parser("compare", help="train rules side by side on a task")
    compare.add_options(rules)
    rules.set_defaults(parser=rules)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
