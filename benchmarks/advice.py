"""The factors of time that `report.advice` estimates, against measured ones.

    python benchmarks/advice.py
    python benchmarks/advice.py --only gru --steps 256

Each line is a rule of the advice on a model: its estimated factor relative to D-RTRL, and the
ratio of the measured times of a gradient (processor time, the least of a few). Exit status 1: fewer
than nine of ten estimates are within a factor of three.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import _cells as cells
import jax
import jax.numpy as jnp
import numpy as np

import braintrace as bt

MOST = 3000.0  # an estimate above this is not measured: it would take minutes


def blocks(i: int, n: int, b: int) -> cells.Cell:
    """Units that meet in groups of four."""

    def step(p: Any, h: Any, x: Any) -> tuple[Any, Any]:
        y = jnp.einsum("bki,kij->bkj", h.reshape(b, -1, 4), p["k"]).reshape(h.shape)
        h = jnp.tanh(x @ p["w"] + y + p["b"])
        return h, h

    return step, cells.drawn(w=(i, n), k=(n // 4, 4, 4), b=(n,)), jnp.zeros((b, n))


CELLS = {
    "rnn": cells.simple,
    "gru": cells.gru,
    "gru_apart": cells.gru_apart,
    "lstm": cells.lstm,
    "alif": cells.alif,
    "lru": cells.lru,
    "mingru": cells.mingru,
    "coupled": cells.coupled,
    "blocks": blocks,
    "minGRU, GRU": cells.chained(cells.mingru, cells.gru),
}
SIZES = ((16, 4), (32, 8))  # units and samples


def seconds(step: Any, rule: Any, params: Any, state: Any, xs: Any) -> float:
    """The least time of a few gradients, from traces that are not zero."""
    net = bt.online(step, rule)
    gradient = jax.jit(net.grad(lambda out: jnp.sum(out**2)))
    _, (carry, _) = gradient(params, net.init(params, state, xs[0]), xs)
    best = float("inf")
    for _ in range(4):
        start = time.process_time()
        jax.block_until_ready(gradient(params, carry, xs))
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return best


def factors(only: str, steps: int) -> Iterator[tuple[str, str, float, float]]:
    """Model, rule, and its estimated and measured factors."""
    for n, b in SIZES:
        for name, make in CELLS.items():
            if not re.search(only, name):
                continue
            step, params, state = partial(cells.with_readout, outputs=4)(make)(n, n, b)
            draw = np.random.default_rng(0).normal(size=(steps, b, n))
            xs = jnp.asarray(draw.astype(np.float32))
            net = bt.online(step)
            net.init(params, state, xs[0])
            own, *rules = net.report.advice.rules
            unit = seconds(step, own.rule, params, state, xs)
            for cost in rules:
                if cost.exact is not None and cost.time <= MOST:
                    found = seconds(step, cost.rule, params, state, xs)
                    yield f"{name} {n}", cost.call, cost.time, found / unit
            jax.clear_caches()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", default="", help="a regular expression")
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    offs = []
    for name, call, estimated, measured in factors(options.only, options.steps):
        offs.append(math.exp(abs(math.log(estimated / measured))))
        print(
            f"{name:15} {call:10} estimated {estimated:8.1f}  measured {measured:8.1f}", flush=True
        )
    near = sum(off <= 3 for off in offs)
    print(f"{near} of {len(offs)} within a factor of three, worst {max(offs):.1f}")
    return int(10 * near < 9 * len(offs))


if __name__ == "__main__":
    sys.exit(main())
