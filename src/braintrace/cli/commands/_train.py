"""`braintrace train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._names import CELLS, task_table
from ._parser import HIDDEN, add_command, cell, number, positive, rules, seed, task

EXAMPLES = """
braintrace train copy
braintrace train evidence --rule eprop:kappa_filter_decay=0.9 --updates 500
braintrace train copy --resume    # after Ctrl-C, or with more --updates
"""


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "train a network online on a task, with checkpoints"
    parser = add_command(commands, "train", run, about, EXAMPLES)
    parser.epilog = f"{parser.epilog}\n\n{task_table()}"
    option, of_task = parser.add_argument, "(default: see below)"
    option("task", type=task, metavar="TASK", help="one of those below")
    option("--rule", type=rules, metavar="RULE",
           help="name or name:option=value,option=value (default: d_rtrl)")  # fmt: skip
    option("--cell", type=cell, metavar="CELL", help=f"{', '.join(CELLS)} {of_task}")
    option("--updates", type=positive, metavar="N", help=f"weight updates in all {of_task}")
    option("--steps", type=positive, dest="updates", **HIDDEN)
    option("--length", type=positive, metavar="T", help=f"steps of a sequence {of_task}")
    option("--units", type=positive, metavar="N", help=f"units of the cell {of_task}")
    option("--batch", type=positive, metavar="B", help=f"sequences of an update {of_task}")
    option("--lr", type=number, metavar="RATE", help=f"learning rate of Adam {of_task}")
    option("--seed", type=seed, metavar="S", help="of weights and batches (default: 0)")
    option("--out", type=Path, metavar="DIR", help="for checkpoint, record and figure "
           "(default: out/train_TASK)")  # fmt: skip
    option("--checkpoint-every", type=positive, default=100, metavar="K",
           help="updates between two checkpoints (default: %(default)s)")  # fmt: skip
    option("--resume", action="store_true", help="go on from the checkpoint in DIR; options that "
           "are not given are those of before")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from ..train import run

    return run(options, options.parser)
