"""A batch is analysed on a few samples where they are alike and apart, and as a whole elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.graph import _sets
from same_graph import analysed, assert_same, both_ways

from .step_models import Model, normal

B, N = 5, 3
ORDER = jnp.asarray([2, 0, 1])
APART = jnp.asarray(np.random.default_rng(0).integers(0, N, (B, 1)))


def carries(move, shape=(B, N)):
    """h <- move(h) + y, with y repeated along the axes that h has besides."""

    def update(m, x):
        y = braintrace.matmul(x, m.w.value)
        m.h.value = move(m.h.value) + y.reshape((B, *[1] * (len(shape) - 2), N))

    return update, {"h": jnp.zeros(shape)}


def delays(k):
    def update(m, x):
        y = braintrace.matmul(x, m.w.value)
        m.h.value = jnp.concatenate([y[:, None], m.h.value[:, :-1]], axis=1)

    return update, {"h": jnp.zeros((B, k, N))}


def ring(m, x):
    y = braintrace.matmul(x, m.w.value)
    at = jnp.asarray(x[0, 0], int)
    m.h.value = jax.lax.dynamic_update_slice(m.h.value, y[:, None], (0, at, 0))


def delta(m, x):
    v, k = braintrace.matmul(x, m.w.value), x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    old = jnp.einsum("bk,bkv->bv", k, m.h.value)
    m.h.value = m.h.value + k[:, :, None] * (v - old)[:, None, :]


def shared(m, x):
    gain = braintrace.element_wise(m.g.value)
    y = braintrace.matmul(x, m.w.value)
    m.h.value = jax.nn.sigmoid(gain) * m.h.value + y
    m.d.value = jnp.roll(m.h.value, 1, axis=-1)


def synapses(m, x):
    y = braintrace.matmul(x, m.w.value)
    m.h.value = 0.9 * m.h.value + m.d.value.sum(1)
    m.d.value = 0.5 * m.d.value + y[:, None]


def stacked(m, x):
    """Two variables per unit in one array."""
    v, i = m.h.value[..., 0], m.h.value[..., 1]
    i = 0.5 * i + jnp.tanh(v)
    m.h.value = jnp.stack([0.9 * v + i + braintrace.matmul(x, m.w.value), i], -1)


def norm(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1)


STEPS = {
    "transposed": carries(lambda h: jnp.tanh(h.T)[::-1].T),
    "reshaped": carries(lambda h: h.reshape(B, 1, N).sum(1)),
    "sliced and padded": carries(lambda h: jnp.pad(h[:, 1:], ((0, 0), (1, 0)))),
    "gathered": carries(lambda h: h[:, ORDER]),
    "gathered by sample": carries(
        lambda h: jax.vmap(lambda a, i: a[i])(h, ORDER[None] + jnp.zeros((B, 1), int))
    ),
    "scattered": carries(lambda h: jnp.zeros((B, N)).at[:, ORDER].add(h)),
    "overwritten": carries(lambda h: h.at[:, 0].set(0.0)),
    "a norm is cut": carries(norm),
    "a product is cut": carries(lambda h: h @ normal(3, N, N)),
    "a diagonal": carries(lambda h: h @ jnp.diag(normal(4, N))),
    "cumulative sum": carries(lambda h: jnp.cumsum(h, axis=1)),
    "a loop": carries(lambda h: jax.lax.fori_loop(0, 3, lambda i, h: 0.9 * h, h)),
    "a loop that grows": carries(
        lambda h: jax.lax.scan(lambda c, a: (0.5 * c + a, c * a), jnp.zeros(B), h.T)[1].T
    ),
    "a choice": carries(
        lambda h: jax.lax.cond(ORDER[0] > 1, jnp.sin, lambda h: jnp.roll(h, 1, 1), h)
    ),
    "a choice of zero": carries(lambda h: jax.lax.cond(ORDER[0] > 1, jnp.zeros_like, jnp.sin, h)),
    "a loop that ends": carries(
        lambda h: jax.lax.while_loop(
            lambda c: c[1] < 3, lambda c: (0.9 * jnp.sin(c[0]), c[1] + 1), (h, 0)
        )[0]
    ),
    "more axes": carries(lambda h: jnp.roll(h, 1, 1), (B, 2, N)),
    "two delays": delays(2),
    "six delays": delays(6),
    "a ring": (ring, {"h": jnp.zeros((B, 4, N))}),
    "channels": (delta, {"h": jnp.zeros((B, 2, N))}),
    "a shared weight": (shared, {"h": jnp.zeros((B, N)), "d": jnp.zeros((B, N))}),
    "stacked": (stacked, {"h": jnp.zeros((B, N, 2))}),
    "synapses": (synapses, {"h": jnp.zeros((B, N)), "d": jnp.zeros((B, 4, N))}),
}
JOINED = {
    "mean over samples": carries(lambda h: h - h.mean(0)),
    "another sample": carries(lambda h: jnp.roll(h, 1, axis=0)),
    "a place of each sample": carries(lambda h: jnp.take_along_axis(h, APART, 1)),
    "samples in one axis": carries(lambda h: (0.5 * h.reshape(-1)).reshape(B, N)),
}


def graphs(step, monkeypatch):
    update, hidden = step
    params = {"w": normal(0, 2, N), "g": normal(1, N)}
    return both_ways(Model(update, params, hidden), normal(2, B, 2), monkeypatch)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_few_samples_give_the_graph_of_all(step, monkeypatch):
    few, whole = graphs(step, monkeypatch)
    assert analysed(few) < analysed(whole)
    assert_same(few, whole)


@pytest.mark.parametrize("step", JOINED.values(), ids=JOINED)
def test_samples_that_are_not_alike_or_not_apart_are_all_analysed(step, monkeypatch):
    few, whole = graphs(step, monkeypatch)
    assert analysed(few) == analysed(whole)
    assert_same(few, whole)


@pytest.mark.parametrize("batch", [3, 60])
def test_what_has_a_trace_does_not_depend_on_the_batch(batch, monkeypatch):
    """With every limit between the sizes of the two batches."""
    monkeypatch.setattr(_sets, "MOST_SOURCES", 40 * N)
    monkeypatch.setattr(_sets, "NARROW", 1)

    def update(m, x):
        y = braintrace.matmul(x, m.w.value)
        m.h.value = 0.9 * m.h.value + y + 0.1 * m.d.value
        m.d.value = 0.5 * m.d.value + y

    hidden = {k: jnp.zeros((batch, N)) for k in "hd"}
    model = Model(update, {"w": normal(0, 2, N)}, hidden)
    report = braintrace.compile_etrace_graph(model, normal(2, batch, 2)).analysis
    assert [r.slots.width for r in report.relations] == [2]
    assert not report.influence.cuts


def test_sets_that_are_too_large_are_called_so(monkeypatch):
    monkeypatch.setattr(_sets, "MOST_SOURCES", 4)
    monkeypatch.setattr(_sets, "NARROW", 1)

    def update(m, x):
        y = braintrace.matmul(x, m.w.value)
        m.h.value = 0.9 * m.h.value + (y + jnp.roll(y, 1, 1))

    model = Model(update, {"w": normal(0, 2, N)}, {"h": jnp.zeros((B, N))})
    with pytest.raises(braintrace.CompilationError, match="joins too many elements") as error:
        braintrace.compile(model, "d_rtrl", normal(2, B, 2))
    assert "mixes units" not in str(error.value)


def joined(p, h, x):
    return jnp.tanh(h @ p["u"] + x @ p["w"])


def sometimes(p, h, x):
    """The samples meet where their mean is large, and nowhere near zero."""
    return joined(p, h, x) + jax.nn.relu(h.mean(0) - 20)


def chosen(p, h, x):
    return jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, h @ p["u"] + x @ p["w"])


def iterated(p, h, x):
    y = joined(p, h, x)
    return jax.lax.fori_loop(0, 3, lambda i, h: 0.5 * jnp.tanh(h) + y, h)


def iterated_over_samples(p, h, x):
    y = joined(p, h, x)
    return jax.lax.scan(lambda c, a: (c + a, c + a), jnp.zeros(N), y)[1]


def chosen_together(p, h, x):
    y = joined(p, h, x)
    return jax.lax.cond(h[0, 0] > 20, lambda: y[::-1], lambda: y)


def normed(p, h, x):
    return norm(joined(p, h, x))


APARTS = {
    **dict.fromkeys((joined, chosen, iterated, normed), True),
    **dict.fromkeys((sometimes, iterated_over_samples, chosen_together), False),
}


@pytest.mark.parametrize("step", APARTS, ids=lambda step: step.__name__)
def test_samples_are_apart_where_that_is_proved(step):
    def full(p, h, x):
        h = step(p, h, x)
        return h, h

    params = {"w": normal(0, 2, N), "u": normal(1, N, N)}
    net = braintrace.online(full, "kf_rtrl")
    carry = net.init(params, normal(2, B, N), normal(3, B, 2))
    signs = [t["one"].shape for t in carry.traces]
    assert signs == 2 * [(B,) if APARTS[step] else ()]


def test_a_state_of_stacked_variables_is_analysed_like_one_sample():
    def memory(batch):
        params = {"w": normal(0, 2, N)}
        model = Model(stacked, params, {"h": jnp.zeros((batch, N, 2))})
        return braintrace.compile_etrace_graph(model, normal(2, batch, 2)).analysis.memory

    assert memory(512) == memory(4)
