"""Units of several compartments: with `couple_axis` the Jacobian has a block per unit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from models import Net

import braintrace as bt

T, N, K = 5, 3, 4
XS = jnp.asarray(np.random.default_rng(0).normal(size=(T, 2)))
CABLE = jnp.asarray(0.6 * np.eye(K) + 0.2 * np.eye(K, k=1) + 0.1 * np.eye(K, k=-1))
IMPLICIT = jnp.asarray(2.0 * np.eye(K) - 0.3 * np.eye(K, k=1) - 0.2 * np.eye(K, k=-1))


def draw(*shape):
    return jnp.asarray(np.sin(1.0 + 1.7 * np.arange(np.prod(shape))).reshape(shape))


def tridiagonal(v):
    off = 0.1 * jnp.ones(v.shape)
    return lax.linalg.tridiagonal_solve(off.at[..., 0].set(0), 1 + v**2, off, v[..., None])[..., 0]


CABLES = {
    "roll": lambda v: 0.5 * v + 0.2 * jnp.roll(v, 1, -1) + 0.2 * jnp.roll(v, -1, -1),
    "cable": lambda v: v @ CABLE,
    "dense": lambda v: jnp.tanh(v) @ draw(K, K) / K,
    "solve": lambda v: jnp.linalg.solve(IMPLICIT, v[..., None])[..., 0],
    "solve of its own matrix": lambda v: jnp.linalg.solve(
        jnp.eye(K) * (2 + v[..., None] ** 2) + 0.1, v[..., None]
    )[..., 0],
    "triangular": lambda v: jax.scipy.linalg.solve_triangular(IMPLICIT, v.T, lower=True).T,
    "tridiagonal": tridiagonal,
    "cumulative": lambda v: 0.3 * jnp.cumsum(v, -1),
    "norm": lambda v: (v - v.mean(-1, keepdims=True)) / (1 + v.var(-1, keepdims=True)),
    "softmax": lambda v: v * jax.nn.softmax(v, -1),
    "window": lambda v: lax.reduce_window(v, 0.0, lax.add, (1, 2), (1, 1), "SAME") / 2,
    "convolution": lambda v: lax.conv(v[:, None], draw(1, 1, 3) / 3, (1,), "SAME")[:, 0],
}


def dendrites(cable):
    """Synapses on every compartment, and a soma that reads them and acts back on the first."""

    def step(p, s, x):
        into = (x @ p["w"]).reshape(N, K)
        v = cable(s["v"]) + into
        v = v.at[:, 0].add(0.2 * s["soma"])
        soma = 0.8 * s["soma"] + v.sum(-1) + x @ p["b"]
        return {"v": v, "soma": soma}, jnp.tanh(soma) * p["gain"]

    params = {"w": 0.3 * draw(2, N * K), "b": draw(2, N), "gain": draw(N)}
    return step, params, {"v": 0.1 * draw(N, K), "soma": jnp.zeros(N)}


def gradients(step, params, state, rule, xs=XS):
    learner = bt.online(step, rule)
    carry = learner.init(params, state, xs[0])
    loss = lambda p: jnp.sum(jnp.sin(learner.scan(p, carry, xs)[1]))
    reports = {path[-1]: p for path, p in learner.report.parameters.items()}
    return jax.grad(loss)(params), reports, learner


def bptt(step, params, state, xs=XS):
    def loss(p):
        return jnp.sum(jnp.sin(lax.scan(lambda s, x: step(p, s, x), state, xs)[1]))

    return jax.grad(loss)(params)


def distance(a, b):
    return max(jnp.abs(a[k] - b[k]).max() for k in b)


@pytest.mark.parametrize("name", CABLES)
def test_compartments_of_a_unit_are_followed(name):
    step, params, state = dendrites(CABLES[name])
    want = bptt(step, params, state)
    coupled, reports, _ = gradients(step, params, state, bt.rules.d_rtrl(couple_axis=-1))
    full, _, _ = gradients(step, params, state, bt.rules.rtrl())
    assert distance(coupled, want) < 1e-9 and distance(full, want) < 1e-9
    assert all(p.exact for p in reports.values()), [str(p) for p in reports.values()]
    plain, plainly, _ = gradients(step, params, state, bt.rules.d_rtrl())
    assert distance(plain, want) > 1e-6 and not plainly["w"].exact


def test_samples_of_a_batch_are_not_compartments():
    step, params, state = dendrites(CABLES["cable"])
    each = jax.vmap(step, (None, 0, 0))
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), state)
    xs = jnp.stack([XS, -XS], 1)
    found, reports, _ = gradients(each, params, many, bt.rules.d_rtrl(couple_axis=-1), xs)
    assert distance(found, bptt(each, params, many, xs)) < 1e-9
    # A weight of one compartment reaches all of its unit and the soma, in its own sample.
    assert reports["w"].trace_shapes == ((2, 2, N * K, K + 1),)


def test_brainstate_models_take_the_rule():
    def update(m, x):
        m.v.value = jnp.tanh(m.v.value @ CABLE) + bt.matmul(x, m.w.value).reshape(N, K)
        return m.v.value.sum(-1)

    learner = bt.compile(
        Net(update, {"w": draw(2, N * K)}, {"v": draw(N, K)}),
        bt.rules.d_rtrl(couple_axis=1),
        XS[0],
    )
    assert learner.report.parameters["w",].exact


def test_the_option_is_priced_and_named():
    step, params, state = dendrites(CABLES["roll"])
    _, plain, learner = gradients(step, params, state, bt.rules.d_rtrl())
    (line,) = [d for d in plain["w"].dropped if d.text.startswith("v -> v")]
    assert "couple_axis=-1" in line.do and "test_compartments.py:" in line.line
    costs = {c.call: c for c in learner.report.advice.rules}
    option = costs["d_rtrl(couple_axis=-1)"]
    assert len(option.exact) == 3 and option.bytes > costs["d_rtrl"].bytes
    assert learner.report.advice.best.call == "d_rtrl(couple_axis=-1)"
    _, coupled, _ = gradients(step, params, state, bt.rules.d_rtrl(couple_axis=-1))
    assert coupled["w"].trace_shapes == ((2, N * K, K + 1),)
    assert option.bytes == coupled["w"].trace_bytes + coupled["b"].trace_bytes


def test_units_that_meet_are_still_cut():
    def step(p, s, x):
        v = s["v"] @ CABLE + 0.1 * s["v"].mean(0) + (x @ p["w"]).reshape(N, K)
        return {"v": v}, v

    params, state = {"w": draw(2, N * K)}, {"v": draw(N, K)}
    found, reports, _ = gradients(step, params, state, bt.rules.d_rtrl(couple_axis=-1))
    assert not reports["w"].exact and "reduce_sum" in str(reports["w"])
    assert distance(found, bptt(step, params, state)) > 1e-3


@pytest.mark.parametrize("axis, kind", [(2, ValueError), ("v", TypeError), (True, TypeError)])
def test_an_axis_of_no_state_is_refused(axis, kind):
    step, params, state = dendrites(CABLES["roll"])
    with pytest.raises(kind, match="couple_axis") as error:
        gradients(step, params, state, bt.rules.d_rtrl(couple_axis=axis))
    assert all(part in str(error.value) for part in ("why:", "do:"))
