"""A million steps of `etrace_train` in one process: memory, programs and speed stay as they are.

Every call is written as a user would: a new lambda, new inputs, results read. What is measured at
the end of a call is compared between the first tenth of the calls, without those that warm up, and
the last one. Others may use the machine meanwhile: seconds are also compared with those of a fixed
loop that runs beside every call.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of JAX
WARM_UP = 3  # calls
PAGE = os.sysconf("SC_PAGE_SIZE")
MORE_RSS = 4 * 2**20  # bytes that the allocator may take from the system and keep
SLOWER = 0.03


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process holds after a call, and what the call took."""

    rss: int
    arrays: int
    array_bytes: int
    compilations: int
    seconds: float  # of the clock
    cpu: float  # seconds of all threads of this process
    relative: float  # to those of the fixed loop


@jax.jit
def fixed(h: jax.Array) -> jax.Array:
    """About as much work as a call, and of the same kind."""
    step = lambda h, _: (jnp.tanh(h @ weights) + h * 0.5, None)
    weights = jnp.eye(h.size) * 0.1
    return jax.lax.scan(step, h, length=400_000)[0]


def timed(run: Callable[[], jax.Array]) -> tuple[float, float]:
    """Seconds of the clock and of this process, until the result is there."""
    started, cpu = time.perf_counter(), time.process_time()
    assert bool(jnp.isfinite(run()).all())
    return time.perf_counter() - started, time.process_time() - cpu


def sampled(steps: int, per_call: int, units: int, rule: str) -> list[Sample]:
    """Train a GRU on random targets; one sample per call."""
    compilations = 0

    def count(event: str, duration: float, **_: object) -> None:
        nonlocal compilations
        compilations += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(count)
    brainstate.random.seed(0)
    learner = braintrace.compile(braintrace.nn.GRUCell(8, units), rule, np.zeros(8, "f"))
    optimizer, rng, samples = optax.adam(1e-4), np.random.default_rng(0), []
    for call in range(steps // per_call):
        xs = rng.normal(size=(per_call, 8)).astype("f")
        ys = rng.normal(size=(per_call, units)).astype("f")
        train = lambda xs=xs, ys=ys: learner.etrace_train(
            xs, ys, step_fn=lambda x, y: ((learner(x) - y) ** 2).mean(), optimizer=optimizer
        )
        (seconds, cpu), (_, beside) = timed(train), timed(lambda: fixed(jnp.ones(units)))
        gc.collect()  # what is not garbage is compared
        sizes = [a.nbytes for a in jax.live_arrays()]  # no name holds the arrays themselves
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        samples.append(
            Sample(rss, len(sizes), sum(sizes), compilations, seconds, cpu, cpu / beside)
        )
        if call % 50 == 0:
            print(f"{call * per_call:>9,} steps  {samples[-1]}", flush=True)
    return samples


def main() -> int:
    """Print the comparison; the exit status is 1 if anything grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--per-call", type=int, default=2_000)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--rule", default="d_rtrl")
    options = parser.parse_args()
    samples = sampled(options.steps, options.per_call, options.units, options.rule)
    tenth = len(samples) // 10
    first, last = samples[WARM_UP : WARM_UP + tenth], samples[-tenth:]
    median = lambda part, name: statistics.median(getattr(s, name) for s in part)
    wrong = []
    for name, more in (
        ("rss", MORE_RSS),
        ("arrays", 0),
        ("array_bytes", 0),
        ("compilations", 0),
        ("seconds", math.inf),
        ("cpu", math.inf),
        ("relative", SLOWER * median(first, "relative")),
    ):
        a, b = median(first, name), median(last, name)
        wrong += [name] if b > a + more else []
        print(f"{name:12} {a:16,.6g} -> {b:16,.6g}  {b / a - 1:+.2%}")
    steps = options.per_call / median(samples[WARM_UP:], "seconds")
    print(
        f"{steps:,.0f} steps per second; " + (f"more {', '.join(wrong)}" if wrong else "no growth")
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
