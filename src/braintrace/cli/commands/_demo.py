"""`braintrace demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._parser import add_command, positive, seed


def add(commands: Any) -> None:
    """Put the command on the list."""
    about = "train a network online and by BPTT, and compare"
    parser = add_command(
        commands, "demo", run, about, "braintrace demo\nbraintrace demo --quick --out /tmp/demo"
    )
    option = parser.add_argument
    option("--steps", type=positive, metavar="N", help="number of weight updates")
    option("--out", type=Path, default=Path("out"), metavar="DIR", help="for demo.png")
    option("--seed", type=seed, default=0, metavar="S", help="of weights and batches")
    option("--quick", action="store_true", help="a few seconds, too short to learn")


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit status."""
    from .._demo import FULL, QUICK, run

    setting = QUICK if options.quick else FULL
    run(setting, steps=options.steps or setting.steps, seed=options.seed, out=options.out)
    return 0
