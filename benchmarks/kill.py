"""Kill `braintrace train` at random moments and continue it: it ends where an undisturbed run does.

A run is started, killed (SIGKILL), continued with --resume and killed again until it ends; then
the next one starts with another seed. The checkpoint of each must be that of a run that was never
killed, byte for byte: weights, states, traces, optimizer, all losses and scores. Every other moment
counts from the first checkpoint of its process, since most of a short run is its start. Processes
are forks of this one, which has imported everything, and share compiled programs in a cache on
disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import optax  # noqa: F401  # what a run imports is imported once

from braintrace.lab.cli import _train, main

with contextlib.suppress(ImportError):  # then a run has no figure
    import matplotlib.figure  # noqa: F401

TASK = ["train", "adding", "--cell", "gru", "--units", "8", "--batch", "2", "--length", "16"]


class Runs:
    """Processes of one task in a folder; `kills` counts them by what they hit."""

    def __init__(self, folder: Path, updates: int, every: int):
        self.folder = folder
        self.words = [*TASK, "--updates", str(updates), "--checkpoint-every", str(every)]
        self.kills = {"before an update": 0, "in training": 0, "in a save": 0}
        self.saved = 0.0  # when the last process wrote its first file

    def start(self, seed: int, out: Path) -> int:
        """A process that starts or continues a run; returns its id."""
        if (out / _train.SETTINGS).exists():
            words = [*TASK[:2], "--resume", *self.words[-2:], "--out", str(out)]
        else:
            words = [*self.words, "--seed", str(seed), "--out", str(out)]
        child = os.fork()
        if child:
            return child
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            status = main(words)
        except SystemExit as stopped:
            print(stopped.code, file=sys.stderr)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def ended(self, seed: int, out: Path, seconds: float | None, wait: bool = False) -> bool:
        """Whether a process came to its end within `seconds`, of its training if it is to `wait`.

        Otherwise it is killed.
        """
        before = self.files(out)
        process = self.start(seed, out)
        watched = os.pidfd_open(process)
        over = lambda seconds: bool(select.select([watched], [], [], seconds)[0])
        while wait and not over(0.01) and not self.files(out) - before:
            pass
        self.saved = time.perf_counter()
        killed = not over(seconds)
        os.close(watched)
        if killed:
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        if status == 0:
            return True
        if not (killed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise SystemExit(f"a run failed:\n{(self.folder / 'log').read_text()[-3000:]}")
        new = self.files(out) - before
        saving = any(name.endswith(".tmp") for name, _ in new)
        self.kills["in a save" if saving else "in training" if new else "before an update"] += 1
        return False

    @staticmethod
    def files(out: Path) -> set[tuple[str, int]]:
        """The files of a run; one that is replaced is another."""
        found = set()
        for path in out.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                found.add((path.name, path.stat().st_mtime_ns))
        return found

    def compare(self, seed: int, longest: Sequence[float], times: int) -> Sequence[float]:
        """Kill a run until it ends or `times` is used up; compare it with an undisturbed one.

        Returns the seconds of the undisturbed one and of its training, that others' use of the
        machine is part of.
        """
        out, whole = (self.folder / f"{name}-{seed}" for name in ("killed", "whole"))
        while (count := sum(self.kills.values())) < times:
            if self.ended(seed, out, random.uniform(0, longest[count % 2]), count % 2 == 1):
                break
        else:
            assert self.ended(seed, out, None)
        started = time.perf_counter()
        assert self.ended(seed, whole, None, wait=True)
        seconds = time.perf_counter() - started, time.perf_counter() - self.saved
        names, others = ({p.name for p in folder.iterdir()} for folder in (out, whole))
        if names != others:
            raise SystemExit(f"{out} and {whole} have different files: {names ^ others}")
        for name in names - {_train.RECORD}:
            if (out / name).read_bytes() != (whole / name).read_bytes():
                raise SystemExit(f"{out / name} differs from {whole / name}")
        records = [json.loads((folder / _train.RECORD).read_text()) for folder in (out, whole)]
        for record in records:
            del record["seconds_per_update"]
        if records[0] != records[1]:
            raise SystemExit(f"the records in {out} and {whole} differ")
        return seconds


def run() -> int:
    """Print how many runs were killed where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="kills")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--every", type=int, default=3, help="updates between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the runs")
    options = parser.parse_args()
    random.seed(options.seed)
    warnings.filterwarnings("ignore", message=".*fork.*")  # there is no thread of JAX here yet
    with tempfile.TemporaryDirectory() as name:
        jax.config.update("jax_compilation_cache_dir", f"{name}/programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        runs = Runs(Path(name), options.updates, options.every)
        runs.ended(2**31, Path(name) / "first", None)  # fills the cache
        longest = runs.compare(2**31 + 1, (0, 0), 0)
        count = 0
        while sum(runs.kills.values()) < options.times:
            longest = runs.compare(1000 * options.seed + count, longest, options.times)
            count += 1
            print(f"{count} runs equal undisturbed ones; kills: {runs.kills}", flush=True)
    print(f"{sum(runs.kills.values())} kills, {count} runs: every byte equal")
    return 0


if __name__ == "__main__":
    sys.exit(run())
