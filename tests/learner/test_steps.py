"""Unusual steps, states and types, and learners as parts of other programs."""

import copy

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace

from .reference import (
    XS,
    H,
    Leaky,
    assert_alive,
    assert_close,
    bptt,
    leaky,
    learner_of,
    normal,
    online,
    recurrent,
    restore,
    squares,
    traces_of,
    values,
)


def test_integer_counters_advance_and_are_no_hidden_state():
    class Counting(Leaky):
        def __init__(self):
            super().__init__()
            self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

        def update(self, x):
            self.count.value = self.count.value + 1
            return super().update(x) * self.count.value

    model = Counting()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    got = online(algo, XS)
    assert int(model.count.value) == 5
    assert set(algo.other_states) == {("count",)}
    assert_close(got, bptt(_started(Counting()), XS))


def _started(model):
    brainstate.nn.init_all_states(model)
    return model


def test_state_in_a_dictionary_is_hidden_leaf_by_leaf():
    class Pair(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState({"in": normal(0, 2, 3), "decay": normal(1, 3)})
            self.s = brainstate.ShortTermState({"i": jnp.zeros(3), "v": jnp.zeros(3)})

        def update(self, x):
            s, w = self.s.value, self.w.value
            i = 0.5 * s["i"] + braintrace.matmul(x, w["in"])
            v = jnp.tanh(braintrace.element_wise(w["decay"]) * s["v"]) + i
            self.s.value = {"i": i, "v": v}
            return v

    algo = learner_of(Pair(), XS[0])
    (group,) = algo.graph.hidden_groups
    assert group.num_state == 2
    got = online(algo, XS)
    assert_alive(got)
    assert_close(got, bptt(Pair(), XS))


def test_stop_gradient_in_the_step_is_respected():
    class Stopped(Leaky):
        def update(self, x):
            h = 0.9 * jnp.tanh(lax.stop_gradient(self.h.value))
            self.h.value = h + braintrace.matmul(x, self.w.value, self.b.value)
            return self.h.value @ self.v.value

    algo = learner_of(_started(Stopped()), XS[0])
    assert_close(online(algo, XS), bptt(_started(Stopped()), XS))


def test_learner_inside_a_larger_module_learns():
    class Outer(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.learner = learner_of(leaky(), XS[0])
            self.head = brainstate.ParamState(normal(4, 2, 1))

        def update(self, x):
            return self.learner(x) @ self.head.value

    outer = Outer()
    params = outer.states(brainstate.ParamState)
    step = brainstate.transform.grad(lambda x: squares(outer(x)), params)
    got = jax.tree.map(lambda *g: sum(g), *[step(x) for x in XS])
    head, model = outer.head.value, leaky()
    want = bptt(model, XS, lambda out: squares(out @ head))
    assert_close(got[("learner", "model4compile", "w")], want[("w",)])
    assert_alive(got)


def test_executor_returns_the_numbers_of_a_step():
    algo = learner_of(leaky(), XS[0])
    algo.model4compile.h.value = normal(0, 3)
    before = values(algo)
    out, hiddens, others, (xs, fs), jacobians = algo.executor.solve_h2w_h2h_jacobian(XS[0])
    assert_close(values(algo), before, 0)
    assert_close(xs[0], XS[0])
    assert_close(fs[0], jnp.ones((3, 1)))
    h = before[H]
    assert_close(jacobians[0][:, 0, 0], 0.9 / jnp.cosh(h) ** 2)
    assert others == {}
    assert_close(out, hiddens[("h",)] @ algo.model4compile.v.value)


def test_grad_expon_accumulates_with_decay():
    acc = braintrace.GradExpon({"w": jnp.zeros(2)}, 0.5)
    acc({"w": jnp.ones(2)})
    got = acc({"w": jnp.ones(2)})
    assert_close(got, {"w": jnp.full(2, 1.5)})
    assert_close(acc.gradients.value, got)


def test_deep_copy_of_a_learner_is_independent():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    twin = copy.deepcopy(algo)
    before = values(algo)
    got = online(twin, XS[1:3])
    assert_close(values(algo), before, 0)
    assert_close(got, online(algo, XS[1:3]))
    assert_close(values(twin), values(algo))


def test_states_saved_and_put_back_continue_the_sequence():
    algo = learner_of(recurrent(), XS[0])
    algo(XS[0])
    saved = values(algo)
    first = online(algo, XS[1:])
    restore(algo, saved)
    assert_close(online(algo, XS[1:]), first)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_small_types_are_kept(dtype, tolerance):
    def make():
        model = leaky()
        for state in model.states().values():
            state.value = state.value.astype(dtype)
        return model

    xs = XS.astype(dtype)
    algo = learner_of(make(), xs[0])
    got = online(algo, xs)
    assert {a.dtype for a in jax.tree.leaves((got, values(algo)[H], traces_of(algo)))} == {
        jnp.dtype(dtype)
    }
    assert_close(got, bptt(make(), xs), tolerance)


def passed_on(model, x):
    h = model.h.value
    model.h.value = model.g.value + braintrace.matmul(x, model.w.value)
    model.g.value = h


def stored_twice(model, x):
    model.h.value = 0.5 * model.h.value + braintrace.matmul(x, model.w.value)
    model.g.value = model.h.value


def forgotten(model, x):
    model.h.value = 0.5 * model.h.value + model.g.value + braintrace.matmul(x, model.w.value)
    model.g.value = jnp.zeros(3)


def rematerialised(model, x):
    step = jax.checkpoint(lambda h, w: jnp.tanh(h) * 0.5 + braintrace.matmul(x, w))
    model.h.value = step(model.h.value, model.w.value)


def nested_jit(model, x):
    @brainstate.transform.jit
    def step(x):
        model.h.value = 0.5 * jnp.tanh(model.h.value) + braintrace.matmul(x, model.w.value)

    step(x)


def mapped_inside(model, x):
    w = model.w.value.T[:, :, None]
    y = jax.vmap(lambda v: braintrace.matmul(x, v))(w).reshape(3)
    model.h.value = 0.5 * model.h.value + y


STEPS = [passed_on, stored_twice, forgotten, rematerialised, nested_jit, mapped_inside]


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_unusual_steps_equal_bptt(step):
    class Unusual(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(normal(0, 2, 3))
            self.h = brainstate.HiddenState(jnp.zeros(3))
            self.g = brainstate.HiddenState(jnp.ones(3))

        def update(self, x):
            step(self, x)
            return self.h.value * self.g.value + self.h.value

    got = online(learner_of(Unusual(), XS[0]), XS)
    assert_alive(got)
    assert_close(got, bptt(Unusual(), XS))


def test_states_of_a_learner_that_met_two_programs_can_be_listed_and_reset():
    class Switched(Leaky):
        def update(self, x):
            return super().update(2 * x if brainstate.environ.get("fit") else x)

    model = Switched()
    brainstate.nn.init_all_states(model)
    with brainstate.environ.context(fit=True):
        algo = learner_of(model, jnp.ones(2))
    with brainstate.environ.context(fit=False):
        algo(jnp.ones(2))
    assert any("etraces" in map(str, path) for path in algo.states())
    brainstate.nn.reset_all_states(algo)


def test_trace_dtype_keeps_the_imaginary_part_of_a_complex_weight():
    class Turning(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(normal(1, 2, 3) + 1j * normal(2, 2, 3))
            self.h = brainstate.HiddenState(jnp.zeros(3, complex))

        def update(self, x):
            self.h.value = (0.8 + 0.3j) * self.h.value + braintrace.matmul(x + 0j, self.w.value)
            return jnp.abs(self.h.value) ** 2

    def gradient(**options):
        algo = learner_of(Turning(), jnp.ones(2), **options)
        return algo.etrace_grad(normal(3, 4, 2), step_fn=lambda x: algo(x).sum())[("w",)]

    exact, rounded = gradient(), gradient(trace_dtype=jnp.bfloat16)
    assert np.abs(np.asarray(exact).imag).max() > 0.1
    np.testing.assert_allclose(rounded, exact, rtol=1e-5)


def test_static_parameters_of_the_call_are_used():
    scaled = braintrace.register_primitive("scaled_by", lambda x, w, fn: fn(x @ w))

    class Model(Leaky):
        fn = staticmethod(lambda y: y)

        def update(self, x):
            self.h.value = 0.5 * self.h.value + scaled.bind(x, self.w.value, fn=self.fn)
            return self.h.value

    model = Model()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, jnp.ones(2))
    first = algo(jnp.ones(2))
    model.fn = lambda y: 100 * y
    brainstate.nn.init_all_states(model)
    np.testing.assert_allclose(algo(jnp.ones(2)), 100 * first)


@pytest.mark.parametrize("block_size", [None, 1])
def test_an_operator_registered_again_is_the_one_a_learner_uses(block_size):
    register = lambda f: braintrace.register_primitive("registered_twice", f)
    gain = register(lambda x, w: x @ w)

    class Model(Leaky):
        def update(self, x):
            self.h.value = 0.5 * self.h.value + gain.bind(x, self.w.value)
            return self.h.value

    model = Model()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    step = lambda net, x: squares(net(x)) + squares(gain.bind(x, model.w.value))

    def gradients():
        algo.reset()
        options = {"reduction": "sum", "block_size": block_size}
        found = algo.etrace_grad(XS, step_fn=lambda x: step(algo, x), **options)
        algo.reset()
        return found["w",], braintrace.verify.bptt_grad(model, step, XS)["w",]

    old, truth = gradients()
    assert_close(old, truth)
    gain = register(lambda x, w: jnp.tanh(x @ w))
    new, truth = gradients()
    assert_close(new, truth)
    assert np.abs(new - old).max() > 0.1
    np.testing.assert_array_equal(algo(XS[0]), gain.bind(XS[0], model.w.value))
    register(lambda x, w: 0 * (x @ w))  # the model still holds the one before
    assert_close(gradients()[0], truth)


def test_report_names_what_the_tail_of_a_weight_loses():
    class Centred(Leaky):
        def update(self, x):
            y = braintrace.matmul(x, self.w.value)
            self.h.value = 0.5 * self.h.value + (y - y.mean()) * self.b.value
            return self.h.value

    model = Centred()
    brainstate.nn.init_all_states(model)
    text = learner_of(model, jnp.ones(2)).report.to_str()
    assert "w -> h: reduce_sum adds up units (" in text
    assert "test_steps.py:" in text


def test_side_effects_of_a_step_happen_once(capfd):
    class Talking(Leaky):
        def update(self, x):
            jax.debug.print("said once")
            return super().update(x)

    model = Talking()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, jnp.ones(2))
    jax.effects_barrier()
    assert "said once" not in capfd.readouterr().out
    algo(jnp.ones(2))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("said once") == 1


def test_spikes_as_booleans_are_filtered_as_numbers():
    product = braintrace.register_primitive("spiking_product", lambda x, w: x.astype(float) @ w)

    class Model(Leaky):
        def update(self, x):
            self.h.value = jnp.tanh(0.5 * self.h.value + product.bind(x, self.w.value))
            return self.h.value

    def gradient(xs):
        model = Model()
        brainstate.nn.init_all_states(model)
        algo = braintrace.pp_prop(model, 0.9)
        algo.compile_graph(xs[0])
        return algo.etrace_grad(xs, step_fn=lambda x: (algo(x) ** 2).sum())[("w",)]

    spikes = normal(3, 5, 2) > 0
    np.testing.assert_allclose(gradient(spikes), gradient(spikes.astype(float)), rtol=1e-12)


def test_integer_parameters_are_left_out_of_the_gradient():
    class Indexed(Leaky):
        def __init__(self):
            super().__init__()
            self.order = brainstate.ParamState(jnp.asarray([1, 0]))

        def update(self, x):
            return super().update(x[self.order.value])

    model = Indexed()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, jnp.ones(2))
    grads = algo.etrace_grad(jnp.ones((3, 2)), step_fn=lambda x: squares(algo(x)))
    assert ("order",) not in grads and ("w",) in grads


def test_batch_larger_than_one_block_of_the_contraction_gives_the_same_gradient():
    xs = normal(4, 3, 70, 2)

    def gradient(batch_first):
        model = leaky(batch_first.shape[1])
        algo = learner_of(model, batch_first[0])
        return algo.etrace_grad(batch_first, step_fn=lambda x: squares(algo(x)), reduction="sum")

    parts = [gradient(xs[:, i : i + 10]) for i in range(0, 70, 10)]
    assert_close(gradient(xs), jax.tree.map(lambda *p: sum(p), *parts))
