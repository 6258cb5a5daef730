"""Many random programs and networks, each with a time limit: right, refused, wrong, crashed, hung.

What the interpreter calls wrong is run again by XLA; 'misread' is a fault of the interpreter.

    python benchmarks/sweep.py --count 2000 --seed 0
    BRAINTRACE_UNMARKED=1 python benchmarks/sweep.py             # programs of plain JAX, recognised
    python benchmarks/sweep.py --replay "<program>"              # one program again
    python benchmarks/sweep.py --replay "<program>" --shrink     # the smallest that fails alike

Programs run in worker processes, which are replaced when one hangs. Raw results go to
benchmarks/results/sweep.json. Exit status 1: something was wrong, misread, crashed or hung.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
BAD = ("wrong", "misread", "crashed", "hung")
KINDS = ("right", "refused", "no truth", *BAD)
TURNS = (  # which generator, one after another
    *("program", "around", "program", "network"),
    *("program", "program", "around", "program"),
    *("program", "around", "program", "network"),
    *("program", "program", "around", "chain"),
)
FRESH_AFTER = 300  # programs per worker: JAX keeps what it compiled


# ------------------------------------------------------------------------------------ in a worker


def judge_spec(spec: tuple, seconds: float, compiled: bool = False) -> Any:
    import chains
    import judge
    import layers

    try:
        run = judge.compiled if compiled else judge.interpreted
        if spec[0] == "around":
            return judge.judge_around(spec, run=run, seconds=seconds)
        if spec[0] == "chain":
            return chains.judge_chain(spec, run=run, seconds=seconds)
        if is_network(spec):
            return judge.judge_network(layers.of(spec), run=run, seconds=seconds)
        return judge.judge(spec, run=run, seconds=seconds)
    except Exception as error:  # the plain program itself: the generator's fault
        return judge.Verdict("crashed", f"generator: {judge.describe(error)}")


def is_network(spec: tuple) -> bool:
    return isinstance(spec[0][0], int)


def set_up() -> None:
    sys.path[:0] = [str(ROOT / path) for path in ("tests/fuzz", "tests", "src")]
    import brainstate
    import jax

    brainstate.environ.set(precision=64)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)


def generate(kind: str, seed: int) -> tuple:
    import around
    import chains
    import layers
    import programs

    if kind == "chain":
        return chains.random_chain(seed)
    if kind == "network":
        return layers.spec_of(layers.random_network(seed))
    if kind == "around":
        return around.random_case(seed)
    return programs.random_program(seed)


def work(seconds: float, compiled: bool) -> None:
    """Read `kind seed` lines, write JSON lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever programs print
    set_up()
    for line in sys.stdin:
        kind, seed = line.split()
        spec = generate(kind, int(seed))
        start = time.perf_counter()
        verdict = dataclasses.asdict(judge_spec(spec, seconds, compiled))
        took = round(time.perf_counter() - start, 3)
        row = {"program": repr(spec), "seconds": took, **verdict}
        print(json.dumps(row), file=answers, flush=True)


# ---------------------------------------------------------------------------------- in the parent


class Worker:
    """A process that judges one program at a time."""

    def __init__(self, seconds: float, compiled: bool):
        self.seconds, self.compiled = seconds, compiled
        self.process: subprocess.Popen | None = None
        self.done = 0

    def give(self, kind: str, seed: int) -> None:
        if self.process is None or self.done >= FRESH_AFTER:
            self.stop()
            options = ["--worker", "--seconds", str(self.seconds)]
            options += ["--compiled"] if self.compiled else []
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                [sys.executable, __file__, *options],
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self.done = 0
        self.job = (kind, seed)
        # The worker stops itself; the parent stops one that is stuck below Python.
        self.until = time.monotonic() + 2 * self.seconds + (30 if self.done == 0 else 0)
        self.done += 1
        self.process.stdin.write(f"{kind} {seed}\n")
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


def sweep(count: int, seed: int, workers: int, seconds: float, compiled: bool) -> list[dict]:
    """Judge `count` programs, of all generators in turn."""
    plain = os.environ.get("BRAINTRACE_UNMARKED") == "1"  # networks and chains have marks
    turns = [t for t in TURNS if not plain or t in ("program", "around")]
    todo = collections.deque((turns[i % len(turns)], seed + i) for i in range(count))
    rows: list[dict] = []
    pool = [Worker(seconds, compiled) for _ in range(min(workers, count))]
    busy = set()
    start = time.monotonic()
    try:
        for worker in pool:
            worker.give(*todo.popleft())
            busy.add(worker)
        while busy:
            for worker in _ready(busy):
                late = time.monotonic() > worker.until
                rows.append(worker.failed("hung", "killed") if late else worker.answer())
                _progress(rows, count, time.monotonic() - start)
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


def _ready(busy: set[Worker]) -> list[Worker]:
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while True:
            found = [key.data for key, _ in selector.select(timeout=0.5)]
            late = [w for w in busy if time.monotonic() > w.until]
            if found or late:
                return found or late


def _progress(rows: list[dict], count: int, seconds: float) -> None:
    if len(rows) % 25 and len(rows) < count and rows[-1]["kind"] not in BAD:
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
    """Counts by generator and verdict; refusals and failures by what they say."""
    lines = [f"{'':12}" + "".join(f"{k:>10}" for k in KINDS)]
    for generator in dict.fromkeys(TURNS):
        have = collections.Counter(r["kind"] for r in rows if r["generator"] == generator)
        lines.append(f"{generator:12}" + "".join(f"{have[k]:>10}" for k in KINDS))
    for kind in ("refused", *BAD):
        said = collections.Counter(_gist(r["detail"]) for r in rows if r["kind"] == kind)
        if said:
            lines += ["", f"{kind}:"]
            lines += [f"{n:6}  {text}" for text, n in said.most_common()]
    return "\n".join(lines)


def _gist(detail: str) -> str:
    """A detail without its numbers, so that like meets like."""
    return "".join("#" if c.isdigit() else c for c in detail)[:110]


def replay(text: str, seconds: float, shrinking: bool, compiled: bool) -> Any:
    import chains
    import layers
    import programs

    spec = ast.literal_eval(text)
    verdict = judge_spec(spec, seconds, compiled)
    if shrinking and verdict.bad:

        def alike(candidate: tuple) -> bool:
            found = judge_spec(candidate, seconds, compiled)
            return found.kind == verdict.kind and _gist(found.detail) == _gist(verdict.detail)

        if spec[0] == "around":
            _, kinds, inner = spec
            again = lambda inner: alike(("around", kinds, inner))
            spec = ("around", kinds, programs.shrink(inner, again))
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
    parser.add_argument("--compiled", action="store_true", help="run with XLA: slower")
    parser.add_argument("--replay", metavar="PROGRAM")
    parser.add_argument("--shrink", action="store_true", help="with --replay")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seconds, options.compiled)
        return 0
    if options.replay:
        set_up()
        verdict = replay(options.replay, options.seconds, options.shrink, options.compiled)
        print(f"{verdict.kind}: {verdict.detail}")
        return int(verdict.bad)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what there is is told
    rows = sweep(options.count, options.seed, options.workers, options.seconds, options.compiled)
    target = HERE / "results" / "sweep.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"options": vars(options), "rows": rows}, indent=1))
    print(table(rows))
    bad = [r for r in rows if r["kind"] in BAD]
    set_up()
    for r in bad:
        program = r["program"] or repr(generate(r["generator"], r["seed"]))
        print(f'\n{r["kind"]}: {r["detail"]}\n  python benchmarks/sweep.py --replay "{program}"')
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
