"""Programs a new user writes first, each from model to gradient."""

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax import lax

import braintrace

from .reference import (
    assert_alive,
    assert_close,
    bptt,
    leaky,
    learner_of,
    normal,
    online,
    squares,
    values,
)

# ------------------------------------------------------------------- a choice of old and new


class Chosen(brainstate.nn.Module):
    """tanh(matmul(h, w) + x) where x > 0, else the old h; `detached` cuts the recurrent entry."""

    def __init__(self, choose, n=10, detached=False):
        super().__init__()
        self.choose, self.detached = choose, detached
        self.w = brainstate.ParamState(0.3 * normal(0, n, n))
        self.h = brainstate.HiddenState(normal(1, n))

    def update(self, x):
        h = self.h.value
        read = lax.stop_gradient(h) if self.detached else h
        new = jnp.tanh(braintrace.matmul(read, self.w.value) + x)
        self.h.value = self.choose(x > 0, new, h)
        return self.h.value


CHOICES = {"select": lax.select, "where": jnp.where}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_choice_compiles_and_a_second_compile_does_nothing(choose):
    model = Chosen(choose)
    algo = braintrace.D_RTRL(model)
    algo.compile_graph(jnp.zeros(10))
    graph, traces = algo.graph, dict(algo.etraces)
    algo(jnp.ones(10))
    before = values(algo)
    algo.compile_graph(jnp.zeros(10))
    assert algo.graph is graph
    assert all(algo.etraces[k] is t for k, t in traces.items())
    assert_close(values(algo), before, 0)
    (relation,) = algo.graph.hidden_param_op_relations
    assert relation.weight_path == ("w",)
    assert relation.primitive.name == "etp_mv"


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_choice_gradient_is_bptt_with_the_recurrent_entry_cut(choose):
    xs = normal(2, 5, 10)
    got = online(learner_of(Chosen(choose), xs[0]), xs)
    assert_alive(got)
    assert_close(got, bptt(Chosen(choose, detached=True), xs))
    whole = bptt(Chosen(choose), xs)
    assert np.abs(got[("w",)] - whole[("w",)]).max() > 1e-3  # the cut matters here


# ------------------------------------------------------------------ a plain short-term state


class PlainState(brainstate.nn.Module):
    """The recurrent state is a plain ShortTermState; w_in is an ordinary matrix product."""

    def __init__(self, n_in=3, n=4, detached=False):
        super().__init__()
        self.detached = detached
        self.w_rec = brainstate.ParamState(0.5 * normal(0, n, n))
        self.w_in = brainstate.ParamState(normal(1, n_in, n))
        self.h = brainstate.ShortTermState(jnp.zeros(n))

    def update(self, x):
        h = self.h.value
        read = lax.stop_gradient(h) if self.detached else h
        y = braintrace.matmul(read, self.w_rec.value) + x @ self.w_in.value
        self.h.value = 0.5 * h + jnp.tanh(y)
        return self.h.value


def test_short_term_state_is_hidden_and_only_the_operator_weight_has_a_relation():
    algo = learner_of(PlainState(), jnp.zeros(3))
    assert [r.weight_path for r in algo.graph.hidden_param_op_relations] == [("w_rec",)]
    assert list(algo.hidden_states) == [("h",)]
    xs = normal(2, 4, 3)
    grads = online(algo, xs)
    assert_alive(grads)
    assert_close(grads[("w_rec",)], bptt(PlainState(detached=True), xs)[("w_rec",)])


def test_short_term_state_plain_weight_gets_the_gradient_within_the_step():
    model = PlainState()
    algo = learner_of(model, jnp.zeros(3))
    xs = normal(2, 4, 3)
    for x in xs:
        h = model.h.value
        got = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)(x)

        def loss(w, h=h, x=x):
            return squares(0.5 * h + jnp.tanh(h @ model.w_rec.value + x @ w))

        assert_close(got[("w_in",)], jax.grad(loss)(model.w_in.value))


# ----------------------------------------------------------------------- a product sliced off


class Sliced(brainstate.nn.Module):
    def __init__(self, where=slice(0, 10)):
        super().__init__()
        self.where = where
        self.w = brainstate.ParamState(normal(0, 3, 20))
        self.h = brainstate.HiddenState(jnp.zeros(10))

    def update(self, x):
        y = braintrace.matmul(x, self.w.value)[self.where]
        self.h.value = 0.8 * jnp.tanh(self.h.value) + y
        return self.h.value


@pytest.mark.parametrize("where", [slice(0, 10), slice(10, 20), slice(0, 20, 2)], ids=str)
def test_sliced_product_is_connected_and_equals_bptt(where):
    algo = learner_of(Sliced(where), jnp.zeros(3))
    assert [r.weight_path for r in algo.graph.hidden_param_op_relations] == [("w",)]
    xs = normal(1, 6, 3)
    got = online(algo, xs)
    assert_alive(got)
    assert_close(got, bptt(Sliced(where), xs))
    unused = np.setdiff1d(np.arange(20), np.arange(20)[where])
    assert not np.asarray(got[("w",)])[:, unused].any()


# -------------------------------------------------------------------------------------- a GRU


def gru(batch_size=2):
    brainstate.random.seed(0)
    cell = braintrace.nn.GRUCell(4, 8)
    brainstate.nn.init_all_states(cell, batch_size=batch_size)
    return cell


def test_gru_reports_its_relations_and_the_one_excluded_gate():
    graph = braintrace.compile_etrace_graph(gru(), jnp.zeros((2, 4)))
    found = {r.weight_path: r.primitive.name for r in graph.hidden_param_op_relations}
    assert found == {("Wz", "weight"): "etp_mm", ("Wh", "weight"): "etp_mm"}
    kind = braintrace.DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT
    (record,) = [d for d in graph.diagnostics if d.kind == kind]
    assert record.weight_path == ("Wr", "weight")
    assert record.context["blocking_weight_paths"] == (("Wh", "weight"),)
    assert graph.explain(weight_path=("Wr", "weight"), kind=kind) == (record,)


def test_gru_excluded_gate_gets_its_exact_gradient_within_the_step():
    cell = gru()
    algo = learner_of(cell, jnp.zeros((2, 4)))
    step = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)
    for x in normal(1, 4, 2, 4):
        before = values(cell)
        params = {k: v for k, v in before.items() if k != ("h",)}

        def loss(wr, before=before, params=params, x=x):
            h = before["h",]

            def linear(p, *parts):
                return jnp.concatenate(parts, -1) @ p["weight"] + p["bias"]

            z = jax.nn.sigmoid(linear(params["Wz", "weight"], x, h))
            r = jax.nn.sigmoid(linear(wr, x, h))
            new = jnp.tanh(linear(params["Wh", "weight"], x, r * h))
            return squares((1 - z) * h + z * new)

        got = step(x)[("Wr", "weight")]
        assert_close(got, jax.grad(loss)(params["Wr", "weight"]))
    assert_alive(got)


# ------------------------------------------------------------------------- ways to run a loop


def eager(algo, step, xs):
    return [step(x) for x in xs]


def jitted(algo, step, xs):
    fast = brainstate.transform.jit(step)
    return [fast(x) for x in xs]


def looped(algo, step, xs):
    stacked = brainstate.transform.for_loop(step, xs)
    return [jax.tree.map(lambda a, t=t: a[t], stacked) for t in range(len(xs))]


def test_eager_jit_and_for_loop_agree_on_states_traces_and_gradients():
    xs = normal(5, 6, 2)
    found = []
    for run in (eager, jitted, looped):
        algo = learner_of(leaky(), xs[0])
        grad = brainstate.transform.grad(
            lambda x, algo=algo: squares(algo(x)), algo.param_states, return_value=True
        )
        found.append((run(algo, grad, xs), values(algo)))
    assert_alive(found[0][0])
    for other in found[1:]:
        assert_close(other, found[0], 1e-12)


def test_eager_jit_and_for_loop_agree_without_a_gradient():
    xs = normal(5, 6, 2)
    found = []
    for run in (eager, jitted, looped):
        algo = learner_of(leaky(), xs[0])
        found.append((run(algo, algo, xs), values(algo)))
    for other in found[1:]:
        assert_close(other, found[0], 1e-12)
    assert int(found[0][1][("running_index",)]) == 6


# ------------------------------------------------------------------- spiking layers with units


@jax.custom_jvp
def forward_spike(v):
    return (v > 0).astype(v.dtype)


@forward_spike.defjvp
def _(primals, tangents):
    (v,), (t,) = primals, tangents
    return forward_spike(v), t / (1 + jnp.abs(v)) ** 2


@jax.custom_vjp
def reverse_spike(v):
    return (v > 0).astype(v.dtype)


reverse_spike.defvjp(lambda v: (reverse_spike(v), v), lambda v, ct: (ct * jnp.exp(-jnp.abs(v)),))

SPIKES = {
    "custom_jvp": forward_spike,
    "custom_vjp": reverse_spike,
    "braintools_relu_grad": braintools.surrogate.relu_grad,
    "braintools_sigmoid": braintools.surrogate.sigmoid,
    "braintools_ReluGrad": braintools.surrogate.ReluGrad(),
}


class LIF(brainstate.nn.Module):
    """A leaky integrate-and-fire layer: V in mV, tau in ms, weights in mV."""

    tau, threshold, reset = 5.0 * u.ms, 1.0 * u.mV, 0.2 * u.mV

    def __init__(self, spike, n_in=4, n=3):
        super().__init__()
        self.spike = spike
        self.w = brainstate.ParamState(1.5 * jnp.abs(normal(0, n_in, n)) * u.mV)
        self.V = brainstate.HiddenState(jnp.zeros(n) * u.mV)
        self.out = brainstate.ParamState(normal(1, n, 2))

    def update(self, x):
        dt = brainstate.environ.get("dt")
        V = self.V.value * u.math.exp(-dt / self.tau) + braintrace.matmul(x, self.w.value)
        s = self.spike(u.get_mantissa((V - self.threshold) / u.mV))
        self.V.value = V - s * (V - self.reset)
        return s @ self.out.value


def mantissas(tree):
    return jax.tree.map(jnp.asarray, jax.tree.leaves(tree))


@pytest.mark.parametrize("spike", SPIKES.values(), ids=SPIKES)
def test_lif_with_units_and_surrogate_spike_equals_bptt(spike):
    xs = (jnp.asarray(np.random.default_rng(3).random((12, 4))) < 0.3).astype(float)
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = LIF(spike)
        algo = learner_of(model, xs[0])
        want = bptt(LIF(spike), xs)
        got = online(algo, xs)
        assert_alive(mantissas(got))
        assert_close(mantissas(got), mantissas(want))
        fresh = LIF(spike)
        out = brainstate.transform.for_loop(fresh, xs)
    assert (np.abs(np.asarray(out)).max(1) > 0).sum() > 2  # it spikes
    assert u.get_unit(model.V.value) == u.mV


def test_lif_gradient_has_the_unit_of_its_parameter():
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = LIF(forward_spike)
        got = online(learner_of(model, jnp.ones(4)), jnp.ones((2, 4)))
    assert jax.tree.structure(got[("w",)]) == jax.tree.structure(model.w.value)
