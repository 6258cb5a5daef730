"""`on_update(step, metrics)`: called for every update, between compiled loops."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace._online import Stream, run_reported

from .blocks import assert_same, closed_loop, designed, learner, plain
from .reference import normal
from .reference import values as values_of

T, RATE = 7, 0.1
XS, YS = normal(7, T, 2), normal(8, T, 2)
SGD = optax.sgd(RATE)
MASK = jnp.ones(T).at[3].set(0).at[4].set(2.5)


def params(algo):
    values = [state.value for state in algo.param_states.values()]
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(values)])


def one_by_one(algo, step):
    """The reference: a call for every update, and its gradient from the change of the weights."""
    metrics = []
    for at in range(0, T, 2):
        part, before = slice(at, at + 2), params(algo)
        options = {"mask": MASK[part], "update_every": 2, "optimizer": SGD}
        losses = algo.etrace_train(XS[part], YS[part], step_fn=step(algo), **options)
        norm = np.linalg.norm(params(algo) - before) / RATE
        loss = np.sum(MASK[part] * losses) / max(np.sum(MASK[part]), 1)
        metrics.append({"loss": loss, "grad_norm": norm})
    return metrics


@pytest.mark.parametrize(
    ("step", "per_loop"), [(plain, 2), (closed_loop, 256)], ids=["blocks", "steps"]
)
def test_metrics_are_those_of_every_update(step, per_loop, monkeypatch):
    monkeypatch.setattr("braintrace._online._on_update.UPDATES", per_loop)
    calls = []
    algo, other = learner(), learner()
    aux_too = lambda x, y: (step(algo)(x, y), x)
    options = {"mask": MASK, "update_every": 2, "optimizer": SGD, "has_aux": True}
    report = lambda step, metrics: calls.append((step, metrics))
    losses, aux = algo.etrace_train(XS, YS, step_fn=aux_too, on_update=report, **options)
    expected = one_by_one(other, step)
    assert losses.shape == (T,)
    np.testing.assert_array_equal(aux, XS)
    assert_same(values_of(algo), values_of(other))
    assert [step for step, _ in calls] == [1, 2, 3, 4]
    for (_, metrics), wanted in zip(calls, expected, strict=True):
        assert wanted["grad_norm"] > 1e-3
        for name, value in wanted.items():
            assert type(metrics[name]) is float
            np.testing.assert_allclose(metrics[name], value, rtol=1e-6)
    with pytest.warns(UserWarning, match="update 5"):
        algo.etrace_train(np.nan * XS, YS, step_fn=aux_too, on_update=report, **options)


def test_functions_of_arrays_report_too(monkeypatch):
    monkeypatch.setattr("braintrace._online._on_update.UPDATES", 2)

    def step(w, h, x):
        h = jnp.tanh(0.9 * h + x @ w)
        return h, h

    net, w = bt.online(step, "d_rtrl"), normal(0, 2, 3)
    carry, opt = net.init(w, jnp.zeros(3), XS[0]), SGD.init(w)
    loss = lambda out: jnp.sum(out**2)
    calls = []
    report = lambda step, metrics: calls.append((step, metrics))
    told = net.train(loss, SGD, 2, keep_traces=False, on_update=report)
    silent = net.train(loss, SGD, 2, keep_traces=False)
    ours, theirs = (jax.tree.leaves(train(w, opt, carry, XS)) for train in (told, silent))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    losses = silent(w, opt, carry, XS)[3]
    assert [step for step, _ in calls] == [1, 2, 3, 4]
    np.testing.assert_allclose([m["loss"] for _, m in calls[:3]], losses[:6].reshape(3, 2).mean(1))
    grads, _ = net.grad(loss)(w, carry, XS[:2])
    np.testing.assert_allclose(calls[0][1]["grad_norm"], np.linalg.norm(grads), rtol=1e-9)
    with pytest.raises(TypeError) as error:
        jax.jit(told)(w, opt, carry, XS)
    designed(error, "on_update", "jit")


def test_next_loop_is_started_before_the_function_is_called(monkeypatch):
    monkeypatch.setattr("braintrace._online._on_update.UPDATES", 2)
    events = []

    def run(stream):
        events.append(f"loop of {stream.length}")
        return (stream.arrays, None), jnp.ones(stream.length)

    report = lambda step, metrics: events.append(step)
    results, _ = run_reported(run, Stream(jnp.arange(9.0)), 2, report)
    np.testing.assert_array_equal(results, jnp.arange(9.0))
    loops = ["loop of 4", "loop of 4", 1, 2, "loop of 1", 3, 4, 5]
    assert events == loops


@pytest.mark.parametrize("bad", ["log", 3, lambda step: None])
def test_what_cannot_be_called_is_refused(bad):
    algo = learner()
    with pytest.raises(TypeError) as error:
        algo.etrace_train(XS, YS, step_fn=plain(algo), optimizer=SGD, on_update=bad)
    designed(error, "on_update")


def test_inside_of_jit_it_is_refused():
    algo = learner()
    algo.init_optimizer(SGD)

    @brainstate.transform.jit
    def train(xs):
        return algo.etrace_train(
            xs, YS, step_fn=plain(algo), optimizer=SGD, on_update=lambda step, metrics: None
        )

    with pytest.raises(TypeError) as error:
        train(XS)
    designed(error, "on_update", "jit")


def test_error_of_the_function_reaches_the_caller():
    def report(step, metrics):
        raise KeyError("no disk")

    algo = learner()
    with pytest.raises(KeyError, match="no disk"):
        algo.etrace_train(XS, YS, step_fn=plain(algo), optimizer=SGD, on_update=report)
