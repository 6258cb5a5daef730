"""Many random programs and networks, each with a time limit: right, refused, wrong, crashed, hung.

Each program is judged with one rule, drawn from all of them (tests/fuzz/claims.py says what a right
gradient of each is). Half of them use braintrace's operators, half plain JAX that is recognised.
In a share of them the gradient of the learner is compiled by XLA, in the others it is interpreted;
what it is compared with always is. What is wrong then is run again by XLA alone; 'misread' is a
fault of the interpreter.

    python benchmarks/sweep.py --count 2000 --seed 0 --workers 2
    python benchmarks/sweep.py --minutes 60 --count 20000        # as many as there is time for
    python benchmarks/sweep.py --replay "<program>" --rule rtrl --unmarked      # one program again
    python benchmarks/sweep.py --replay "<program>" --shrink     # the smallest that fails alike

Programs run in worker processes, which are replaced when one hangs. A JSON line per program goes to
benchmarks/results/sweep.jsonl as it is judged, or to --out. Exit status 1: something was wrong,
misread, crashed or hung.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent
BAD = ("wrong", "misread", "crashed", "hung")
KINDS = ("right", "refused", "no truth", *BAD)
TURNS = (*("program", "program", "around") * 10, "network", "chain", "moved")  # one after another
FLAG = "--xla_cpu_use_fusion_emitters=false"  # XLA compiles in half the time
MEMORY = {  # what is freed is used again, without asking the system each time
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
FRESH_AFTER = 1000  # programs per worker: JAX keeps what it compiled


class Job(NamedTuple):
    """A program, and how it is judged."""

    generator: str
    seed: int
    rule: str = "d_rtrl"
    unmarked: bool = False
    compiled: bool = False


# ------------------------------------------------------------------------------------ in a worker


def judge_spec(spec: tuple, job: Job, seconds: float) -> Any:
    import chains
    import judge
    import layers
    import moved
    import operators

    quick = functools.partial(judge.interpreted, lower=False)  # XLA has its share
    how: dict[str, Any] = {"run": judge.compiled if job.compiled else quick, "seconds": seconds}
    try:
        with operators.unmarked() if job.unmarked else contextlib.nullcontext():
            if spec[0] == "around":
                return judge.judge_around(spec, job.rule, **how)
            if spec[0] == "moved":
                return moved.judge_moved(spec, job.rule)
            if spec[0] == "chain":
                return chains.judge_chain(spec, (job.rule,), **how)
            if is_network(spec):
                return judge.judge_network(layers.of(spec), **how)
            return judge.judge(spec, (job.rule,), **how)
    except Exception as error:  # the plain program itself: the generator's fault
        return judge.Verdict("crashed", f"generator: {judge.describe(error)}")


def job_of(generator: str, seed: int, share: float) -> Job:
    """How a program is judged: drawn by its seed, too."""
    import chains
    import claims
    import moved

    draw = random.Random(f"how {seed}")
    unmarked, compiled = draw.random() < 0.5, draw.random() < share
    if generator == "network":  # its oracle is D-RTRL's
        return Job(generator, seed, "d_rtrl", False, compiled)
    if generator == "moved":
        return Job(generator, seed, draw.choice(sorted(moved.RULES)), False, True)
    if generator == "chain":  # the oracle has marks
        return Job(generator, seed, draw.choice(sorted(chains.RULES)), False, compiled)
    rules = claims.AROUND if generator == "around" else claims.DRAWN
    return Job(generator, seed, draw.choice(rules), unmarked, compiled)


def is_network(spec: tuple) -> bool:
    return isinstance(spec[0][0], int)


def set_up() -> None:
    sys.path[:0] = [str(ROOT / path) for path in ("tests/fuzz", "tests", "src")]
    import brainstate
    import jax

    brainstate.environ.set(precision=64)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)  # traces are many small objects


def generate(kind: str, seed: int) -> tuple:
    import around
    import chains
    import layers
    import moved
    import programs

    if kind == "moved":
        return moved.random_case(seed)
    if kind == "chain":
        return chains.random_chain(seed)
    if kind == "network":
        return layers.spec_of(layers.random_network(seed))
    if kind == "around":
        return around.random_case(seed)
    return programs.random_program(seed)


def with_room(function: Callable[[], None]) -> None:
    """Call a function with space for the frames of all that it calls.

    CPython maps and unmaps 16 kB whenever calls cross the end of a chunk of frames, thousands of
    times per program. A frame this large gets a chunk twice its size, which the others share.
    """

    def call() -> None:
        function()

    call.__code__ = call.__code__.replace(co_stacksize=2**19)
    call()


def work(seconds: float, share: float) -> None:
    """Read `generator seed` lines, write JSON lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever programs print
    set_up()
    for line in sys.stdin:
        generator, seed = line.split()
        job, spec = job_of(generator, int(seed), share), generate(generator, int(seed))
        start = time.process_time()
        verdict = dataclasses.asdict(judge_spec(spec, job, seconds))
        took = round(time.process_time() - start, 3)
        row = {**job._asdict(), "program": repr(spec), "seconds": took, **verdict}
        print(json.dumps(row), file=answers, flush=True)


# ---------------------------------------------------------------------------------- in the parent


class Worker:
    """A process that judges one program at a time."""

    def __init__(self, seconds: float, share: float, core: int):
        self.seconds, self.share, self.core = seconds, share, core
        self.process: subprocess.Popen | None = None
        self.done = 0

    def give(self, generator: str, seed: int) -> None:
        if self.process is None or self.done >= FRESH_AFTER:
            self.stop()
            options = ["--worker", f"--seconds={self.seconds}", f"--compiled={self.share}"]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                [sys.executable, __file__, *options],
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **MEMORY},
                preexec_fn=lambda: os.sched_setaffinity(0, {self.core}),  # no pool of threads
            )
            self.done = 0
        self.job = (generator, seed)
        # The worker stops itself; the parent stops one that is stuck below Python.
        self.until = time.monotonic() + 5 * self.seconds + (60 if self.done == 0 else 0)
        self.done += 1
        self.process.stdin.write(f"{generator} {seed}\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            return self.failed("crashed", f"the process died with status {self.process.wait()}")
        return self.row(json.loads(line))

    def failed(self, kind: str, detail: str) -> dict:
        self.stop()
        return self.row({"program": None, "kind": kind, "detail": detail, "seconds": None})

    def row(self, found: dict) -> dict:
        return {"generator": self.job[0], "seed": self.job[1], **found}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def set_flag() -> None:
    """Set the flag for all workers, if this version of XLA has it: it ends a process otherwise."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
    trial = [sys.executable, "-c", "import jax; jax.numpy.ones(2).sum()"]
    if not subprocess.run(
        trial, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, check=False
    ).returncode:
        os.environ["XLA_FLAGS"] = flags


def sweep(options: argparse.Namespace) -> list[dict]:
    """Judge `count` programs, of all generators in turn, or as many as there is time for."""
    seeds = range(options.seed, options.seed + options.count)
    todo = collections.deque((TURNS[i % len(TURNS)], i) for i in seeds)
    rows: list[dict] = []
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    pool = [
        Worker(options.seconds, options.compiled, next(cores))
        for _ in range(min(options.workers, options.count))
    ]
    busy = set()
    start = time.monotonic()
    end = start + 60 * options.minutes
    target = Path(options.out)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("a") as out:
            for worker in pool:
                worker.give(*todo.popleft())
                busy.add(worker)
            while busy and time.monotonic() < end:
                for worker in _ready(busy, end):
                    late = time.monotonic() > worker.until
                    rows.append(worker.failed("hung", "killed") if late else worker.answer())
                    print(json.dumps(rows[-1]), file=out, flush=True)
                    _progress(rows, options.count, time.monotonic() - start)
                    if todo:
                        worker.give(*todo.popleft())
                    else:
                        busy.discard(worker)
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("stopped early", file=sys.stderr)
    finally:
        for worker in pool:
            worker.stop()
    return sorted(rows, key=lambda r: r["seed"])


def _ready(busy: set[Worker], end: float) -> list[Worker]:
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while True:
            found = [key.data for key, _ in selector.select(timeout=0.5)]
            late = [w for w in busy if time.monotonic() > w.until]
            if found or late or time.monotonic() > end:
                return found or late


def _progress(rows: list[dict], count: int, seconds: float) -> None:
    if len(rows) % 100 and len(rows) < count and rows[-1]["kind"] not in BAD:
        return
    if rows[-1]["kind"] in BAD:
        last = rows[-1]
        print(
            f"{last['generator']} {last['seed']} {last['kind']}: {last['detail']}", file=sys.stderr
        )
    have = collections.Counter(r["kind"] for r in rows)
    told = ", ".join(f"{have[k]} {k}" for k in KINDS if have[k])
    print(f"{len(rows)}/{count} in {seconds:.0f} s: {told}", file=sys.stderr, flush=True)


def table(rows: list[dict]) -> str:
    """Counts by generator, marks, XLA and rule; refusals and failures by what they say."""
    lines = [f"{'':24}" + "".join(f"{k:>10}" for k in (*KINDS, "all"))]

    def count(name: str, rows: list[dict]) -> None:
        have = collections.Counter(r["kind"] for r in rows)
        cells = (*(have[k] for k in KINDS), len(rows))
        lines.append(f"{name:24}" + "".join(f"{n:>10}" for n in cells))

    for generator in dict.fromkeys(TURNS):
        for unmarked in (False, True):
            these = [r for r in rows if r["generator"] == generator]
            these = [r for r in these if bool(r.get("unmarked")) == unmarked]
            if these:
                count(f"{generator}, {'unmarked' if unmarked else 'marked'}", these)
    count("compiled by XLA", [r for r in rows if r.get("compiled")])
    count("interpreted", [r for r in rows if not r.get("compiled")])
    count("all", rows)
    lines.append("")
    for rule in sorted({r.get("rule") or "?" for r in rows}):
        count(rule, [r for r in rows if (r.get("rule") or "?") == rule])
    rounding = sum(r["detail"].startswith("decided by rounding") for r in rows)
    lines += ["", f"{rounding} of the right ones take a branch that rounding decides"]
    for kind in ("refused", *BAD):
        said = collections.Counter(_gist(r["detail"]) for r in rows if r["kind"] == kind)
        if said:
            lines += ["", f"{kind}:"]
            lines += [f"{n:6}  {text}" for text, n in said.most_common()]
    return "\n".join(lines)


def _gist(detail: str) -> str:
    """A detail without its numbers, so that like meets like."""
    return "".join("#" if c.isdigit() else c for c in detail)[:110]


def replay(text: str, job: Job, seconds: float, shrinking: bool) -> Any:
    import chains
    import layers
    import programs

    spec = ast.literal_eval(text)
    verdict = judge_spec(spec, job, seconds)
    if shrinking and verdict.bad:

        def alike(candidate: tuple) -> bool:
            found = judge_spec(candidate, job, seconds)
            return found.kind == verdict.kind and _gist(found.detail) == _gist(verdict.detail)

        if spec[0] == "around":
            _, kinds, inner = spec
            again = lambda inner: alike(("around", kinds, inner))
            spec = ("around", kinds, programs.shrink(inner, again))
        elif spec[0] == "moved":
            spec = ("moved", programs.shrink(spec[1], lambda inner: alike(("moved", inner))))
        elif spec[0] == "chain" or is_network(spec):
            networks = lambda s: map(layers.spec_of, layers.smaller(layers.of(s)))
            simpler = chains.smaller if spec[0] == "chain" else networks
            while (found := next(filter(alike, simpler(spec)), None)) is not None:
                spec = found
        else:
            spec = programs.shrink(spec, alike)
        print(f"smallest: {spec!r}")
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="limit of one program")
    parser.add_argument("--minutes", type=float, default=10**6, help="limit of all")
    parser.add_argument("--out", default=str(HERE / "results" / "sweep.jsonl"))
    parser.add_argument("--compiled", type=float, default=0.5, help="share that XLA compiles")
    parser.add_argument("--replay", metavar="PROGRAM")
    parser.add_argument("--rule", default="d_rtrl", help="with --replay")
    parser.add_argument("--unmarked", action="store_true", help="with --replay: plain JAX")
    parser.add_argument("--shrink", action="store_true", help="with --replay")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        with_room(lambda: work(options.seconds, options.compiled))
        return 0
    if options.replay:
        set_up()
        job = Job("", 0, options.rule, options.unmarked, options.compiled == 1)
        verdict = replay(options.replay, job, options.seconds, options.shrink)
        print(f"{verdict.kind}: {verdict.detail}")
        return int(verdict.bad)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what there is is told
    set_flag()
    rows = sweep(options)
    print(table(rows))
    bad = [r for r in rows if r["kind"] in BAD]
    set_up()
    for r in bad:
        job = job_of(r["generator"], r["seed"], options.compiled)
        program = repr(generate(r["generator"], r["seed"]))
        how = f'--rule "{job.rule}"{" --unmarked" * job.unmarked}{" --compiled 1" * job.compiled}'
        print(f"\n{r['kind']}: {r['detail']}")
        print(f'  python benchmarks/sweep.py {how} --replay "{program}"')
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
