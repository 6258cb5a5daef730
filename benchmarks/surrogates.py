"""How much of what D-RTRL drops in a stack a cheap stand-in would carry.

    python benchmarks/surrogates.py

In a stack of element-wise layers D-RTRL drops what a weight of layer m does to the states of a
later layer l, P[k, ij] = d h_l[k] / d w_m[ij]: one number per weight and unit. With the trace
eps[ij] of the weight, D the derivative of a state by itself one step before, M what a change of a
unit of layer m does to layer l within a step,

    P = D P + M eps            lam: the derivative of the loss of a step by the new states
    gradient of the step = sum lam_m eps + sum lam_l D P

Stand-ins, each of at most the size of the traces again for every later layer:

    mean        P[k, ij] = M[k, j] q[ij], where q decays by the mean of D over what j feeds
    mean, past  the same with the mean of M over the steps so far
    largest     the one unit k that unit j feeds most
    kronecker   P = B[k, j] a[i], the best of this form after every step (two layers)
    filter 0.8  as mean, of the next layer alone, where q decays by a number

Printed are cosines to BPTT in float64; `exact` is the sum above, which is BPTT's gradient.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp

N, B, T, I, SHIFT = 16, 4, 64, 4, 20


def drawn(key, *shape):
    return jax.random.normal(key, shape) / shape[0] ** 0.5


# A layer: the state after a step, of what its weights compute; and what the next layer reads.


def lru(p, ys, h):
    radius = jnp.exp(-jnp.exp(p["rate"]))
    decay = radius * jnp.exp(1j * p["phase"])
    return decay * h + jnp.sqrt(1 - radius**2) * (ys["in"] + 1j * ys["im"])


def lru_out(p, r, u):
    return jnp.tanh(r @ p["out"]) + u


def mingru(p, ys, h):
    z = jax.nn.sigmoid(ys["z"] + p["bias"])
    return (1 - z) * h + z * ys["h"]


def mamba(p, ys, h):
    decay = jnp.exp(-jax.nn.softplus(ys["dt"] + p["bias"]))
    return decay * h + (1 - decay) * ys["in"]


def mamba_out(p, r, u):
    return r * jax.nn.silu(u @ p["gate"]) + u


CELLS = {
    "lru": (lru, lru_out, ("in", "im"), ("out",)),
    "mingru": (mingru, lambda p, r, u: r, ("z", "h"), ()),
    "mamba": (mamba, mamba_out, ("dt", "in"), ("gate",)),
}


def stack(kind, layers, seed):
    keys = iter(jax.random.split(jax.random.key(seed), 8 * layers + 2))
    _, _, names, more = CELLS[kind]
    params = []
    for _ in range(layers):
        p = {name: drawn(next(keys), N, N) for name in (*names, *more)}
        times = jnp.exp(jax.random.uniform(next(keys), (N,), maxval=jnp.log(float(T)))) + 1
        if kind == "lru":
            p |= {"rate": -jnp.log(times), "phase": jax.random.uniform(next(keys), (N,))}
        else:
            p["bias"] = -jnp.log(times)
        params.append(p)
    return params, drawn(next(keys), I, N), drawn(next(keys), N, I)


def layer(kind, p, u, h):
    cell, _, names, _ = CELLS[kind]
    return cell(p, {name: u @ p[name] for name in names}, h)


def above(kind, params, leave, u, before, target, first, changes):
    """The new states from layer `first` on, whose `changes` are added to them, and the loss."""
    new = []
    for p, h, change in zip(params[first:], before[first:], changes, strict=True):
        h = layer(kind, p, u, h) + change
        new.append(h)
        u = CELLS[kind][1](p, h.real, u)
    return new, ((u @ leave - target) ** 2).mean()


def one_step(kind, params, enter, leave, x, before, target):
    """Of a step of one sample: inputs of layers, D, f by weight, lam, and M by pairs of layers."""
    u, inputs, new = x @ enter, [], []
    decays, tails = [], []
    cell, out, names, _ = CELLS[kind]
    for p, h in zip(params, before, strict=True):
        inputs.append(u)
        ys = {name: u @ p[name] for name in names}
        ones = jnp.ones_like(h)
        decays.append(jax.jvp(lambda h, p=p, ys=ys: cell(p, ys, h), (h,), (ones,))[1])
        of = lambda name, p=p, ys=ys, h=h: jax.jvp(
            lambda y: cell(p, {**ys, name: y}, h), (ys[name],), (jnp.ones(N),)
        )[1]
        tails.append({name: of(name) for name in names})
        new.append(cell(p, ys, h))
        u = out(p, new[-1].real, u)
    zeros = [jnp.zeros_like(h) for h in before]
    rest = (kind, params, leave, inputs[0], before, target, 0)
    lam = jax.grad(lambda changes: above(*rest, changes)[1])(zeros)
    jacobians = {}
    for m in range(len(params)):
        changed = lambda r, m=m: above(*rest, [*zeros[:m], r + zeros[m], *zeros[m + 1 :]])[0]
        found = jax.jacfwd(changed)(jnp.zeros(N))
        jacobians |= {(k, m): found[k] for k in range(m + 1, len(params))}
    return new, (inputs, decays, tails, lam, jacobians)


def weighted_mean(jacobian, decay):
    """The mean of the decays of the units that each unit feeds."""
    weights = jnp.abs(jacobian) ** 2
    return (weights * decay[:, None]).sum(0) / weights.sum(0)


def best_product(p):
    """The best B[k, j] a[i] in place of P[k, i, j]."""
    k, i, j = p.shape
    flat = p.transpose(0, 2, 1).reshape(k * j, i)
    left, size, right = jnp.linalg.svd(flat, full_matrices=False)
    return (size[0] * jnp.outer(left[:, 0], right[0])).reshape(k, j, i).transpose(0, 2, 1)


def gradients(kind, how, params, m, name, first, steps):
    """The gradient of a weight of layer m, of one sample, from what `one_step` found."""
    later = range(m + 1, len(params))
    dtype = first[0].dtype

    def body(carry, step):
        eps, P, q, past, count, total = carry
        inputs, decays, tails, lam, M = step
        eps = decays[m] * eps + tails[m][name] * inputs[m][:, None]
        total = total + (lam[m] * eps).real
        count = count + 1
        past = {k: past[k] + (M[k, m] - past[k]) / count for k in later}
        if how == "d_rtrl":
            return (eps, P, q, past, count, total), None
        if how.startswith("filter"):
            if m + 1 < len(params):
                k, decay = m + 1, float(how.split()[1])
                total = total + (lam[k] @ M[k, m] * decay * q[k]).real
                q = {**q, k: decay * q[k] + eps.real}
            return (eps, P, q, past, count, total), None
        if how.startswith("mean"):
            C = past if how == "mean, past" else {k: M[k, m] for k in later}
            new = {}
            for k in later:
                # Within this step, what q stands for reaches the loss through M of k alone.
                total = total + ((lam[k] * decays[k]) @ C[k] * q[k]).real
                mean = {j: weighted_mean(C[j], decays[j]) for j in later if j <= k}
                new[k] = eps.real + sum((mean[j] * q[j] for j in mean), 0.0)
            return (eps, P, new, past, count, total), None
        # lam has the paths through all layers above, so a change of layer k counts once.
        changes = {m: eps, **{k: decays[k][:, None, None] * P[k] for k in later}}
        for k in later:
            total = total + (lam[k][:, None, None] * changes[k]).sum(0).real
        new = {}
        for k in later:
            own = M[k, m][:, None, :] * eps.real
            for j in range(m + 1, k):
                own = own + jnp.einsum("kl,lij->kij", M[k, j], changes[j].real)
            new[k] = changes[k] + own
            if how == "largest":
                chosen = jnp.abs(past[k]) == jnp.abs(past[k]).max(0)
                new[k] = jnp.where(chosen[:, None, :], new[k], 0)
            if how == "kronecker":
                new[k] = best_product(new[k])
        return (eps, new, q, past, count, total), None

    zeros = lambda *shape: jnp.zeros(shape, dtype)
    carry = (
        zeros(N, N),
        {k: zeros(N, N, N) for k in later},
        {k: zeros(N, N) for k in later},
        {k: jnp.zeros((N, N), steps[4][k, m].dtype) for k in later},
        0.0,
        jnp.zeros((N, N)),
    )
    return jax.lax.scan(body, carry, steps)[0][-1]


def measured(kind, layers, seed, ways):
    """Cosines to BPTT of the weights that a state reads directly."""
    params, enter, leave = stack(kind, layers, seed)
    keys = jax.random.split(jax.random.key(seed + 100))
    xs = jax.random.normal(keys[0], (T, B, I))
    targets = jnp.roll(xs, SHIFT, 0)
    dtype = jnp.complex128 if kind == "lru" else jnp.float64
    first = [jnp.zeros(N, dtype)] * layers
    step = partial(one_step, kind, params, enter, leave)

    def run(xs, targets):
        body = lambda before, now: step(now[0], before, now[1])
        return jax.lax.scan(body, first, (xs, targets))[1]

    def total(params):
        def one(before, now):
            return above(kind, params, leave, now[0] @ enter, before, now[1], 0, [0.0] * layers)

        def sample(xs, targets):
            return jax.lax.scan(one, first, (xs, targets))[1].sum()

        return jax.vmap(sample, (1, 1))(xs, targets).sum()

    truth = jax.jit(jax.grad(total))(params)
    steps = jax.jit(jax.vmap(run, (1, 1)))(xs, targets)
    weights = [(m, name) for m in range(layers) for name in CELLS[kind][2]]
    wanted = jnp.concatenate([truth[m][name].ravel() for m, name in weights])
    found = {}
    for how in ways:
        each = []
        for m, name in weights:
            of = partial(gradients, kind, how, params, m, name, first)
            each.append(jax.jit(jax.vmap(of))(steps).sum(0).ravel())
        grad = jnp.concatenate(each)
        norms = jnp.linalg.norm(grad) * jnp.linalg.norm(wanted)
        found[how] = float(grad @ wanted / norms)
    return found


def main():
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--layers", nargs="+", type=int, default=[2, 4])
    parse.add_argument("--kinds", nargs="+", default=list(CELLS))
    parse.add_argument("--ways", nargs="+", help="default all")
    options = parse.parse_args()
    jax.config.update("jax_enable_x64", True)
    filters = tuple(f"filter {decay}" for decay in (0.5, 0.7, 0.8, 0.9, 0.95))
    ways = ("exact", "d_rtrl", "mean", "mean, past", "largest", *filters, "kronecker")
    ways = options.ways or ways
    print(f"{'stack':12}" + "".join(f"{way:>12}" for way in ways))
    for kind in options.kinds:
        for layers in options.layers:
            own = [way for way in ways if layers == 2 or way != "kronecker"]
            found = measured(kind, layers, layers, own)
            cells = "".join(f"{found[way]:12.4f}" for way in own)
            print(f"{kind:>8} x {layers}{cells}", flush=True)


if __name__ == "__main__":
    main()
