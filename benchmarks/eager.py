"""The time of a single call of a learner outside of `jit`, in milliseconds: median of 50."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import braintrace

UNITS, BATCH = 128, 16


def median(call: Callable[[], jax.Array]) -> float:
    """Milliseconds of one call; the first ones compile."""
    times = []
    for _ in range(55):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[5:])


def main() -> None:
    """Print one line per rule."""
    x = jnp.ones((BATCH, UNITS))
    for rule, options in {"d_rtrl": {}, "pp_prop": {"decay_or_rank": 0.9}}.items():
        cell = braintrace.nn.GRUCell(UNITS, UNITS)
        learner = braintrace.compile(cell, rule, x, batch_size=BATCH, **options)
        print(f"{rule:8} {median(lambda learner=learner: learner(x)):6.2f} ms")


if __name__ == "__main__":
    main()
