"""`braintrace compare`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._names import CELLS
from ._parser import add_command, positive, rate

EXAMPLES = """
braintrace compare --list
braintrace compare --task evidence --rules bptt d_rtrl eprop rflo
braintrace compare --task copy adding --rules d_rtrl d_rtrl:window=8 pp_prop:decay_or_rank=0.9
"""
FIRST = ("bptt", "tbptt", "no_trace", "d_rtrl", "pp_prop")


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "train rules side by side on a task"
    option = add_command(commands, "compare", run, about, EXAMPLES).add_argument
    option("--task", nargs="+", default=[], metavar="TASK", help="one or more, or all")
    option("--rules", nargs="+", default=list(FIRST), metavar="RULE",
           help="name or name:option=value,option=value; all for every one")  # fmt: skip
    option("--cell", choices=CELLS, metavar="CELL", help="default that of the task")
    option("--seeds", type=positive, metavar="N", help="how many, from 0 on (3)")
    option("--updates", type=positive, metavar="N", help="weight updates of each run")
    option("--length", type=positive, metavar="T", help="steps of a sequence")
    option("--units", type=positive, metavar="N", help="units of the cell")
    option("--batch", type=positive, metavar="B", help="sequences of an update")
    option("--lr", type=rate, metavar="RATE", help="learning rate of Adam")
    option("--out", type=Path, default=Path("out"), metavar="DIR", help="for JSON and PNG files")
    option("--quick", action="store_true", help="a few seconds, too short to learn")
    option("--list", action="store_true", help="show tasks, cells and rules")


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from ..compare import run

    return run(options, options.parser)
