"""Store and recall with e-prop, as its paper has it, and three things that are near it.

A bit is shown, a pause follows, and at a sign it has to be told. Adaptive spiking neurons remember
it in their thresholds; a read-out filters their spikes behind its weight. For the same network you
see, per rule, the cosine of the gradient of all input and recurrent weights to that of BPTT, how
long the gradient of the read-out is, and the fraction of right answers after training: e-prop, with
the filter on the derivative of the spike times its trace; the form that was published under its
name, with the filter on the trace; D-RTRL, which filters nothing; and e-prop with random feedback.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from braintrace import online, rules

UNITS, GROUP, SHOWN, PAUSE, SIGN = 40, 8, 10, 40, 10
KAPPA, STEPS = 0.9, SHOWN + PAUSE + SIGN
RULES = {
    "e-prop": rules.eprop(filtered="eligibility", kappa_filter_decay="readout"),
    "published e-prop": rules.eprop(kappa_filter_decay=KAPPA),
    "D-RTRL": rules.d_rtrl(),
    "e-prop, random": rules.eprop("random", "readout", 0, filtered="eligibility"),
}


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvps(lambda t, z, v: 0.3 * jnp.maximum(0, 1 - jnp.abs(v)) * t)


def step(params, state, x):
    """Adaptive neurons (batch, units), half of them without adaptation, and a leaky read-out."""
    v, a, z, y = state
    beta = 0.2 * (jnp.arange(UNITS) % 2)
    v = 0.9 * v + x @ params["w_in"] + z @ params["w_rec"] - jax.lax.stop_gradient(z)
    a = 0.98 * a + z
    z = spike(v - 1.0 - beta * a)
    y = KAPPA * y + z @ params["w_out"]
    return (v, a, z, y), y


def draw(key, batch):
    """Spikes of two groups of inputs for the bit, and one for the sign to tell it."""
    of_bit, of_spikes = jax.random.split(key)
    bits = jax.random.randint(of_bit, (batch,), 0, 2)
    t = jnp.arange(STEPS)[:, None, None]
    group = jnp.arange(3 * GROUP)[None, None] // GROUP
    on = ((t < SHOWN) & (group == bits[:, None])) | ((t >= SHOWN + PAUSE) & (group == 2))
    rate = jnp.where(on, 0.4, 0.02)
    return jax.random.bernoulli(of_spikes, rate).astype(float), bits


def loss(y, bits, t):
    return (t >= SHOWN + PAUSE) * optax.softmax_cross_entropy_with_integer_labels(y, bits).mean()


def main(updates, small):
    batch, updates = (4, 2) if small else (32, updates)
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"w_in": (3 * GROUP, UNITS), "w_rec": (UNITS, UNITS), "w_out": (UNITS, 2)}
    scales = {"w_in": 1.0, "w_rec": 0.5, "w_out": 0.3}
    draws = zip(sizes, keys, strict=False)
    first = {k: scales[k] * jax.random.normal(n, sizes[k]) / sizes[k][0] ** 0.5 for k, n in draws}
    state = tuple(jnp.zeros((batch, n)) for n in (UNITS, UNITS, UNITS, 2))
    times, optimizer = jnp.arange(STEPS), optax.adam(5e-3)
    xs, bits = draw(keys[3], batch)
    labels = lambda bits: jnp.broadcast_to(bits, (STEPS, batch))

    def through_time(params):
        ys = jax.lax.scan(lambda s, x: step(params, s, x), state, xs)[1]
        return jax.vmap(loss)(ys, labels(bits), times).sum()

    flat = lambda g: jnp.concatenate([g["w_in"].ravel(), g["w_rec"].ravel()])

    def gradient_of(net, start):
        grad = net.grad(loss)
        return jax.jit(lambda p, xs, bits: grad(p, start, xs, labels(bits), times)[0])

    of_bptt = jax.grad(through_time)(first)
    exact = flat(of_bptt)
    for name, rule in RULES.items():
        net = online(step, rule)
        start = net.init(first, state, xs[0])
        gradient = gradient_of(net, start)
        grads = gradient(first, xs, bits)
        got, norm = flat(grads), jnp.linalg.norm
        cosine = got @ exact / norm(got) / norm(exact)
        times_exact = norm(grads["w_out"]) / norm(of_bptt["w_out"])
        params, opt = first, optimizer.init(first)
        for key in jax.random.split(jax.random.key(1), updates):
            change, opt = optimizer.update(gradient(params, *draw(key, batch)), opt)
            params = optax.apply_updates(params, change)
        right = 0.0
        for key in jax.random.split(jax.random.key(2), 10):
            new, told = draw(key, batch)
            ys = jax.lax.scan(lambda s, x, p=params: step(p, s, x), state, new)[1]
            right += (ys[SHOWN + PAUSE :].mean(0).argmax(-1) == told).mean() / 10
        words = f"cosine to BPTT {cosine:6.3f}, read-out {times_exact:5.2f} times BPTT's"
        print(f"{name:17s} {words}, right answers {100 * right:5.1f} %")
        assert small or name != "e-prop" or right > 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    parser.add_argument("--updates", type=int, default=200)
    main(**vars(parser.parse_args()))
