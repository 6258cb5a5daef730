"""A recognised GRU in plain JAX against its twin with operators: time, trace bytes, gradients.

    python benchmarks/unmarked.py                       # sizes for a CPU
    python benchmarks/unmarked.py --n 1024 --b 64 --t 256

Both are timed in turn, in one process; the first call is reported apart. Raw times go to
benchmarks/results/unmarked.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp

import braintrace

RESULTS = Path(__file__).parent / "results"


def gru(matmul):
    """A GRU cell; `matmul(x, w, b)` is an operator, or plain."""

    def step(p, h, x):
        both = jnp.concatenate([x, h], -1)
        z = jax.nn.sigmoid(matmul(both, p["wz"], p["bz"]))
        r = jax.nn.sigmoid(matmul(both, p["wr"], p["br"]))
        new = jnp.tanh(matmul(jnp.concatenate([x, r * h], -1), p["wh"], p["bh"]))
        h = (1 - z) * h + z * new
        return h, h

    return step


def params(n_in: int, n: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    shape = (n_in + n, n)
    weights = {
        f"w{k}": jax.random.normal(key, shape) / n**0.5 for k, key in zip("zrh", keys, strict=True)
    }
    return weights | {f"b{k}": jnp.zeros(n) for k in "zrh"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("n", 128), ("b", 16), ("t", 256), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    xs = jax.random.normal(jax.random.PRNGKey(1), (o.t, o.b, o.n))
    p, zeros = params(o.n, o.n), jnp.zeros((o.b, o.n))
    steps = {"marked": gru(braintrace.matmul), "plain": gru(lambda x, w, b: x @ w + b)}
    calls, grads, first, times = {}, {}, {}, {name: [] for name in steps}
    bytes_of = {}
    for name, step in steps.items():
        net = braintrace.online(step, "d_rtrl", marked_only=name == "marked")
        start = time.perf_counter()
        carry = net.init(p, zeros, xs[0])
        run = jax.jit(net.grad(lambda out: jnp.mean(out**2)))
        grads[name] = jax.block_until_ready(run(p, carry, xs))[0]
        first[name] = time.perf_counter() - start
        bytes_of[name] = net.memory
        calls[name] = lambda run=run, carry=carry: run(p, carry, xs)
    for _ in range(o.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    scale = max(float(jnp.abs(g).max()) for g in grads["marked"].values())
    pairs = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), *grads.values())
    error = max(pairs.values()) / scale
    print(f"GRU N={o.n} B={o.b} T={o.t}, {jax.devices()[0].device_kind}, {o.rounds} rounds")
    print(f"{'':8}{'median s':>12}{'/ marked':>10}{'first s':>10}{'trace bytes':>14}")
    for name in steps:
        now, base = median(times[name]), median(times["marked"])
        row = f"{now:12.5f}{now / base:10.3f}{first[name]:10.2f}{bytes_of[name]:14,}"
        print(f"{name:8}{row}")
    print(f"largest difference of gradients, relative: {error:.1e}")
    RESULTS.mkdir(exist_ok=True)
    found = {"sizes": vars(o), "times": times, "first": first, "bytes": bytes_of, "error": error}
    (RESULTS / "unmarked.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
