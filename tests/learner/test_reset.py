"""Resetting: traces, states, batch sizes, and states that are new."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

from .reference import (
    XS,
    H,
    Leaky,
    assert_close,
    leaky,
    learner_of,
    normal,
    online,
    traces_of,
    values,
)


def test_reset_state_clears_traces_and_counter_and_keeps_the_model():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    h = algo.model4compile.h.value
    algo.reset_state()
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(traces_of(algo)))
    assert int(algo.running_index.value) == 0
    assert_close(algo.model4compile.h.value, h, 0)


@pytest.mark.parametrize("rule", ["d_rtrl", "uoro", "kf_rtrl"])
def test_arrays_that_were_read_outlive_a_reset_and_a_sequence(rule):
    algo = braintrace.compile(leaky(), rule, XS[0])
    algo.etrace_grad(XS, step_fn=lambda x: (algo(x) ** 2).sum())  # its traces are its own
    read = [trace.value for trace in algo.etraces.values()]
    algo.reset_state()  # of random signs the number stays: the same array
    algo.etrace_grad(XS, step_fn=lambda x: (algo(x) ** 2).sum())
    assert not any(a.is_deleted() for a in jax.tree.leaves(read))


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("how", ["reset", "reset_all_states"])
def test_reset_starts_the_sequence_anew(how, batch):
    xs = XS if batch is None else normal(1, 5, batch, 2)
    algo = learner_of(leaky(batch), xs[0])
    first, start = online(algo, xs), None
    if how == "reset":
        algo.reset()
    else:
        brainstate.nn.reset_all_states(algo, batch_size=batch)
    start = values(algo)
    assert not np.asarray(start[H]).any()
    assert_close(online(algo, xs), first)


def resized(algo, batch):
    """The gradient after a change of batch size equals that of a new learner."""
    xs = normal(batch, 3, batch, 2)
    assert_close(online(algo, xs), online(learner_of(leaky(batch), xs[0]), xs))


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop"])
def test_reset_changes_the_batch_size(rule):
    options = {"decay_or_rank": 0.9} if rule == "pp_prop" else {}
    xs = normal(2, 3, 4, 2)
    algo = braintrace.compile(Leaky(), rule, jnp.zeros((2, 2)), batch_size=2, **options)
    other = braintrace.compile(Leaky(), rule, xs[0], batch_size=4, **options)
    algo(jnp.ones((2, 2)))
    algo.reset(batch_size=4)
    assert_close(online(algo, xs), online(other, xs))


def test_reset_changes_the_batch_size_again_and_again():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    for batch in (5, 1, 3):
        algo.reset(batch_size=batch)
        resized(algo, batch)


def test_reset_without_batch_size_keeps_the_present_one():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    algo.reset(batch_size=5)
    algo.reset()
    assert algo.model4compile.h.value.shape == (5, 3)
    resized(algo, 5)


def test_reset_all_states_changes_the_batch_size():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    algo(jnp.ones((2, 2)))
    brainstate.nn.reset_all_states(algo, batch_size=3)
    resized(algo, 3)


class Folded(Leaky):
    """The operator sees batch and space folded into one axis."""

    def __init__(self):
        super().__init__(n_in=2, n=4)
        self.linear = braintrace.nn.Linear((3, 2), (3, 4), w_init=normal(1, 2, 4))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3, 4)))

    def reset_state(self, batch_size=None, **kwargs):
        self.h.value = jnp.zeros((batch_size, 3, 4))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + self.linear(x)
        return self.h.value


@pytest.mark.parametrize("batch", [None, 5])
def test_reset_finds_the_batch_axis_behind_a_folded_operator(batch):
    algo = braintrace.compile(Folded(), "d_rtrl", jnp.zeros((2, 3, 2)), batch_size=2)
    algo(jnp.ones((2, 3, 2)))
    algo.reset(batch_size=batch)
    batch = batch or 2
    assert algo.model4compile.h.value.shape == (batch, 3, 4)
    xs = normal(1, 3, batch, 3, 2)
    other = braintrace.compile(Folded(), "d_rtrl", xs[0], batch_size=batch)
    assert_close(online(algo, xs), online(other, xs))


class Decay(Leaky):
    """A learnable decay through element_wise, and states that start at one."""

    def __init__(self):
        super().__init__()
        self.a = brainstate.ParamState(jnp.full(3, 0.5))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.ones((3,) if batch_size is None else (batch_size, 3)))

    def reset_state(self, batch_size=None, **kwargs):
        self.h.value = jnp.ones((3,) if batch_size is None else (batch_size, 3))

    def update(self, x):
        a = braintrace.element_wise(self.a.value)
        self.h.value = a * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@pytest.mark.parametrize("start, end", [(2, 4), (2, None), (1, None), (1, 4), (4, 1)])
def test_reset_of_a_batch_with_an_elementwise_parameter(start, end):
    algo = braintrace.compile(Decay(), "d_rtrl", jnp.zeros((start, 2)), batch_size=start)
    algo(jnp.ones((start, 2)))
    algo.reset(batch_size=end)
    batch = end or start
    xs = normal(1, 3, batch, 2)
    other = braintrace.compile(Decay(), "d_rtrl", xs[0], batch_size=batch)
    assert_close(online(algo, xs), online(other, xs))


@pytest.mark.parametrize("how", ["reset", "reset_all_states"])
def test_reset_of_a_mapped_learner_restores_the_initial_states(how):
    xs = normal(1, 3, 2, 2)
    algo = braintrace.compile(Decay(), "d_rtrl", xs[0], batch_size=2, vmap=True)
    first = online(algo, xs)
    algo.reset() if how == "reset" else brainstate.nn.reset_all_states(algo)
    assert_close(algo.module.model4compile.h.value, jnp.ones((2, 3)), 0)
    assert int(algo.module.running_index.value) == 0
    assert_close(online(algo, xs), first)


class Begun(Leaky):
    """For one sample, and says only how its state begins."""

    reset_state = brainstate.nn.Module.reset_state

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.full(3, 0.5))


class BegunBatch(Begun):
    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.full((batch_size, 3), 0.5))


class BegunWhole(Begun):
    """For two samples, and makes all that it has, its weight too."""

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.full((2, 3), 0.5))
        self.w = brainstate.ParamState(brainstate.random.randn(2, 3))


@pytest.mark.parametrize("how", ["mapped learner", "mapped model", "explicit", "whole"])
def test_reset_of_a_module_with_init_state_only_keeps_its_state(how):
    xs = normal(1, 3, 2, 2)
    if how == "mapped learner":
        model = Begun()
        algo = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2, vmap=True)
    elif how == "mapped model":
        model = Begun()
        algo = braintrace.compile(brainstate.nn.Map(model, init_map_size=2), "d_rtrl", xs[0])
    elif how == "whole":
        model = BegunWhole()
        brainstate.nn.init_all_states(model)
        algo = learner_of(model, xs[0])
    else:
        model = BegunBatch()
        algo = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)
    state, first = model.h, online(algo, xs)

    @brainstate.transform.jit
    def again():
        algo.reset()
        return algo.etrace_evolve(xs, return_outputs=True)

    algo.reset()
    assert model.h is state
    assert_close(state.value, jnp.full((2, 3), 0.5), 0)
    assert_close(online(algo, xs), first)
    last = again()[-1]  # states that are made while jit traces would be lost
    assert model.h is state
    assert_close(state.value @ model.v.value, last)


def test_reset_under_jit_keeps_shapes():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    first = online(algo, normal(1, 3, 2, 2))
    brainstate.transform.jit(algo.reset)()
    assert_close(online(algo, normal(1, 3, 2, 2)), first)


def test_states_made_anew_after_compiling_are_found_by_path():
    model = leaky()
    algo = learner_of(model, XS[0])
    algo(XS[0])
    old, stale = model.h, model.h.value
    brainstate.nn.init_all_states(model)
    assert model.h is not old
    algo(XS[1])
    fresh = leaky()
    fresh(XS[1])
    assert_close(model.h.value, fresh.h.value)
    assert_close(old.value, stale, 0)
    assert algo.hidden_states[("h",)] is model.h


def test_states_made_anew_with_another_batch_size_work_after_reset_state():
    model = leaky(2)
    algo = learner_of(model, jnp.zeros((2, 2)))
    brainstate.nn.init_all_states(model, batch_size=4)
    algo.reset_state(batch_size=4)
    resized(algo, 4)


def test_attributes_may_hide_the_methods_of_a_module():
    """A network may call its layers `nodes`, or its counters `states`."""

    class Hiding(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.nodes, self.states = {"cell": leaky()}, [0]

        def update(self, x):
            return self.nodes["cell"](x)

    algo = braintrace.compile(Hiding(), "d_rtrl", XS[0])
    first = online(algo, XS)
    algo.reset()
    assert_close(online(algo, XS), first)
    algo.from_pytree(algo.to_pytree())
