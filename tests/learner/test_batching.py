"""Batches: in the model, by `compile`, by a mapped model, by hand."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace

from .reference import (
    Leaky,
    assert_close,
    leaky,
    learner_of,
    normal,
    online,
    squares,
)

BATCHED = normal(11, 4, 3, 2)  # time, batch, features


def explicit_batch():
    algo = learner_of(leaky(3), BATCHED[0])
    return algo, lambda: algo.model4compile.h.value, algo.param_states


def compiled_vmap():
    algo = braintrace.compile(Leaky(), "d_rtrl", BATCHED[0], batch_size=3, vmap=True)
    return algo, lambda: algo.module.model4compile.h.value, algo.param_states


def mapped_model():
    model = Leaky()
    mapped = brainstate.nn.Map(model, init_map_size=3)
    mapped.init_all_states()
    return learner_of(mapped, BATCHED[0]), lambda: model.h.value, None


def manual_vmap():
    model = Leaky()
    algo = braintrace.D_RTRL(model)

    @brainstate.transform.vmap_new_states(state_tag="new", axis_size=3)
    def make():
        brainstate.nn.init_all_states(model)
        algo.compile_graph(BATCHED[0, 0])

    make()
    mapped = brainstate.nn.Vmap(algo, vmap_states="new")
    return mapped, lambda: model.h.value, algo.param_states


@pytest.mark.parametrize("make", [explicit_batch, compiled_vmap, mapped_model, manual_vmap])
def test_batching_modes_agree_on_states_and_gradients(make):
    algo, state, params = make()
    params = algo.param_states if params is None else params
    step = brainstate.transform.grad(lambda x: squares(algo(x)), params)
    found = jax.tree.map(lambda *g: sum(g), *[step(x) for x in BATCHED])
    samples = [learner_of(leaky(), BATCHED[0, 0]) for _ in range(3)]
    each = [online(s, BATCHED[:, i]) for i, s in enumerate(samples)]
    want = jax.tree.map(lambda *g: sum(g), *each)
    assert_close({k[-1]: v for k, v in found.items()}, {k[-1]: v for k, v in want.items()})
    assert_close(state(), jnp.stack([s.model4compile.h.value for s in samples]))


@pytest.mark.parametrize("make", [compiled_vmap, mapped_model])
def test_batching_modes_drive_sequences(make):
    algo, state, _ = make()
    got = algo.etrace_grad(BATCHED, step_fn=lambda x: squares(algo(x)), reduction="sum")
    plain = learner_of(leaky(3), BATCHED[0])
    want = plain.etrace_grad(BATCHED, step_fn=lambda x: squares(plain(x)), reduction="sum")
    assert_close({k[-1]: v for k, v in got.items()}, {k[-1]: v for k, v in want.items()})
    algo.etrace_evolve(BATCHED)
    plain.etrace_evolve(BATCHED)
    assert_close(state(), plain.model4compile.h.value)


def test_mapped_batch_shows_the_report_of_one_sample():
    algo = compiled_vmap()[0]
    assert algo.report.counts["etrace_weights"] == 2  # weight and bias
    assert algo.graph is algo.module.graph
    assert isinstance(algo, braintrace.ETraceVmap)
