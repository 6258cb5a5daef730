"""`braintrace train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._names import CELLS, TASKS
from ._parser import add_command, positive, rate, seed

EXAMPLES = """
braintrace train copy
braintrace train evidence --rule eprop:kappa_filter_decay=0.9 --steps 500 --out out/evidence
braintrace train copy --resume              # after Ctrl-C, or with more --steps
"""


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "train a network online on a task, with checkpoints"
    option = add_command(commands, "train", run, about, EXAMPLES).add_argument
    option("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    option("--rule", metavar="RULE", help="name or name:option=value,option=value (d_rtrl)")
    option("--cell", choices=CELLS, metavar="CELL", help=f"{', '.join(CELLS)}")
    option("--steps", type=positive, metavar="N", help="weight updates in all")
    option("--length", type=positive, metavar="T", help="steps of a sequence")
    option("--units", type=positive, metavar="N", help="units of the cell")
    option("--batch", type=positive, metavar="B", help="sequences of an update")
    option("--lr", type=rate, metavar="RATE", help="learning rate of Adam")
    option("--seed", type=seed, metavar="S", help="of weights and batches (0)")
    option("--out", type=Path, metavar="DIR", help="for checkpoint, record and figure "
           "(out/train_TASK)")  # fmt: skip
    option("--checkpoint-every", type=positive, default=100, metavar="K", help="updates (100)")
    option("--resume", action="store_true", help="go on from the checkpoint in DIR; options that "
           "are not given are those of before")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from ..train import run

    return run(options, options.parser)
