"""Worker processes of both packages: starting them, asking them, giving up on them."""

from __future__ import annotations

import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEER = HERE / ".peer"
PEER_VERSION = "0.2.6"


@dataclass(frozen=True, slots=True)
class Side:
    """Where a package lives: an interpreter, and a PYTHONPATH."""

    python: str
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Side:
        return cls(**dict(part.split("=", 1) for part in text.split(",")))


def sides(ours: str | None, peer: str | None) -> dict[str, Callable[[], Side]]:
    """Where each kind of mode runs; the published package is installed when first asked for."""
    own = Side.parse(ours) if ours else Side(sys.executable, str(HERE.parent / "src"))
    other = (lambda: Side.parse(peer)) if peer else find_peer
    return {"ours": lambda: own, "bptt": lambda: own, "forward": lambda: own, "peer": other}


def find_peer() -> Side:
    """The published package: $BRAINTRACE_PEER_PYTHON, or an environment made for it."""
    if given := os.environ.get("BRAINTRACE_PEER_PYTHON"):
        return Side(given)
    python = PEER / "bin" / "python"
    if not python.exists():
        from importlib.metadata import version

        same = [f"{name}=={version(name)}" for name in ("jax", "jaxlib", "brainstate")]
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        wanted = [f"braintrace=={PEER_VERSION}", "brainevent", *same]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
    return Side(str(python))


class Worker:
    """One process for one mode. After a failure it is dead and its answers say why."""

    def __init__(self, side: Side, device: str, log: Path, limit: float):
        environment = os.environ | {
            "PYTHONPATH": side.path,  # not ours on the side of the published package
            "JAX_PLATFORMS": {"cpu": "cpu", "gpu": "cuda"}[device],
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self.limit, self.used, self.failure = limit, 0.0, {}
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [side.python, str(HERE / "_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request, if it comes before the time of this worker is used up."""
        began = time.perf_counter()
        if self.failure or self.process.poll() is not None:
            return dict(self.failure) or self.died()
        print(json.dumps(request), file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], self.limit - self.used)
        self.used += time.perf_counter() - began
        if not ready:
            self.stop()
            self.failure = {"status": "over the limit", "error": f"more than {self.limit:g} s"}
            return dict(self.failure)
        line = self.process.stdout.readline()
        return json.loads(line) if line else self.died()

    def start(self) -> None:
        """Wait until the process answers; its imports do not count."""
        self.ask(job="versions")
        self.used = 0.0

    def died(self) -> dict[str, Any]:
        return {"status": "died", "error": f"exit status {self.process.wait()}"}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@dataclass(frozen=True, slots=True)
class Workload:
    """A model at one size."""

    model: str
    n: int
    b: int
    t: int
    i: int = 0  # inputs, if not a quarter as many as units

    def __str__(self) -> str:
        inputs = f" I={self.i}" if self.i else ""
        return f"{self.model} N={self.n} B={self.b} T={self.t}{inputs}"

    def request(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Row:
    """What was measured of one mode on one workload."""

    workload: Workload
    mode: str
    status: str = "ok"
    error: str = ""
    setup: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    gradient: str = ""  # a file, removed at the end
    differs: dict[str, float] = field(default_factory=dict)
    reference: str = ""

    @classmethod
    def load(cls, stored: dict[str, Any]) -> Row:
        return cls(**stored | {"workload": Workload(**stored["workload"])})

    def take(self, answer: dict[str, Any]) -> bool:
        """Note an answer's status; whether it is fine."""
        self.status, self.error = answer.pop("status"), answer.pop("error", "")
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class Runner:
    """How workloads are measured: where, how often, and for how long at most."""

    sides: dict[str, Callable[[], Side]]
    device: str
    rounds: int
    limit: float
    out: Path

    def worker(self, mode: str) -> Worker:
        side = self.sides[mode.split(":")[0]]()
        return Worker(side, self.device, self.out / "workers.log", self.limit)

    def prepare(self, workload: Workload, mode: str, worker: Worker) -> Row:
        row = Row(workload, mode)
        name = f"{workload}-{mode}".replace(" ", "_").replace(":", "_")
        row.gradient = str(self.out / "gradients" / f"{name}.npz")
        answer = worker.ask(job="setup", mode=mode, save=row.gradient, **workload.request())
        if row.take(answer):
            row.setup = answer
        return row

    def measure(self, workload: Workload, modes: list[str]) -> list[Row]:
        """Round after round, one repetition of every mode; the first round warms up."""
        workers = [self.worker(mode) for mode in modes]
        try:
            for worker in workers:  # all of them have started before one is measured
                worker.start()
            pairs = [
                (self.prepare(workload, mode, worker), worker)
                for mode, worker in zip(modes, workers, strict=True)
            ]
            for turn in range(self.rounds + 1):
                for row, worker in pairs:
                    if row.status == "ok" and row.take(answer := worker.ask(job="time")) and turn:
                        row.seconds.append(answer["seconds"])
                        row.peaks.append(answer["peak_bytes"])
                        row.before.append(answer["before_bytes"])
        finally:
            for worker in workers:
                worker.stop()
        return [row for row, _ in pairs]

    def fresh(self, workload: Workload, modes: list[str]) -> list[Row]:
        """Only the setup, in a new process every time; one row per round and mode."""
        rows = []
        for _ in range(self.rounds):
            for mode in modes:
                worker = self.worker(mode)
                try:
                    worker.start()
                    rows.append(self.prepare(workload, mode, worker))
                finally:
                    worker.stop()
        return rows


def machine() -> dict[str, Any]:
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "name": platform.node(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "load": os.getloadavg(),
    }
