"""Small networks as plain functions: `NETWORKS[name](dtype)` is (step, params, state)."""

import jax
import jax.numpy as jnp
import numpy as np

I, N, O = 3, 6, 2


def drawn(dtype, seed, **shapes):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s) * 0.5, dtype) for k, s in shapes.items()}


@jax.custom_jvp
def fires(v):
    return (v > 0).astype(v.dtype)


@fires.defjvp
def _(primals, tangents):
    (v,), (dv,) = primals, tangents
    return fires(v), dv * jnp.maximum(0.0, 1 - jnp.abs(v)) * jnp.asarray(0.3, v.dtype)


def lif(dtype):
    def step(p, state, x):
        v, z = state
        v = 0.9 * v * (1 - z) + x @ p["w"] + z @ p["u"]
        z = fires(v - 0.5)
        return (v, z), z @ p["o"]

    params = drawn(dtype, 0, w=(I, N), u=(N, N), o=(N, O))
    return step, params, (jnp.zeros(N, dtype), jnp.zeros(N, dtype))


def mingru(dtype):
    def step(p, h, x):
        z = jax.nn.sigmoid(x @ p["z"] + p["b"])
        h = (1 - z) * h + z * (x @ p["w"])
        return h, h @ p["o"]

    params = drawn(dtype, 1, z=(I, N), w=(I, N), b=(N,), o=(N, O))
    return step, params, jnp.zeros(N, dtype)


def rtu(dtype):
    def step(p, state, x):
        a, b = state
        r = jnp.exp(-jnp.exp(p["nu"]))
        c, d, n = r * jnp.cos(p["th"]), r * jnp.sin(p["th"]), jnp.sqrt(1 - r * r)
        a, b = c * a - d * b + n * (x @ p["w"]), d * a + c * b + n * (x @ p["u"])
        return (a, b), jnp.tanh(jnp.concatenate([a, b])) @ p["o"]

    params = drawn(dtype, 2, nu=(N,), th=(N,), w=(I, N), u=(I, N), o=(2 * N, O))
    return step, params, (jnp.zeros(N, dtype), jnp.zeros(N, dtype))


def batched(dtype):
    """Two samples: gradients are sums over them."""

    def step(p, h, x):
        h = jnp.tanh(0.9 * h + x @ p["w"] + h @ p["u"])
        return h, h @ p["o"]

    return step, drawn(dtype, 3, w=(I, N), u=(N, N), o=(N, O)), jnp.zeros((2, N), dtype)


def noisy(dtype):
    """Weights that drop out and noise on the state, from a key that is part of the state."""

    def step(p, state, x):
        h, key = state
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.8, (N,))
        noise = jax.random.normal(jax.random.fold_in(now, 1), (N,), dtype)
        h = jnp.tanh(0.9 * h + kept * (x @ p["w"]) / 0.8 + h @ p["u"] + 0.1 * noise)
        return (h, key), h @ p["o"]

    params = drawn(dtype, 4, w=(I, N), u=(N, N), o=(N, O))
    return step, params, (jnp.zeros(N, dtype), jax.random.key(5))


NETWORKS = {"lif": lif, "mingru": mingru, "rtu": rtu, "batched": batched, "noisy": noisy}
# Rules with traces that become C, and their options.
RULES = {
    "d_rtrl": {},
    "pp_prop": {"decay_or_rank": 0.9},
    "eprop": {},
    "ottt": {"leak": 0.9},
    "otpe": {"leak": 0.9},
    "rflo": {},
    "three_factor": {},
    "no_trace": {},
    "snap": {"n": 1},
}
DRAWING = {"uoro": {"projection_key": jax.random.key(3)}, "kf_rtrl": {"key": jax.random.key(3)}}


def stream(dtype, name, steps):
    rng = np.random.default_rng(7)
    lead = (steps, 2) if name == "batched" else (steps,)
    xs = rng.normal(size=(*lead, I)).astype(dtype)
    ys = rng.normal(size=(*lead, O)).astype(dtype)
    return xs, ys


def loss(out, y):
    return jnp.mean((out - y) ** 2)
