"""`braintrace bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._parser import HIDDEN, add_command, number, positive, rules

EXAMPLES = """
braintrace bench
braintrace bench --quick
braintrace bench --units 512 --lengths 64 256 1024 --rules bptt d_rtrl
"""
RULES = ("bptt", "d_rtrl", "pp_prop")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
FULL: dict[str, Any] = {"lengths": LENGTHS, "units": 128, "batch": 16, "repeats": 7}
QUICK: dict[str, Any] = {"lengths": (16, 32, 64), "units": 8, "batch": 2, "repeats": 2}


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "measure time and memory of a gradient against the length of the sequence"
    option = add_command(commands, "bench", run, about, EXAMPLES).add_argument
    usual = {name: f"(default: {_words(FULL[name])}, with --quick {_words(QUICK[name])})"
             for name in FULL}  # fmt: skip
    option("--rules", nargs="+", type=rules, default=list(RULES), metavar="RULE",
           help=f"name or name:option=value,option=value (default: {' '.join(RULES)})")  # fmt: skip
    option("--lengths", nargs="+", type=positive, metavar="T", help=f"steps {usual['lengths']}")
    option("--units", type=positive, metavar="N", help=f"units of the GRU {usual['units']}")
    option("--batch", type=positive, metavar="B", help=f"sequences {usual['batch']}")
    option("--repeats", type=positive, metavar="R",
           help=f"times each gradient is taken {usual['repeats']}")  # fmt: skip
    option("--memory-limit", type=number, default=4.0, metavar="GIB",
           help="a gradient that takes more working memory is left out "
           "(default: %(default)g)")  # fmt: skip
    option("--most", type=number, dest="memory_limit", **HIDDEN)
    option("--out", type=Path, default=Path("out"), metavar="DIR",
           help="for bench.json and bench.png (default: %(default)s)")  # fmt: skip
    option("--quick", action="store_true", help="small and short")


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from ..bench import run

    return run(options, options.parser)
