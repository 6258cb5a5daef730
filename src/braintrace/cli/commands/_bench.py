"""`braintrace bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._parser import add_command, positive

EXAMPLES = """
braintrace bench                                 # minutes
braintrace bench --quick                         # seconds
braintrace bench --units 512 --lengths 64 256 1024 --rules bptt d_rtrl
"""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
RULES = ("bptt", "d_rtrl", "pp_prop")


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "measure time and memory of a gradient against the length of the sequence"
    option = add_command(commands, "bench", run, about, EXAMPLES).add_argument
    option("--rules", nargs="+", default=list(RULES), metavar="RULE",
           help="name or name:option=value (bptt d_rtrl pp_prop)")  # fmt: skip
    option("--lengths", nargs="+", type=positive, metavar="T", help="steps (64 to 4096)")
    option("--units", type=positive, metavar="N", help="units of the GRU (128)")
    option("--batch", type=positive, metavar="B", help="sequences (16)")
    option("--repeats", type=positive, metavar="R", help="times each gradient is taken (7)")
    option("--most", type=float, default=4.0, metavar="GIB", help="working memory beyond which a "
           "gradient is left out (4)")  # fmt: skip
    option("--out", type=Path, default=Path("out"), metavar="DIR", help="for bench.json, bench.png")
    option("--quick", action="store_true", help="a few seconds: small and short")


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from ..bench import run

    return run(options, options.parser)
