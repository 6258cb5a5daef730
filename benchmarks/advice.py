"""The factors of time that `report.advice` estimates, against measured ones.

    python benchmarks/advice.py
    python benchmarks/advice.py --units 32 --batch 8 --steps 256

Each line is a rule of the advice on a model: its estimated factor relative to D-RTRL, and the
ratio of the measured times of a gradient. Exit status 1: an estimate is off by more than ten.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import braintrace as bt


def matrix(i: int, a: int, b: int) -> jax.Array:
    return jax.random.normal(jax.random.key(i), (a, b)) / a**0.5


def models(n: int) -> dict[str, tuple[Any, Any]]:
    """Steps with dense, gated, block-wise and no recurrence, and their parameters."""

    def rnn(p, h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["r"] + p["b"])
        return h, h @ p["o"]

    def gru(p, h, x):
        z = jax.nn.sigmoid(x @ p["wz"] + h @ p["rz"])
        r = jax.nn.sigmoid(x @ p["wr"] + h @ p["rr"])
        h = z * h + (1 - z) * jnp.tanh(x @ p["w"] + (r * h) @ p["r"] + p["b"])
        return h, h @ p["o"]

    def blocks(p, h, x):
        y = jnp.einsum("bki,kij->bkj", h.reshape(len(h), -1, 4), p["k"]).reshape(h.shape)
        h = jnp.tanh(x @ p["w"] + y + p["b"])
        return h, h @ p["o"]

    p = {"w": matrix(0, n, n), "b": jnp.zeros(n), "o": matrix(1, n, 4)}
    r = {"r": matrix(2, n, n)}
    gates = {k: matrix(i, n, n) for i, k in enumerate(("wz", "rz", "wr", "rr"), 3)}
    k = {"k": jax.random.normal(jax.random.key(9), (n // 4, 4, 4)) / 4}
    return {"rnn": (rnn, p | r), "gru": (gru, p | r | gates), "blocks": (blocks, p | k)}


def seconds(step: Any, rule: Any, params: Any, state: Any, xs: Any) -> float:
    """The best of a few gradients, from traces that are not zero."""
    net = bt.online(step, rule)
    gradient = jax.jit(net.grad(lambda out: jnp.sum(out**2)))
    _, (carry, _) = gradient(params, net.init(params, state, xs[0]), xs)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(gradient(params, carry, xs))
        best = min(best, time.perf_counter() - start)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("units", 32), ("batch", 8), ("steps", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    n, batch = options.units, options.batch
    state, xs = jnp.zeros((batch, n)), jnp.ones((options.steps, batch, n))
    worst = 1.0
    for name, (step, params) in models(n).items():
        net = bt.online(step)
        net.init(params, state, xs[0])
        rules = net.report.advice.rules
        unit = seconds(step, rules[0].rule, params, state, xs)
        for cost in rules[1:]:
            measured = seconds(step, cost.rule, params, state, xs) / unit
            worst = max(worst, measured / cost.time, cost.time / measured)
            print(f"{name:8} {cost.call:10} estimated {cost.time:8.1f}  measured {measured:8.1f}")
    print(f"worst ratio {worst:.1f}")
    return int(worst > 10)


if __name__ == "__main__":
    sys.exit(main())
