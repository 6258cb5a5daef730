"""What a choice reaches on deep stacks, against D-RTRL for all parameters.

    python benchmarks/depth.py 2 4 --kinds lru gru

Stacks of LRU, minGRU, Mamba-2 (a decay per channel) and GRU layers; the loss is to repeat the input
of 20 steps ago. Prints the cosine to BPTT of D-RTRL, that of what `braintrace.choose` takes within
the memory of D-RTRL and three times BPTT's time, and what that is. Weights are those of the start,
inputs are noise.
"""

import argparse
import time

import jax
import jax.numpy as jnp

import braintrace as bt
from braintrace._online._assignment import Limits, best
from braintrace._online._choose import label


def drawn(key, *shape):
    return jax.random.normal(key, shape) / shape[0] ** 0.5


def lru(p, h, x):
    """A complex linear recurrence, in real and imaginary parts."""
    decay = jnp.exp(-jnp.exp(p["rate"]) + 1j * p["phase"])
    new = decay * jax.lax.complex(h[0], h[1]) + (x @ p["in"] + 1j * (x @ p["im"]))
    return jnp.stack([new.real, new.imag]), jnp.tanh(new.real @ p["out"]) + x


def mingru(p, h, x):
    z = jax.nn.sigmoid(x @ p["z"])
    h = (1 - z) * h + z * (x @ p["h"])
    return h, h


def mamba(p, h, x):
    """A decay per head that the input gates, one state per channel."""
    decay = jnp.exp(-jax.nn.softplus(x @ p["dt"] + p["bias"]))
    h = decay * h + (1 - decay) * (x @ p["in"])
    return h, h * jax.nn.silu(x @ p["gate"]) + x


def gru(p, h, x):
    xh = jnp.concatenate([x, h], -1)
    z, r = jax.nn.sigmoid(xh @ p["z"]), jax.nn.sigmoid(xh @ p["r"])
    h = (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h], -1) @ p["h"])
    return h, h


def layer(kind, key, n):
    k = jax.random.split(key, 4)
    if kind is lru:
        rate = jnp.log(-jnp.log(jax.random.uniform(k[0], (n,), minval=0.8, maxval=0.99)))
        phase = jax.random.uniform(k[1], (n,), maxval=3.0)
        square = {
            name: drawn(key, n, n) for name, key in zip(("in", "im", "out"), k[1:], strict=True)
        }
        return {"rate": rate, "phase": phase, **square}
    if kind is gru:
        return {name: drawn(key, 2 * n, n) for name, key in zip("zrh", k, strict=False)}
    if kind is mingru:
        return {"z": drawn(k[0], n, n), "h": drawn(k[1], n, n)}
    square = {name: drawn(key, n, n) for name, key in zip(("dt", "in", "gate"), k, strict=False)}
    return {**square, "bias": -2.0 * jnp.ones(n)}


def stack(kind, layers, n, batch):
    keys = jax.random.split(jax.random.key(layers), layers + 2)
    params = {f"layer{i}": layer(kind, keys[i], n) for i in range(layers)}
    params |= {"enter": drawn(keys[-2], 4, n), "leave": drawn(keys[-1], n, 4)}

    def step(p, state, x):
        new, x = [], x @ p["enter"]
        for i, h in enumerate(state):
            h, x = kind(p[f"layer{i}"], h, x)
            new.append(h)
        return tuple(new), x @ p["leave"]

    shape = (2, batch, n) if kind is lru else (batch, n)
    return step, params, tuple(jnp.zeros(shape) for _ in range(layers))


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("layers", nargs="*", type=int, default=[2, 3, 4, 6])
    parse.add_argument("--units", type=int, default=32)
    parse.add_argument("--length", type=int, default=64)
    parse.add_argument("--kinds", nargs="+", default=["lru", "mingru", "mamba", "gru"])
    options = parse.parse_args()
    batch, length = 8, options.length
    loss = lambda out, y: jnp.mean((out - y) ** 2)
    xs = jax.random.normal(jax.random.key(0), (length, batch, 4))
    ys = jnp.roll(xs, 20, 0)
    print(f"{'stack':12} {'d_rtrl':>8} {'choice':>8}  bytes of both; what; seconds")
    for name in options.kinds:
        kind = {"lru": lru, "mingru": mingru, "mamba": mamba, "gru": gru}[name]
        for layers in options.layers:
            problem = (*stack(kind, layers, options.units, batch), xs, ys, loss)
            started = time.perf_counter()
            choice = bt.choose(*problem, memory=None, time=3.0)
            single = next(t for t in choice.tried if t.uniform == ("d_rtrl", ()))
            within = best(choice.tried, Limits(single.bytes, 3.0)) or single
            rules = dict.fromkeys(map(label, within.rule.values()))
            took = time.perf_counter() - started
            print(
                f"{name:>7} x {layers}  {single.cosine:8.4f} {within.cosine:8.4f}  "
                f"{single.bytes:>9,} {within.bytes:>9,}  {' + '.join(rules)}  {took:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
