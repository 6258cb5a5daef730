"""The tables of docs/compare.md and docs/compare/, from the settings below, with their times.

    python benchmarks/compare.py                 # everything: hours on two cores
    python benchmarks/compare.py copy example    # some parts
    python benchmarks/compare.py --write         # tables and figures again, from the kept records
    python benchmarks/compare.py --quick         # everything, small and short, to try it

A part is a queue of jobs, a few rows of a table each, which processes work on side by side, each on
a core of its own. A finished job is not run again: Ctrl-C stops, the same command goes on from
there, and a folder of `--jobs` that another machine has filled is taken over. The records of a part
go to docs/results/<part>/ when none of its jobs is missing; what the page shows is written from
them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "src"))

from braintrace.lab.cli._names import NEED_DATA, REWARDS, STREAMS, TASKS  # noqa: E402

RESULTS = ROOT / "docs" / "results"
EXAMPLE = ROOT / "examples" / "compare_rules.py"
BATCHES = [task for task in TASKS if task not in (*STREAMS, *NEED_DATA, *REWARDS)]
CELLS = ("rnn", "gru", "lru", "alif")
RATES, STREAM_RATES = "--lr 0.003 0.01", "--lr 0.001 0.003 0.01 0.03 0.1"
OPTIMIZERS = ("sgd", "rmsprop", "adam")
UPDATES = {"copy": 2000, "adding": 800, "match": 600, "evidence": 600, "mackey_glass": 400,
           "digits": 1000, "text": 600, "pixels": 1000, "vowels": 600, "motions": 300}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one job, which share an import and what is compiled for the task.

    Jobs of a lower `turn` come first: long ones, and last what would be missed least.
    """

    turn: int
    rules: str
    optimizers: tuple[str, ...] = ()  # default those of the part
    times: bool = False  # one update only: the times of all rows, measured in alternation


@dataclass(frozen=True, slots=True)
class Part:
    """Tables of one command, one per task, with the same rows."""

    tasks: tuple[str, ...]
    words: str
    rows: tuple[Rows, ...]
    optimizers: tuple[str, ...] = ("adam",)


# e-prop as its paper has it, and its published form; they are equal where units do not spike.
PAPER_EPROP = "eprop:filtered=eligibility,kappa_filter_decay=0.5"
RULES = (
    Rows(0, "ostl_recurrent"),
    Rows(1, "rolling:window=8"),
    Rows(2, "bptt no_trace d_rtrl pp_prop osttp three_factor decolle dni"),
    Rows(3, "tbptt d_rtrl:window=8"),
    Rows(4, "auto"),
    Rows(5, f"{PAPER_EPROP} eprop:kappa_filter_decay=0.5 rflo pp_prop:decay_or_rank=0.99"),
    Rows(8, "ottt otpe ostl_feedforward"),
    Rows(9, "stllr uoro"),
    Rows(10, "kf_rtrl"),
)
TIMES = Rows(11, " ".join(rows.rules for rows in RULES), times=True)
EPROP = "eprop:filtered=eligibility,kappa_filter_decay=0.9"
ONCE = "--updates 1 --seeds 1 --lr 0.003"
REFEREE = (
    *(Rows(9, "rtrl", (optimizer,)) for optimizer in OPTIMIZERS),
    Rows(4, "no_trace d_rtrl rolling:window=8"),
    Rows(
        7,
        "pp_prop:decay_or_rank=0.5 pp_prop:decay_or_rank=0.9 pp_prop:decay_or_rank=0.99",
        ("rmsprop",),
    ),
)
# RTRL of a GRU with 8 ms per step: 14 minutes each.
LEFT_OUT = {("streams-gru", "delayed", "rtrl", (optimizer,)) for optimizer in ("sgd", "adam")}
SOURCE = ("versions", "machine")  # of a record
ORDER = (  # of the rows of a table
    "bptt", "rtrl", "tbptt", "auto", "rolling", "no_trace", "d_rtrl", "pp_prop", "ostl_recurrent",
    "ostl_feedforward", "eprop", "rflo", "ottt", "otpe", "stllr", "uoro", "kf_rtrl",
    "osttp", "three_factor", "r_stdp", "reward_eprop", "decolle", "tess", "dni",
)  # fmt: skip
PARTS = {
    **{
        task: Part((task,), f"{RATES} --updates {UPDATES[task]} --units 32", (*RULES, TIMES))
        for task in BATCHES
    },
    **{
        f"streams-{cell}": Part(STREAMS, f"--cell {cell} {STREAM_RATES}", REFEREE, OPTIMIZERS)
        for cell in CELLS
    },
    "element-wise": Part(
        tuple(BATCHES),
        f"--cell mingru {RATES} --updates 600 --units 32",
        (Rows(6, "bptt d_rtrl"),),
    ),
    "rewards": Part(
        REWARDS,
        f"{RATES} --seeds 3",
        (Rows(2, f"bptt no_trace d_rtrl {EPROP} {EPROP},feedback=random reward_eprop r_stdp"),),
    ),
    "example": Part(
        (f"{EXAMPLE}:Sign",),
        f"--model {EXAMPLE}:Net --updates 300 --lr 0.003 0.01 0.03",
        (Rows(2, "bptt tbptt:window=4 rolling:window=4 no_trace d_rtrl pp_prop"),),
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Some rows of a table, and the folder of their record."""

    part: str
    task: str
    rules: str
    optimizers: tuple[str, ...]
    folder: Path
    quick: bool
    times: bool = False

    @property
    def name(self) -> str:
        return self.task.rpartition(":")[2]

    @property
    def record(self) -> Path:
        return self.folder / f"compare_{self.name}.json"

    @property
    def seconds(self) -> Path:
        """The CPU time of the job; there once it is done."""
        return self.folder / "seconds"

    def start(self, core: int) -> int:
        """Start it on a core; returns the process."""
        words = [self.task, *PARTS[self.part].words.split(), "--rules", *self.rules.split()]
        words += ["--optimizers", *self.optimizers, "--out", str(self.folder)]
        words += ["--quick"] * self.quick + ONCE.split() * self.times
        path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "JAX_PLATFORMS": "cpu",
            "NPROC": "1",  # threads of XLA
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "_compare_job.py"), str(self.record), *words],
                stdout=log,
                stderr=log,
                env=os.environ | environment,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
        process.returncode = 0  # `work` waits for it, and wants the CPU time
        return process.pid


def jobs_of(parts: list[str], folder: Path, quick: bool) -> list[Job]:
    """The jobs of some parts, in the order of their turns."""
    turns = []
    for part in parts:
        for task, rows in product(PARTS[part].tasks, PARTS[part].rows):
            optimizers = rows.optimizers or PARTS[part].optimizers
            if (part, task, rows.rules, optimizers) not in LEFT_OUT:
                first = "times" if rows.times else rows.rules.split()[0].replace(":", "_")
                own = folder / part / task.rpartition(":")[2] / "-".join([first, *optimizers])
                job = Job(part, task, rows.rules, optimizers, own, quick, rows.times)
                turns.append((rows.turn, job))
    return [job for _, job in sorted(turns, key=lambda pair: pair[0])]


def work(jobs: list[Job], cores: list[int], end: float) -> list[Job]:
    """Run what is not done yet, one job per core; returns what is missing at the end."""
    waiting = [job for job in jobs if not job.seconds.is_file()]
    total, free = len(waiting), list(cores)
    running: dict[int, tuple[Job, int]] = {}  # by process
    stopping = False
    while running or (waiting and not stopping):
        try:
            if not stopping and time.monotonic() >= end:
                raise KeyboardInterrupt
            while free and waiting and not stopping:
                job, core = waiting.pop(0), free.pop()
                running[job.start(core)] = (job, core)
            for pid in list(running):
                done, status, usage = os.wait4(pid, os.WNOHANG)
                if done:
                    job, core = running.pop(pid)
                    free.append(core)
                    took, left = usage.ru_utime + usage.ru_stime, len(waiting) + len(running)
                    if status == 0:
                        job.seconds.write_text(f"{took:.1f}\n")
                    ended = f"{took:.0f} s" if status == 0 else f"no result: {job.folder}/log"
                    print(f"{total - left}/{total} {job.part} {job.name} {job.rules}: {ended}",
                          flush=True)  # fmt: skip
            time.sleep(0.2)
        except KeyboardInterrupt:  # also at the end of the time
            if stopping:
                raise
            stopping = True
            for pid in running:
                os.kill(pid, signal.SIGTERM)
    return [job for job in jobs if not job.seconds.is_file()]


def keep(part: str, jobs: list[Job], results: Path) -> None:
    """The records of a part from those of its jobs."""
    from braintrace import CompareResult

    optimizers = PARTS[part].optimizers
    place = lambda row: (
        ORDER.index(row.rule), optimizers.index(row.optimizer), row.window or 0, row.label
    )  # fmt: skip
    for name in dict.fromkeys(job.name for job in jobs):
        every = [job for job in jobs if job.name == name]
        own = [job for job in every if not job.times]
        records = [CompareResult.load(job.record) for job in own]
        settings = {replace(record.settings, optimizers=optimizers) for record in records}
        if len(settings) > 1:
            raise SystemExit(f"jobs of different settings in {own[0].folder.parent}: remove it")
        for timed in (CompareResult.load(job.record) for job in every if job.times):
            milliseconds = {row.label: row.milliseconds for row in timed.rows}
            for row in (row for record in records for row in record.rows):
                row.milliseconds = milliseconds.get(row.label, math.nan)
        whole = records[0]
        whole.settings = settings.pop()
        whole.rows = sorted((row for record in records for row in record.rows), key=place)
        for row in whole.rows if len(optimizers) > 1 else ():
            row.label = f"{row.label.removesuffix(f' {row.optimizer}')} {row.optimizer}"
        path = results / part / f"compare_{name}.json"
        whole.save(path)
        # Versions and machines are those of the jobs, not of this process.
        content = json.loads(path.read_text("utf-8"))
        _write_record(path, content, [_source(job) for job in every])
    times = results / "seconds.json"
    seconds = json.loads(times.read_text()) if times.is_file() else {}
    seconds[part] = round(sum(float(job.seconds.read_text()) for job in jobs))
    times.write_text(json.dumps(seconds, indent=1) + "\n")


def rows_added(part: str, task: str, new: dict[str, Any]) -> None:
    """Put rows of another run into a kept record; the times of a table are those of one process."""
    path = RESULTS / part / f"compare_{task}.json"
    kept = json.loads(path.read_text("utf-8"))
    same = ("task", "settings")
    if wrong := [k for k in same if json.dumps(kept[k]) != json.dumps(new[k])]:
        raise SystemExit(f"{task}: another {wrong[0]}, {new[wrong[0]]} and {kept[wrong[0]]}")
    rows = {row["label"]: row for row in kept["rows"]}
    rows |= {row["label"]: {**row, "milliseconds": math.nan} for row in new["rows"]}
    turn = PARTS[part].optimizers.index
    first = lambda row: (ORDER.index(row["rule"]), turn(row["optimizer"]))
    place = lambda row: (*first(row), row["window"] or 0, row["label"])
    kept["rows"] = sorted(rows.values(), key=place)
    _write_record(path, kept, [*kept["sources"], {key: new[key] for key in SOURCE}])


def _write_record(path: Path, content: dict[str, Any], sources: list[dict[str, object]]) -> None:
    """A record with a line for each row, and where it was measured."""
    used = [source for n, source in enumerate(sources) if source not in sources[:n]]
    rows = ",\n".join(json.dumps(_rounded(row)) for row in content["rows"])
    left_out = (*SOURCE, "rows", "sources")
    head = {k: v for k, v in content.items() if k not in left_out} | {"sources": used}
    path.write_text(f'{json.dumps(head)[:-1]},\n"rows": [\n{rows}\n]}}\n', "utf-8")


def _rounded(value: object) -> object:
    """Seven digits, which are all that float32 has."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _source(job: Job) -> dict[str, object]:
    content = json.loads(job.record.read_text("utf-8"))
    return {key: content[key] for key in SOURCE}


def run(options: argparse.Namespace) -> int:
    """Run parts, keep their records, write the page."""
    if options.write:
        _write(options)
        return 0
    parts = options.parts or list(PARTS)
    jobs = jobs_of(parts, options.jobs, options.quick)
    end = time.monotonic() + 60 * options.minutes
    cores = options.cores or sorted(os.sched_getaffinity(0))
    missing = work(jobs, cores, end)
    for part in parts:
        own = [job for job in jobs if job.part == part]
        done = [job for job in own if job not in missing]
        if done == own or (done and options.partial):
            keep(part, done, options.out)
        if done != own:
            print(f"{part}: {len(own) - len(done)} of {len(own)} jobs are missing")
    if options.out == RESULTS and not options.quick:
        _write(options)
    return 1 if missing else 0


def _write(options: argparse.Namespace) -> None:
    from _compare_page import write

    write(ROOT / "docs", options.out)


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small and short")
    parser.add_argument("--write", action="store_true", help="run nothing, write the page")
    parser.add_argument("--partial", action="store_true", help="keep parts with missing jobs too")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--cores", type=int, nargs="+", help="default all")
    parser.add_argument("--jobs", type=Path, default=ROOT / "out" / "compare")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick and options.out == RESULTS:
        options.out = options.jobs = ROOT / "out" / "compare-quick"
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    sys.exit(run(options))
