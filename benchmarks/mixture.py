"""The cost of a mixture, against its dearest member and the sum of both.

    python benchmarks/mixture.py

A minGRU under a GRU (dense), 128 units, 16 samples, 128 steps. Times are medians of runs in turns.
"""

import time

import jax
import jax.numpy as jnp

import braintrace as bt

N, B, T, I = 128, 16, 128, 32


def drawn(key, *shape):
    return jax.random.normal(key, shape) / shape[0] ** 0.5


def step(p, state, x):
    a, g = state
    z = jax.nn.sigmoid(x @ p["a"]["z"])
    a = (1 - z) * a + z * (x @ p["a"]["h"])
    xh = jnp.concatenate([a, g], -1)
    z, r = jax.nn.sigmoid(xh @ p["g"]["z"]), jax.nn.sigmoid(xh @ p["g"]["r"])
    g = (1 - z) * g + z * jnp.tanh(jnp.concatenate([a, r * g], -1) @ p["g"]["h"])
    return (a, g), g @ p["o"]


def main():
    k = jax.random.split(jax.random.key(0), 8)
    first = {"z": drawn(k[0], I, N), "h": drawn(k[1], I, N)}
    second = {name: drawn(key, 2 * N, N) for name, key in zip("zrh", k[2:5], strict=True)}
    params = {"a": first, "g": second, "o": drawn(k[5], N, 10)}
    state = (jnp.zeros((B, N)),) * 2
    xs, ys = jax.random.normal(k[6], (T, B, I)), jax.random.normal(k[7], (T, B, 10))
    loss = lambda out, y: jnp.mean((out - y) ** 2)

    def bptt(p):
        def body(s, slices):
            s, out = step(p, s, slices[0])
            return s, loss(out, slices[1])

        return jax.lax.scan(body, state, (xs, ys))[1].sum()

    def learner(rule, **options):
        net = bt.online(step, rule, **options)
        carry, f = net.init(params, state, xs[0]), net.grad(loss, keep_traces=False)
        return lambda p: f(p, carry, xs, ys)[0]

    window = ("d_rtrl", {"window": 8})
    runs = {
        "bptt": jax.grad(bptt),
        "d_rtrl": learner("d_rtrl"),
        "windows of 8": learner("d_rtrl", window=8),
        "mixture of both": learner({"a": "d_rtrl", "*": window}),
    }
    programs = {name: jax.jit(f) for name, f in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for f in programs.values():
        jax.block_until_ready(f(params))
    for _ in range(7):
        for name, f in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(f(params))
            times[name].append(time.perf_counter() - started)
    for name, each in times.items():
        print(
            f"{name:20} {sorted(each)[len(each) // 2] * 1e3:7.1f} ms, least {min(each) * 1e3:7.1f}"
        )


if __name__ == "__main__":
    main()
