"""Recordings: what is kept is what the learner did, and the learner is left as it was."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import show

T, B = 5, 2


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    v, t = primals[0], tangents[0]
    return spike(v), t / (1 + jnp.abs(v)) ** 2


def smooth(v):
    return jax.nn.sigmoid(3 * v)


class Neurons(brainstate.nn.Module):
    """Adaptive neurons, recurrent through an operator, that feed a rate layer and a read-out."""

    def __init__(self, fire=smooth, keys=False):
        super().__init__()
        brainstate.random.seed(0)
        normal = lambda *shape: brainstate.ParamState(brainstate.random.normal(size=shape))
        self.win, self.rec, self.up, self.out = (
            normal(2, 4),
            normal(4, 4),
            normal(4, 3),
            normal(3, 2),
        )
        self.fire, self.keys = fire, keys

    def init_state(self, batch_size=None, **kwargs):
        size = () if batch_size is None else (batch_size,)
        self.v = brainstate.HiddenState(jnp.zeros((*size, 4)))
        self.a = brainstate.HiddenState(jnp.zeros((*size, 4)))
        self.r = brainstate.HiddenState(jnp.zeros((*size, 3)))

    def update(self, x):
        z = self.fire(self.v.value - 0.3 * self.a.value)
        drive = braintrace.matmul(x, self.win.value) + braintrace.matmul(z, self.rec.value)
        self.v.value = 0.8 * self.v.value + drive
        if self.keys:
            self.v.value = self.v.value + brainstate.random.normal(size=self.v.value.shape)
        self.a.value = 0.9 * self.a.value + self.v.value
        z = self.fire(self.v.value - 0.3 * self.a.value)
        self.r.value = 0.5 * self.r.value + braintrace.matmul(z, self.up.value)
        return braintrace.matmul(jnp.tanh(self.r.value), self.out.value)


def data(batch=True):
    key = jax.random.split(jax.random.key(1))
    size = (T, B) if batch else (T,)
    return jax.random.normal(key[0], (*size, 2)), jax.random.normal(key[1], (*size, 2))


def made(rule="d_rtrl", batch=True, model=None, **options):
    model = Neurons() if model is None else model
    example = jnp.zeros((B, 2) if batch else (2,))
    learner = braintrace.compile(model, rule, example, batch_size=B if batch else None, **options)
    return learner, lambda x, y: jnp.mean((learner(x) - y) ** 2)


@pytest.fixture(scope="module")
def recorded():
    learner, loss = made()
    xs, ys = data()
    return learner, loss, show.record(learner, xs, ys, step_fn=loss)


def values(learner):
    states = {p: s.value for p, s in learner.states().items()}
    key = jax.random.key_data(brainstate.random.DEFAULT.value)
    return jax.tree.map(np.asarray, (states, key))


# ------------------------------------------------------------------- the numbers, by definition


def plain_step(w, states, x, y, push=(0.0, 0.0, 0.0)):
    """One step written down without the library; `push` is added to the states it leaves."""
    v, a, r = states
    z = smooth(v - 0.3 * a)
    made_v = 0.8 * v + x @ w["win"] + z @ w["rec"]
    v = made_v + push[0]
    a = 0.9 * a + made_v + push[1]  # v and a share their traces: a is made from v itself
    z = smooth(v - 0.3 * a)
    r = 0.5 * r + z @ w["up"] + push[2]
    return (v, a, r), np.mean((np.tanh(r) @ w["out"] - y) ** 2)


def test_signals_are_the_derivatives_of_the_loss_by_the_states_left_behind(recorded):
    learner, _, seen = recorded
    w = {p[-1]: np.asarray(s.value) for p, s in learner.param_states.items()}
    xs, ys = map(np.asarray, data())
    states = tuple(np.zeros((B, n)) for n in (4, 4, 3))
    eps = 1e-6
    for t in range(T):
        for k, name in enumerate(("v", "a", "r")):
            for index in np.ndindex(states[k].shape):
                push = [np.zeros_like(s) for s in states]
                push[k][index] = eps
                up = plain_step(w, states, xs[t], ys[t], push)[1]
                push[k][index] = -eps
                down = plain_step(w, states, xs[t], ys[t], push)[1]
                found = seen.signals[name,][t][index]
                assert found == pytest.approx((up - down) / (2 * eps), rel=1e-5, abs=1e-9)
        states, loss = plain_step(w, states, xs[t], ys[t])
        assert seen.losses[t] == pytest.approx(loss, rel=1e-12)
        for name, value in zip(("v", "a", "r"), states, strict=True):
            np.testing.assert_allclose(seen.states[name,][t], value, rtol=1e-12)


class Leaky(brainstate.nn.Module):
    """One layer whose loss reads the new state only."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.arange(6.0).reshape(2, 3) / 5)

    def init_state(self, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x):
        self.h.value = 0.7 * jnp.tanh(self.h.value) + braintrace.matmul(x, self.w.value)
        return self.h.value


def test_signals_times_traces_are_the_gradient_and_in_the_end_that_of_bptt():
    learner = braintrace.compile(Leaky(), "d_rtrl", jnp.zeros(2))
    loss = lambda x, y: jnp.sum((learner(x) - y) ** 2)
    xs, ys = data(batch=False)
    ys = ys[:, :1]
    seen = show.record(learner, xs, ys, step_fn=loss, entries=6)
    trace = np.asarray(seen.traces["w",].entries).reshape(T, 2, 3)  # all six entries, in order
    assert seen.traces["w",].labels[:2] == ("weight[0, 0, 0]", "weight[0, 1, 0]")
    per_step = np.asarray(seen.signals["h",])[:, None] * trace
    norms = np.linalg.norm(per_step.reshape(T, -1), axis=1)
    np.testing.assert_allclose(seen.gradients["w",], norms, rtol=1e-10)
    np.testing.assert_allclose(
        seen.traces["w",].norm, np.linalg.norm(trace.reshape(T, -1), axis=1), rtol=1e-12
    )

    def bptt(w):
        h, total = jnp.zeros(3), 0.0
        for x, y in zip(xs, ys, strict=True):
            h = 0.7 * jnp.tanh(h) + x @ w
            total += jnp.sum((h - y) ** 2)
        return total

    exact = jax.grad(bptt)(learner.param_states["w",].value)
    np.testing.assert_allclose(per_step.sum(0), exact, rtol=1e-10)


def test_recording_agrees_with_the_learner_that_steps(recorded):
    learner, loss, seen = recorded
    xs, ys = data()
    grad = brainstate.transform.grad(loss, learner.param_states, return_value=True)
    for t in range(2):
        grads, value = grad(xs[t], ys[t])
        np.testing.assert_allclose(seen.losses[t], value, rtol=1e-12)
        for path, g in grads.items():
            np.testing.assert_allclose(seen.gradients[path][t], jnp.linalg.norm(g), rtol=1e-10)
        for path in (("win",), ("rec",), ("up",)):
            (trace,) = learner.get_etrace_of(path).values()
            kept = seen.traces[path]
            np.testing.assert_allclose(kept.norm[t], jnp.linalg.norm(trace["weight"]), rtol=1e-10)
            for label, entry in zip(kept.labels, kept.entries[t], strict=True):
                index = tuple(map(int, label[len("weight[") : -1].split(",")))
                np.testing.assert_allclose(entry, trace["weight"][index], rtol=1e-10)
    learner.reset()
    assert seen.outputs.shape == (T, B, 2)
    assert {frozenset(g) for g in seen.groups} == {frozenset({("v",), ("a",)}), frozenset({("r",)})}
    assert set(seen.signals) == {("v",), ("a",), ("r",)}


# ------------------------------------------------------------------------ rules with other signals


def test_signal_of_random_feedback_goes_the_random_way_back(recorded):
    xs, ys = data()
    learner, loss = made("eprop", feedback="random", random_feedback_key=0)
    seen = show.record(learner, xs, ys, step_fn=loss, states=["r"], weights=[])
    r, error = seen.states["r",], (seen.outputs - ys).reshape(-1, 2) * 2 / (B * 2)
    back = (seen.signals["r",] / (1 - jnp.tanh(r) ** 2)).reshape(-1, 3)
    matrix, residual, *_ = np.linalg.lstsq(np.asarray(error), np.asarray(back))
    assert residual.max() < 1e-20  # one matrix for all steps and samples,
    assert not np.allclose(
        matrix, learner.param_states["out",].value.T, atol=0.1
    )  # not the weights
    _, _, true = recorded
    matrix, *_ = np.linalg.lstsq(
        np.asarray((true.outputs - ys).reshape(-1, 2) * 2 / (B * 2)),
        np.asarray((true.signals["r",] / (1 - jnp.tanh(true.states["r",]) ** 2)).reshape(-1, 3)),
    )
    np.testing.assert_allclose(matrix, learner.param_states["out",].value.T, rtol=1e-8)


def test_signal_of_a_third_factor_is_the_modulator():
    learner, _ = made("three_factor")
    xs, _ = data()
    modulators = jnp.arange(1.0, T + 1)
    loss = lambda x, m: jnp.sum(learner(x, modulator=m) ** 2)
    seen = show.record(learner, xs, modulators, step_fn=loss)
    for signal in seen.signals.values():
        expected = np.broadcast_to(np.arange(1.0, T + 1)[:, None, None], signal.shape)
        np.testing.assert_allclose(signal, expected)


@pytest.mark.parametrize("rule", ["rtrl", "pp_prop", "no_trace"])
def test_every_layout_of_traces_is_recorded(rule):
    options = {"decay_or_rank": 0.9} if rule == "pp_prop" else {}
    learner, loss = made(rule, batch=False, **options)
    xs, ys = data(batch=False)
    seen = show.record(learner, xs, ys, step_fn=loss, entries=3)
    assert bool(seen.traces) == (rule != "no_trace")
    for trace in seen.traces.values():
        assert trace.norm.shape == (T,) and trace.entries.shape == (T, 3)
        assert (np.asarray(trace.norm) > 0).all() and len(set(trace.labels)) == 3


# ----------------------------------------------------------------------- looking, not touching


def test_learner_and_random_keys_are_left_as_they_were():
    learner, loss = made(model=Neurons(spike, keys=True))
    xs, ys = data()
    learner(xs[0])
    before = values(learner)
    seen = show.record(learner, xs, ys, step_fn=loss, weights=[])
    assert jax.tree.all(jax.tree.map(np.array_equal, before, values(learner)))
    # It draws what the learner would draw, once per step: a rehearsal does not count.
    found = [loss(x, y) for x, y in zip(xs, ys, strict=True)]
    np.testing.assert_allclose(seen.losses, jnp.stack(found), rtol=1e-12)


def test_less_can_be_kept(recorded):
    learner, loss, full = recorded
    xs, ys = data()
    options = {"states": ["v"], "weights": [("rec",)], "entries": 0, "sample": 1}
    seen = show.record(learner, xs, ys, step_fn=loss, **options)
    assert set(seen.states) == set(seen.signals) == {("v",)} and set(seen.traces) == {("rec",)}
    assert seen.states["v",].shape == (T, 4) and seen.outputs.shape == (T, 2)
    assert seen.traces["rec",].entries.shape == (T, 0)
    np.testing.assert_allclose(seen.signals["v",], full.signals["v",][:, 1], rtol=1e-12)


def test_without_a_loss_there_are_outputs_states_and_traces(recorded):
    learner = recorded[0]
    seen = show.record(learner, data()[0])
    assert seen.losses is None and seen.signals == {} and seen.gradients == {}
    assert seen.outputs.shape == (T, B, 2) and seen.traces["win",].norm.shape == (T,)


def test_units_of_states_are_kept():
    class Membrane(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((2, 3)))

        def init_state(self, **kwargs):
            self.v = brainstate.HiddenState(jnp.zeros(3) * u.mV)

        def update(self, x):
            self.v.value = 0.9 * self.v.value + braintrace.matmul(x, self.w.value) * u.mV
            return self.v.value / u.mV

    learner = braintrace.compile(Membrane(), "d_rtrl", jnp.zeros(2))
    loss = lambda x: jnp.sum(learner(x) ** 2)
    seen = show.record(learner, data(batch=False)[0], step_fn=loss)
    assert seen.states["v",].unit == u.mV
    np.testing.assert_allclose(seen.signals["v",], 2 * seen.outputs, rtol=1e-12)


# ------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_recorded_is_refused(recorded):
    learner, loss, _ = recorded
    xs, ys = data()
    with pytest.raises(ValueError, match=r"[\d,]+ bytes(.|\n)*memory_limit.*10 bytes"):
        show.record(learner, xs, ys, step_fn=loss, memory_limit=10)
    with pytest.raises(ValueError, match="sample=2"):
        show.record(learner, xs, ys, step_fn=loss, sample=2)
    with pytest.raises(ValueError, match="entries=-1"):
        show.record(learner, xs, ys, step_fn=loss, entries=-1)
    with pytest.raises(ValueError, match="'q'"):
        show.record(learner, xs, ys, step_fn=loss, states=["q"])
    with pytest.raises(ValueError, match="'out'"):
        show.record(learner, xs, ys, step_fn=loss, weights=["out"])
    with pytest.raises(TypeError, match="step_fn has type int"):
        show.record(learner, xs, ys, step_fn=3)
    with pytest.raises(TypeError, match=r"Neurons.*compiled"):
        show.record(learner.model4compile, xs, ys, step_fn=loss)
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        show.record(learner, xs, ys, step_fn=lambda x, y: learner(x) - y)
    with pytest.raises(ValueError, match="does not call the learner"):
        show.record(learner, xs, ys, step_fn=lambda x, y: jnp.sum(x))
    with pytest.raises(ValueError, match="calls the learner twice"):
        show.record(learner, xs, ys, step_fn=lambda x, y: jnp.sum(learner(x) + learner(y)))


def test_mapped_learners_and_windows_are_refused():
    xs, ys = data()
    mapped = braintrace.compile(Neurons(), "d_rtrl", xs[0], batch_size=B, vmap=True)
    with pytest.raises(braintrace.NotSupportedError, match="mapped over samples"):
        show.record(mapped, xs, step_fn=lambda x: jnp.sum(mapped(x)))
    learner, loss = made(vjp_method="multi-step")
    with pytest.raises(braintrace.NotSupportedError, match="vjp_method='single-step'"):
        show.record(learner, xs, ys, step_fn=loss)
    single, _ = made(batch=False)
    with pytest.raises(ValueError, match="without a batch"):
        show.record(single, xs[:, 0], sample=0)
