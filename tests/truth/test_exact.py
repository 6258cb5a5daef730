"""The learners against references that share nothing with them, to rounding in float64."""

import jax.numpy as jnp
import models
import numpy as np
import pytest
from models import (
    EXACT,
    OPERATORS,
    RECURRENT,
    TIGHT,
    assert_equal,
    bptt,
    compiled,
    different,
    living,
    seen,
    step_fn,
)

import braintrace as bt
from gradients import online_grad
from oracle import compare_to_rule, reference_grad, rule_on

ALL = {**EXACT, **RECURRENT, **OPERATORS}
KEPT = {**EXACT, **OPERATORS}
DECAYS = [0.9, 0.5, (0.8, 0.3)]
# A window recalls a trace as a single step does; these differ in what lies between.
IN_WINDOWS = [*RECURRENT, *list(EXACT)[::5], "conv", "lora_batched", "embedding_batched", "sparse"]


def learn(name, algorithm, chunk_size=None, **options):
    c = living(name)
    learner = compiled(algorithm, c.model, c.x0, **options)
    # In one block no trace is built, with blocks of one step nothing else is: a size each.
    size = (None, 1, 2)[len(name) % 3] if chunk_size is None else None
    return online_grad(learner, step_fn, *c.sequences, chunk_size=chunk_size, block_size=size)


@pytest.mark.parametrize("name", ALL)
def test_d_rtrl_is_its_definition(name):
    assert_equal(learn(name, bt.D_RTRL), rule_on(seen(name), "d_rtrl"))


@pytest.mark.parametrize("name", [n for n in ALL if n in KEPT])
def test_definition_is_bptt_where_everything_is_kept(name):
    assert_equal(rule_on(seen(name), "d_rtrl"), bptt(name))


@pytest.mark.parametrize("name", [n for n in ALL if n in RECURRENT])
def test_definition_is_not_bptt_where_something_is_dropped(name):
    assert different(rule_on(seen(name), "d_rtrl"), bptt(name))


@pytest.mark.parametrize("name", ALL)
def test_dense_window_of_all_steps_is_bptt(name):
    assert_equal(rule_on(seen(name), "d_rtrl", models.T), bptt(name))


@pytest.mark.parametrize("name", IN_WINDOWS)
def test_windows_are_their_definition(name):
    found = learn(name, bt.D_RTRL, 2, vjp_method="multi-step")
    assert_equal(found, rule_on(seen(name), "d_rtrl", 2))


@pytest.mark.parametrize("chunk_size", [None, 3, 5])
@pytest.mark.parametrize("name", ["gru_batched", "delay_line", "stacked_layers"])
def test_windows_of_any_length_are_their_definition(name, chunk_size):
    found = learn(name, bt.D_RTRL, chunk_size, vjp_method="multi-step")
    truth = rule_on(seen(name), "d_rtrl", chunk_size or 1)
    assert_equal(found, truth)
    if chunk_size == models.T:
        assert_equal(found, bptt(name))
    elif name in RECURRENT:
        assert different(truth, bptt(name))


@pytest.mark.parametrize("name", ALL)
def test_pp_prop_is_its_definition(name):
    decay = DECAYS[list(ALL).index(name) % len(DECAYS)]
    pair = decay if isinstance(decay, tuple) else (decay, decay)
    found = learn(name, bt.pp_prop, decay_or_rank=decay)
    assert_equal(found, rule_on(seen(name, folds=False), "pp_prop", decays=pair))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", ["gru_batched", "fused_gates"])
def test_pp_prop_windows_are_their_definition(name, decay):
    pair = decay if isinstance(decay, tuple) else (decay, decay)
    found = learn(name, bt.pp_prop, 2, decay_or_rank=decay, vjp_method="multi-step")
    assert_equal(found, rule_on(seen(name), "pp_prop", 2, decays=pair))


@pytest.mark.parametrize("name", ["leaky", "gru", "complex_state", "embedding"])
def test_pp_prop_depends_on_its_decays(name):
    truths = [
        rule_on(seen(name), "pp_prop", decays=pair) for pair in ((0.9, 0.9), (0.5, 0.5), (0.9, 0.5))
    ]
    assert different(truths[0], truths[1]) and different(truths[0], truths[2])
    assert different(truths[1], truths[2])


@pytest.mark.parametrize("name", ["adaptive_spikes", "lif_with_units", "spiking_recurrent"])
def test_spiking_models_spike_and_rest(name):
    c = living(name)
    state = c.model.states()
    before = {p: s.value for p, s in state.items()}
    outs = np.stack([np.asarray(c.model(x)) for x in c.sequences[0]])
    for p, s in state.items():
        s.value = before[p]
    assert outs.max() > 0.9 and outs.min() < 0.6


@pytest.mark.parametrize("algorithm", [bt.D_RTRL, lambda m: bt.pp_prop(m, 0.9)])
def test_mixed_dtypes(algorithm):
    def update(m, x):
        y = bt.matmul(x.astype(jnp.float32), m.w.value).astype(jnp.float64)
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    draw = models.Draw("mixed")
    net = models.Net(update, {"w": draw(3, 4).astype(jnp.float32)}, {"h": draw(4)})
    learner = compiled(algorithm, net, jnp.zeros(3))
    result = compare_to_rule(learner, step_fn, draw(5, 3), draw(5, 4))
    assert result.max_error < 1e-5
    assert result.gradients["w",].dtype == jnp.float32


def test_compare_and_reference_grad_agree_with_the_recorded_steps():
    c = living("gru")
    learner = compiled(bt.pp_prop, c.model, c.x0, decay_or_rank=0.9)
    result = compare_to_rule(learner, step_fn, *c.sequences)
    assert result.max_error <= TIGHT
    public = reference_grad("pp_prop", c.model, step_fn, *c.sequences, decay_or_rank=0.9)
    assert_equal(public, rule_on(seen("gru"), "pp_prop", decays=(0.9, 0.9)))
