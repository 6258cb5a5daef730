"""`braintrace explain`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._parser import add_command, positive

EXAMPLES = """
braintrace explain net.py:Network --input 16,3 --batch-size 16
braintrace explain 'net.py:Network(3, units=20)' --input 3 --rule snap:n=2
braintrace explain net.py:network                # with `example_input = ...` in net.py
braintrace explain net.py:Network --input 16,3 --batch-size 16 --html report.html
"""


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "say how every parameter of a model would be learned, and what is left out"
    option = add_command(commands, "explain", run, about, EXAMPLES).add_argument
    option("model", metavar="FILE:NAME", help="a module, a class of one, or a function that "
           "returns one; with arguments if it needs them")  # fmt: skip
    option("--input", action="append", type=_shape, metavar="SHAPE", help="shape of what enters a "
           "step, such as 16,3; once for each argument (example_input in FILE)")  # fmt: skip
    option("--input-dtype", default="float32", metavar="TYPE", help="of the inputs (float32)")
    option("--batch-size", type=positive, metavar="B", help="batch axis of the states")
    option("--rule", default="d_rtrl", metavar="RULE",
           help="name or name:option=value,option=value (d_rtrl)")  # fmt: skip
    option("--verbose", action="store_true", help="print the whole report, too: states, traces, "
           "and what is left out of every gradient")  # fmt: skip
    option("--level", type=int, choices=(1, 2, 3), default=1, metavar="N",
           help="print the whole report and warnings (2) or every decision (3)")  # fmt: skip
    option("--html", type=Path, metavar="FILE", help="write the report as a page, too")


def _shape(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.strip("()").split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 16,3")
    return tuple(map(int, words))


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from .._explain import run

    return run(options, options.parser)
