"""A process that prepares one gradient function and times it on demand.

Requests are JSON lines on stdin, answers JSON lines on what was stdout; whatever else is printed
goes to stderr.

    {"job": "setup", "model": "gru", "n": 32, "b": 4, "t": 16, "i": 0, "mode": "bptt", "save": "g"}
    {"job": "time"}        one warm repetition
    {"job": "roofline", "n": 32, "b": 4, "t": 16, "i": 0}
    {"job": "versions"}
    {"job": "quit"}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import brainstate
import jax
import numpy as np
from _models import Size, data, network
from _modes import Unavailable, Variant, params_of, variants
from _roofline import roofline

import braintrace

TRIALS = 3  # repetitions that choose among the variants of a mode


class Bench:
    """A network, its data, and the best variant of a mode."""

    def __init__(self, model: str, size: Size, mode: str):
        self.net, (self.xs, self.ys) = network(model, size), data(model, size)
        self.start = {p: s.value for p, s in params_of(self.net).items()}
        self.variant, self.facts = self.best(list(self.tried(mode, size)))

    def tried(self, mode: str, size: Size) -> Iterator[tuple[Variant, dict]]:
        """Variants that run, with their seconds to compile and to make the first call.

        Those of the processor, too: of all threads, whatever else the machine does.
        """
        failure, ran = None, False
        clocks = lambda: np.array([time.perf_counter(), time.process_time()])
        began = clocks()
        for variant in variants(mode, self.net, size, self.xs[0]):
            compiled = clocks()
            try:
                self.call(variant)
            except Exception as error:
                failure = error
            else:
                ran, now = True, clocks()
                (compile_s, _), (first_s, _) = compiled - began, now - compiled
                both = {"compile_s": compile_s, "first_s": first_s}
                yield variant, {**both, "cpu_s": (now - began)[1]}
            began = clocks()
        if not ran:
            raise failure

    def best(self, found: list[tuple[Variant, dict]]) -> tuple[Variant, dict]:
        if len(found) == 1:
            return found[0]
        return min(found, key=lambda v: min(self.seconds(v[0]) for _ in range(TRIALS)))

    def call(self, variant: Variant) -> Any:
        return jax.block_until_ready((variant.run(self.xs, self.ys), values(variant.owner)))

    def restore(self) -> None:
        """Weights as they were: some modes train."""
        for path, state in params_of(self.net).items():
            state.value = self.start[path]

    def seconds(self, variant: Variant) -> float:
        self.restore()
        began = time.perf_counter()
        self.call(variant)
        return time.perf_counter() - began

    def time(self) -> dict[str, Any]:
        before = reset_peak()
        seconds = self.seconds(self.variant)
        return {"seconds": seconds, "before_bytes": before, "peak_bytes": peak_bytes()}

    def describe(self, save: str | None) -> dict[str, Any]:
        self.restore()
        (grads, losses), _ = self.call(self.variant)
        if save:
            leaves = jax.tree_util.tree_flatten_with_path(grads)[0]
            np.savez(save, **{dotted(path): np.asarray(g) for path, g in leaves})
        kept = [s.value for s in states(self.variant.owner)]
        return {
            "variant": self.variant.label,
            **self.facts,
            **analysis(self.variant.run, self.xs, self.ys),
            "state_bytes": sum(a.nbytes for a in jax.tree.leaves(kept)),
            "loss": float(losses.mean()),
            "peak_bytes": peak_bytes(),
        }


def dotted(path: tuple) -> str:
    """The place of a gradient in a dict by state paths, of arrays or dicts of arrays."""
    state, *inner = (entry.key for entry in path)
    return ".".join(map(str, (*state, *inner)))


def states(owner: Any) -> list[Any]:
    """Everything that outlives a step except the parameters."""
    every = owner.states().values()
    return [s for s in every if not isinstance(s, brainstate.ParamState)]


def values(owner: Any) -> list[Any]:
    return [s.value for s in owner.states().values()]


def analysis(run: Any, xs: Any, ys: Any) -> dict[str, Any]:
    """What XLA says about the compiled function."""
    compiled = run.compile(xs, ys)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    found = {"flops": cost.get("flops") if cost else None}
    for kind in ("temp", "argument", "output"):
        found[f"{kind}_bytes"] = getattr(memory, f"{kind}_size_in_bytes", None)
    return found


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def reset_peak() -> int:
    """Forget the peak of the resident memory where that can be done; the bytes in use now."""
    if not on_cpu():
        return jax.devices()[0].memory_stats()["bytes_in_use"]
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak_bytes() -> int:
    if not on_cpu():
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return resident("VmHWM")


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def answer(request: dict[str, Any], bench: Bench | None) -> tuple[dict[str, Any], Bench | None]:
    size = Size(*(request[k] for k in "nbti")) if "n" in request else None
    match request["job"]:
        case "setup":
            bench = Bench(request["model"], size, request["mode"])
            return {**versions(), **bench.describe(request.get("save"))}, bench
        case "time":
            return bench.time(), bench
        case "roofline":
            return roofline(size), bench
        case "versions":
            return versions(), bench


def versions() -> dict[str, str]:
    device = jax.devices()[0].device_kind
    return {"jax": jax.__version__, "braintrace": braintrace.__version__, "device": device}


def judge(error: Exception) -> dict[str, str]:
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, Unavailable):
        return {"status": "unavailable", "error": str(error)}
    full = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text
    return {"status": "out of memory" if full else "refused", "error": text}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["job"] == "quit":
            return
        try:
            found, bench = answer(request, bench)
            found = {"status": "ok", **found}
        except Exception as error:
            found = judge(error)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
