"""The tables of docs/compare.md, from these settings, with the time that each part takes.

    python benchmarks/compare.py                 # everything: hours on two cores
    python benchmarks/compare.py copy example    # some parts
    python benchmarks/compare.py --quick         # everything, small and short, to try it

Tables, records and figures of a part go to docs/results/<part>/; rows that the record of a part
has already are not trained again with `--add`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from braintrace.cli import main
from braintrace.cli._names import NEED_DATA, STREAMS, TASKS

ROOT = Path(__file__).parents[1]
RATES = "--lr 0.001 0.003 0.01"
ALL = (
    "bptt tbptt rolling:window=8 no_trace d_rtrl d_rtrl:window=8 pp_prop ostl_recurrent "
    "eprop:kappa_filter_decay=0.5 rflo ottt otpe stllr uoro"
)
REFEREE = (
    "no_trace d_rtrl rtrl pp_prop:decay_or_rank=0.5 pp_prop:decay_or_rank=0.9 "
    "pp_prop:decay_or_rank=0.99 rolling:window=8"
)
BATCHES = [task for task in TASKS if task not in (*STREAMS, *NEED_DATA)]
CELLS = ("rnn", "gru", "lru", "alif")
EXAMPLE = ROOT / "examples" / "compare_rules.py"
PARTS = {
    **{task: f"{task} {RATES} --rules {ALL}" for task in BATCHES},
    **{
        f"streams-{cell}": f"{','.join(STREAMS)} --cell {cell} --optimizers sgd rmsprop adam "
        f"--lr 0.0003 0.001 0.003 0.01 --rules {REFEREE}"
        for cell in CELLS
    },
    "element-wise": f"{','.join(BATCHES)} --cell mingru {RATES} --rules bptt d_rtrl",
    "example": f"{EXAMPLE}:Sign --model {EXAMPLE}:Net --updates 300 --lr 0.003 0.01 0.03 "
    "--rules bptt tbptt:window=4 rolling:window=4 no_trace d_rtrl pp_prop",
}


def run(options: argparse.Namespace) -> int:
    """Run the parts one after the other; a table of their times at the end."""
    seconds: dict[str, float] = {}
    for part in options.parts or PARTS:
        words = [*PARTS[part].split(), "--out", str(options.out / part)]
        words += ["--quick"] * options.quick + ["--add"] * options.add
        started = time.perf_counter()
        if status := main(["compare", *words]):
            return status
        seconds[part] = time.perf_counter() - started
    for part, took in seconds.items():
        print(f"{part:16}{took / 60:8.1f} min")
    return 0


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--add", action="store_true", help="only rows that are missing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    sys.exit(run(options))
