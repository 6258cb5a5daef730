"""Time and memory of sequence gradients against BPTT and the published package.

    python benchmarks/speed.py --suite headline
    python benchmarks/speed.py --suite sweep --t 128 512 --models gru alif --limit 60
    python benchmarks/speed.py --device gpu --ours python=python3,path=src:deps --peer ...
    python benchmarks/speed.py --replot results/sweep-gpu.json

headline   the targets, with their verdicts
sweep      over steps, units, samples, block sizes and models, one at a time
roofline   a GRU against the least time its work can take on this machine
memory     short against long sequences
compile    compile and first gradient of 2, 1, 6 and 24 GRU layers, each in a new process

The modes are described in _modes.py. Tables go to stdout; `SUITE-DEVICE.json` with every
repetition and the plots go to --out. The published package is looked for in
$BRAINTRACE_PEER_PYTHON, else installed into benchmarks/.peer. Plots need matplotlib; without it,
--replot draws them later from the JSON file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from _plots import held, plot_all
from _processes import Row, Runner, Workload, machine, sides
from _report import Target, compare, faster, first_call, seconds, table, within

MAIN = (
    "ours:d_rtrl",
    "ours:d_rtrl:drop",
    "ours:d_rtrl:step",
    "bptt",
    "bptt:checkpoint",
    "peer:d_rtrl",
)
WINDOWS = (16, 64)
MODELS = ("gru", "gru2", "lstm", "alif", "mingru", "lru", "conv", "sparse")
AXES = {
    "cpu": {"t": (128, 512, 2048, 8192), "n": (64, 256, 1024), "b": (1, 16, 64)},
    "gpu": {"t": (128, 512, 2048, 8192), "n": (256, 1024, 4096), "b": (1, 64, 256)},
}
BLOCKS = (1, 4, 16, 64, 256)
Found = tuple[list[Row], list[Target], dict[str, Any]]


def show(runner: Runner, workload: Workload, modes: Iterable[str]) -> list[Row]:
    """Measure, compare and print; rows are also kept in a file in case the run is cut short."""
    rows = runner.measure(workload, list(modes))
    compare(rows)
    print(table(rows), end="\n\n", flush=True)
    with (runner.out / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return rows


def base(options: argparse.Namespace, model: str = "gru") -> Workload:
    if options.quick:
        return Workload(model, 32, 4, 16)
    sizes = {("gru", "cpu"): (256, 16, 128), ("gru", "gpu"): (1024, 64, 256)}
    return Workload(model, *sizes.get((model, options.device), (512, 32, 1000)))


def headline(runner: Runner, options: argparse.Namespace) -> Found:
    gru, alif = base(options), base(options, "alif")
    cpu = options.device == "cpu"
    rows = show(runner, gru, MAIN)
    targets = [
        faster(rows, "ours:d_rtrl", "peer:d_rtrl", 15),
        within(rows, "ours:d_rtrl", "bptt", 0.9 if cpu else 0.65),
        within(rows, "ours:d_rtrl:drop", "bptt", 0.9 if cpu else 0.65),
    ]
    if not cpu:
        targets.append(first_call(rows, "ours:d_rtrl", 2.7))
    found = show(runner, gru, ["ours:d_rtrl", "ours:d_rtrl:drop", "forward"])
    for mode in ("ours:d_rtrl", "ours:d_rtrl:drop"):
        target = within(found, mode, "forward", 2.0)
        targets.append(replace(target, bound=None) if cpu else target)
    rows += found
    wide = replace(gru, i=gru.n)
    for place, goals in ((gru, (2, 1.5)), (wide, (1.3, 1.0))):
        for window in [w for w in WINDOWS if w < gru.t] or [gru.t // 2]:
            ours, peer = f"ours:window={window}", f"peer:window={window}"
            found = show(runner, place, [ours, f"{ours}:step", peer])
            targets.append(faster(found, ours, peer, goals[0]))
            rows += found
        found = show(runner, place, ["ours:pp_prop", "ours:pp_prop:step", "peer:pp_prop"])
        targets.append(faster(found, "ours:pp_prop", "peer:pp_prop", goals[1]))
        rows += found
    for place in (gru, wide):
        found = show(runner, place, ["ours:online", "ours:online:bf16", "ours:step", "peer:step"])
        targets += [] if cpu else [faster(found, "ours:online", "peer:step", 2.5)]
        rows += found
    if not cpu:
        for mode, goal in (("ours:online", 0.45), ("ours:online:bf16", 0.3)):
            each = 1e3 * seconds(found, mode) / wide.t
            targets.append(Target(f"{wide}: {mode}, ms per step", each, goal))
    found = show(runner, alif, MAIN)
    targets += [
        faster(found, "ours:d_rtrl", "peer:d_rtrl", 10),
        within(found, "ours:d_rtrl", "bptt", 1.2 if cpu else 1.0),
        within(found, "ours:d_rtrl:drop", "bptt", 0.9),
    ]
    return rows + found, targets, {}


def sweep(runner: Runner, options: argparse.Namespace) -> Found:
    """Sizes and block sizes for the first model, the other models at the middle size."""
    first, *others = options.models
    rows = [row for axis in ("t", "n", "b") for row in along(runner, options, first, axis)]
    middle = base(options)
    for model in others:
        rows += show(runner, replace(middle, model=model), options.modes)
    blocks = [f"ours:d_rtrl:block={k}" for k in options.blocks if k <= middle.t]
    rows += show(runner, replace(middle, model=first), ["ours:d_rtrl", *blocks])
    return rows, [], {}


def along(runner: Runner, options: argparse.Namespace, model: str, axis: str) -> list[Row]:
    """Growing sizes along one axis; a mode that failed is not tried on larger ones."""
    modes, rows = list(options.modes), []
    for value in sorted(getattr(options, axis)):
        place = replace(base(options), model=model, **{axis: value})
        found = show(runner, place, modes)
        skipped = [mode for mode in options.modes if mode not in modes]
        rows += found + [Row(place, mode, "skipped", "failed at less") for mode in skipped]
        modes = [row.mode for row in found if row.status == "ok"]
        if not modes:
            break
    return rows


def memory(runner: Runner, options: argparse.Namespace) -> Found:
    place, lengths = base(options), (16, 64) if options.quick else (256, 8192)
    modes = ["ours:d_rtrl", "ours:d_rtrl:drop", "ours:pp_prop", "bptt", "bptt:checkpoint"]
    rows = []
    for t in lengths:
        rows += show(runner, Workload("gru", place.n, place.b, t), modes)
    targets = []
    for mode in modes:
        short, long = (
            next((held(r) for r in rows if (r.mode, r.workload.t) == (mode, t) and r.setup), None)
            for t in lengths
        )
        ratio = long / short if short and long else float("nan")
        name = f"memory of {mode}, T={lengths[1]} over T={lengths[0]}"
        targets.append(Target(name, ratio, 1.1 if mode.startswith("ours") else None))
    return rows, targets, {}


def compile_time(runner: Runner, options: argparse.Namespace) -> Found:
    """Seconds of the processor: those on the clock depend on what else the machine does."""
    modes = ["ours:d_rtrl", "bptt", "peer:d_rtrl"]
    rows, targets = [], []
    for model in ("gru2",) if options.quick else ("gru2", "gru", "gru6", "gru24"):
        place = Workload(model, 32, 4, 16) if options.quick else Workload(model, 128, 8, 32)
        fresh = runner.fresh(place, modes)
        cpu = {
            mode: median([r.setup["cpu_s"] for r in fresh if r.mode == mode and r.setup] or [nan])
            for mode in modes
        }
        print(place, *(f"  {mode:22}{s:9.2f} s" for mode, s in cpu.items()), "", sep="\n")
        ratio = cpu["ours:d_rtrl"] / cpu["peer:d_rtrl"]
        name = f"{place}: compile and first gradient, ours over peer"
        targets.append(Target(name, ratio, 1.0 if model == "gru2" else None))
        rows += fresh
    return rows, targets, {}


def roofline(runner: Runner, options: argparse.Namespace) -> Found:
    place = base(options)
    rows = show(runner, place, ["ours:d_rtrl", "ours:d_rtrl:drop", "bptt"])
    worker = runner.worker("ours")
    try:
        found = worker.ask(job="roofline", **place.request())
    finally:
        worker.stop()
    if found.pop("status") != "ok":
        raise RuntimeError(found["error"])
    print("  " + ", ".join(f"{name} {value:.3g}" for name, value in found["ceilings"].items()))
    targets = []
    for mode, least in found["estimates"].items():
        listed = ", ".join(f"{name} {1e3 * s:.3g}" for name, s in least["phases"].items())
        total = f"{1e3 * least['sum_s']:.3g} ms, peak rates alone {1e3 * least['bound_s']:.3g} ms"
        print(f"  {mode}: estimate {total} ({listed})")
        ratio = seconds(rows, mode) / least["sum_s"]
        targets.append(Target(f"{place}: {mode} over its roofline estimate", ratio, 2.5))
    print()
    return rows, targets, found


SUITES: dict[str, Callable[[Runner, argparse.Namespace], Found]] = {
    "headline": headline,
    "sweep": sweep,
    "roofline": roofline,
    "memory": memory,
    "compile": compile_time,
}


def arguments() -> argparse.Namespace:
    summary, usage = __doc__.split("\n\n", 1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=usage, formatter_class=raw)
    add = parser.add_argument
    add("--suite", choices=(*SUITES, "all"), default="headline")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--quick", action="store_true", help="tiny sizes: does the harness work?")
    add("--out", type=Path, default=Path(__file__).parent / "results")
    add("--rounds", type=int, help="timed repetitions, 5 unless --quick")
    add("--limit", type=float, default=600, help="seconds that one mode of a workload may take")
    add("--ours", metavar="python=...,path=...", help="interpreter and PYTHONPATH of this package")
    add("--peer", metavar="python=...,path=...", help="the same for the published package")
    add("--models", nargs="+", choices=MODELS, default=MODELS)
    add("--modes", nargs="+", default=MAIN)
    add("--blocks", nargs="+", type=int, default=BLOCKS)
    add("--replot", type=Path, metavar="JSON", help="only draw the plots of an earlier run")
    for axis in ("t", "n", "b"):
        add(f"--{axis}", nargs="+", type=int)
    options = parser.parse_args()
    small = {"t": (8, 16), "n": (16, 32), "b": (2, 4)}
    for axis, values in (small if options.quick else AXES[options.device]).items():
        if getattr(options, axis) is None:
            setattr(options, axis, values)
    return options


def main() -> int:
    options = arguments()
    if options.replot:
        rows = json.loads(options.replot.read_text())["rows"]
        plot_all([Row.load(row) for row in rows], options.replot.with_suffix(""))
        return 0
    gradients = options.out / "gradients"
    gradients.mkdir(parents=True, exist_ok=True)
    rounds = options.rounds or (2 if options.quick else 5)
    where = sides(options.ours, options.peer)
    runner = Runner(where, options.device, rounds, options.limit, options.out)
    verdicts = []
    for name in SUITES if options.suite == "all" else [options.suite]:
        rows, targets, more = SUITES[name](runner, options)
        verdicts += targets
        found = {
            "machine": machine(),
            "arguments": sys.argv[1:],
            "rows": [asdict(row) for row in rows],
            "targets": [asdict(target) for target in targets],
            **more,
        }
        target = options.out / f"{name}-{options.device}.json"
        target.write_text(json.dumps(found, indent=1))
        if importlib.util.find_spec("matplotlib"):
            plot_all(rows, target.with_suffix(""))
    shutil.rmtree(gradients)
    print(*verdicts, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
