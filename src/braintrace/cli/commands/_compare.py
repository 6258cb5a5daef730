"""`braintrace compare`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._names import CELLS, TASKS, task_table
from ._parser import HIDDEN, add_command, cell, number, positive, rules, tasks

EXAMPLES = """
braintrace compare --list
braintrace compare evidence --rules bptt d_rtrl eprop rflo
braintrace compare copy adding --rules d_rtrl d_rtrl:window=8
"""
FIRST = ("bptt", "tbptt", "no_trace", "d_rtrl", "pp_prop")
SEEDS = 3


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "train rules side by side on tasks"
    parser = add_command(commands, "compare", run, about, EXAMPLES)
    parser.epilog = f"{parser.epilog}\n\n{task_table()}"
    option, of_task = parser.add_argument, "(default: see below)"
    option("task", nargs="*", action="extend", type=tasks, default=[], metavar="TASK",
           help="one or more of those below, or all")  # fmt: skip
    option("--task", nargs="+", action="extend", type=tasks, **HIDDEN)
    option("--rules", nargs="+", type=rules, default=list(FIRST), metavar="RULE",
           help="name or name:option=value,option=value; all for every one "
           f"(default: {' '.join(FIRST)})")  # fmt: skip
    option("--cell", type=cell, metavar="CELL", help=f"{', '.join(CELLS)} {of_task}")
    option("--seeds", type=positive, metavar="N", help=f"how many, from 0 on (default: {SEEDS})")
    option("--updates", type=positive, metavar="N", help=f"weight updates of each run {of_task}")
    option("--length", type=positive, metavar="T", help=f"steps of a sequence {of_task}")
    option("--units", type=positive, metavar="N", help=f"units of the cell {of_task}")
    option("--batch", type=positive, metavar="B", help=f"sequences of an update {of_task}")
    option("--lr", type=number, metavar="RATE", help=f"learning rate of Adam {of_task}")
    option("--out", type=Path, default=Path("out"), metavar="DIR",
           help="for JSON and PNG files (default: %(default)s)")  # fmt: skip
    option("--quick", action="store_true", help="small and short, too short to learn")
    option("--list", action="store_true", help="show tasks, cells and rules, and end")


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    if not options.task and not options.list:
        options.parser.error(f"name a task: {', '.join(TASKS)}, or all")
    from ..compare import run

    return run(options, options.parser)
