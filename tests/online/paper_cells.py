"""Steps of Mamba-2, gated DeltaNet and RWKV-7 in plain JAX, as their papers write them."""

import jax
import jax.numpy as jnp
import numpy as np

T = 8
I, H, K, V, TAPS = 3, 2, 2, 2, 2  # inputs, heads, sizes of a key and of a value, length of a filter
sigmoid, silu, softplus = jax.nn.sigmoid, jax.nn.silu, jax.nn.softplus


def inputs(batch: int) -> jax.Array:
    return jnp.asarray(1.5 * np.random.default_rng(0).normal(size=(T, batch, I)))


def drawn(shapes: dict, seed: int, scale: float = 0.7) -> dict:
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(scale * rng.normal(size=s)) for k, s in shapes.items()}


def unit(a):
    return a / jnp.sqrt(jnp.sum(a**2, -1, keepdims=True) + 1e-2)


def rms(a, gain):
    return a / jnp.sqrt(jnp.mean(a**2, -1, keepdims=True) + 1e-2) * gain


def filtered(past, new, taps):
    """A short causal convolution per channel, and the inputs that it needs next time."""
    recent = jnp.concatenate([past, new[:, None]], 1)
    return silu(jnp.sum(recent * taps, 1)), recent[:, 1:]


def mamba(batch: int) -> tuple:
    """S = exp(-dt exp(a)) S + dt u b', y = S c + d u: u, b, c through a short convolution."""
    d = H * V
    sizes = (d, d + 2 * K, H)  # gate; u, b, c; dt

    def step(p, state, x):
        z, ubc, dt = jnp.split(x @ p["in"], np.cumsum(sizes)[:-1], -1)
        ubc, past = filtered(state["past"], ubc, p["conv"])
        u, b, c = jnp.split(ubc, (d, d + K), -1)
        u = u.reshape(-1, H, V)
        dt = softplus(dt + p["dt"])
        decay = jnp.exp(-dt * jnp.exp(p["a"]))
        s = decay[..., None, None] * state["s"]
        s = s + (dt[..., None] * u)[..., None] * b[:, None, None, :]
        y = jnp.einsum("bhvk,bk->bhv", s, c) + p["d"][:, None] * u
        out = rms(y.reshape(-1, d) * silu(z), p["norm"])
        return {"past": past, "s": s}, out @ p["out"]

    shapes = {"in": (I, sum(sizes)), "conv": (TAPS, d + 2 * K), "dt": (H,), "a": (H,)}
    params = drawn({**shapes, "d": (H,), "norm": (d,), "out": (d, 2)}, 1)
    state = {"past": (batch, TAPS - 1, d + 2 * K), "s": (batch, H, V, K)}
    return step, params, drawn(state, 2), inputs(batch)


def delta_net(batch: int) -> tuple:
    """S = α S + β k (v - α S' k)', y = S' q: q, k, v through short filters, q, k normalised."""

    def step(p, state, x):
        past, heads = {}, {}
        for name in "qkv":
            y, past[name] = filtered(state[name], x @ p[name], p["conv_" + name])
            heads[name] = y.reshape(-1, H, V if name == "v" else K)
        q, k, v = unit(heads["q"]), unit(heads["k"]), heads["v"]
        rate = jnp.exp(p["a_log"]) * softplus(x @ p["a"] + p["dt"])
        s = jnp.exp(-rate)[..., None, None] * state["s"]
        read = jnp.einsum("bhkv,bhk->bhv", s, k)
        beta = sigmoid(x @ p["beta"])[..., None]
        s = s + k[..., None] * (beta * (v - read))[..., None, :]
        y = jnp.einsum("bhkv,bhk->bhv", s, q)
        y = rms(y, p["norm"]).reshape(-1, H * V) * silu(x @ p["gate"])
        return {**past, "s": s}, y @ p["out"]

    shapes = {"q": (I, H * K), "k": (I, H * K), "v": (I, H * V)}
    shapes |= {f"conv_{n}": (TAPS, s[1]) for n, s in shapes.items()}
    shapes |= {"a": (I, H), "a_log": (H,), "dt": (H,), "beta": (I, H)}
    shapes |= {"norm": (V,), "gate": (I, H * V), "out": (H * V, 2)}
    state = {n: (batch, TAPS - 1, shapes[n][1]) for n in "qkv"} | {"s": (batch, H, K, V)}
    return step, drawn(shapes, 3), drawn(state, 4), inputs(batch)


def rwkv(batch: int) -> tuple:
    """S = S (diag(w) - κ (a κ)') + v k', y = S r: each input mixed with the one before it."""
    n = H * K

    def step(p, state, x):
        mixed = {m: x + (state["last"] - x) * p["mix_" + m] for m in "rwkvag"}
        r, k, v = ((mixed[m] @ p[m]).reshape(-1, H, K) for m in "rkv")
        w = p["w0"] + jnp.tanh(mixed["w"] @ p["w1"]) @ p["w2"]
        w = jnp.exp(-0.6 * sigmoid(w)).reshape(-1, H, K)
        a = sigmoid(p["a0"] + mixed["a"] @ p["a1"] @ p["a2"]).reshape(-1, H, K)
        gate = sigmoid(mixed["g"] @ p["g1"]) @ p["g2"]
        kappa = unit(k * p["k_k"])
        k = k * (1 + (a - 1) * p["k_a"])
        removed = jnp.einsum("bhvk,bhk->bhv", state["s"], kappa)
        s = state["s"] * w[:, :, None, :] - removed[..., None] * (a * kappa)[:, :, None, :]
        s = s + v[..., None] * k[:, :, None, :]
        y = rms(jnp.einsum("bhvk,bhk->bhv", s, r), p["norm"])
        y = y + jnp.sum(r * k * p["r_k"], -1, keepdims=True) * v
        return {"last": x, "s": s}, (y.reshape(-1, n) * gate) @ p["out"]

    shapes = {f"mix_{m}": (I,) for m in "rwkvag"} | {m: (I, n) for m in "rkv"}
    shapes |= {"w0": (n,), "w1": (I, 2), "w2": (2, n), "a0": (n,), "a1": (I, 2), "a2": (2, n)}
    shapes |= {"g1": (I, 2), "g2": (2, n), "k_k": (H, K), "k_a": (H, K), "r_k": (H, K)}
    shapes |= {"norm": (K,), "out": (n, 2)}
    state = {"last": (batch, I), "s": (batch, H, K, K)}
    return step, drawn(shapes, 5), drawn(state, 6), inputs(batch)


CELLS = {"Mamba-2": mamba, "gated DeltaNet": delta_net, "RWKV-7": rwkv}
