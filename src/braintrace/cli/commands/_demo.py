"""`braintrace demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._parser import HIDDEN, add_command, positive, seed

UPDATES, QUICK_UPDATES = 600, 10


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "train a network online and by BPTT, and compare"
    parser = add_command(
        commands, "demo", run, about, "braintrace demo\nbraintrace demo --quick --out /tmp/demo"
    )
    option = parser.add_argument
    option("--updates", type=positive, metavar="N",
           help=f"weight updates (default: {UPDATES}, with --quick {QUICK_UPDATES})")  # fmt: skip
    option("--steps", type=positive, dest="updates", **HIDDEN)
    option("--out", type=Path, default=Path("out"), metavar="DIR",
           help="for demo.png (default: %(default)s)")  # fmt: skip
    option("--seed", type=seed, default=0, metavar="S",
           help="of weights and batches (default: %(default)s)")  # fmt: skip
    option("--quick", action="store_true", help="small and short, too short to learn")


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from .._demo import FULL, QUICK, run

    updates = options.updates or (QUICK_UPDATES if options.quick else UPDATES)
    run(QUICK if options.quick else FULL, updates=updates, seed=options.seed, out=options.out)
    return 0
