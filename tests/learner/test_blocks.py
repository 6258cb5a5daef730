"""Gradients in blocks: the result of one step after another, whatever the model and the loss."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import braintrace as bt

from .block_models import CASES
from .blocks import (
    AROUND,
    IN_A_LOOP,
    OTHERS,
    RULES,
    XS,
    YS,
    Clocked,
    Noisy,
    Recurrent,
    around,
    assert_same,
    case_check,
    check,
    in_blocks,
    learner,
    noise_after_the_call,
    outcome,
    plain,
    said,
    temporaries,
    traces_of,
)
from .reference import assert_alive, assert_close, normal, restore, squares
from .reference import values as values_of


@pytest.mark.parametrize("name", CASES)
def test_blocks_equal_steps_for_every_model(name):
    case_check(name, "d_rtrl", (2 if len(name) % 2 else None,))


@pytest.mark.parametrize("i", range(len(OTHERS)), ids=OTHERS)
def test_blocks_equal_steps_for_every_rule(i):
    name = list(CASES)[i * 7 % len(CASES)]  # a model each, from all over the list
    chunk = RULES[OTHERS[i]][1].get("chunk", 1)
    case_check(name, OTHERS[i], (3 if chunk == 1 else 2 * chunk,))


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_the_learner_runs_in_blocks(name):
    step, chosen = AROUND[name]
    around(step, chosen, Clocked if name == "clock" else Recurrent)


def test_noise_of_the_model_and_of_the_loss_are_the_draws_of_single_steps():
    around(plain, model=Noisy)
    around(noise_after_the_call, model=Noisy)  # one source, used on both sides


def test_noise_is_different_at_every_step():
    algo = learner(model=Noisy)
    still = jnp.ones((5, 2))
    _, aux = algo.etrace_grad(
        still, step_fn=lambda x: (squares(algo(x)), brainstate.random.DEFAULT.value), has_aux=True
    )
    assert len(np.unique(jax.random.key_data(aux), axis=0)) == 5


@pytest.mark.parametrize("name", IN_A_LOOP)
def test_loops_through_the_step_function_run_in_blocks(name):
    step, chosen = IN_A_LOOP[name]
    around(step, chosen)


# In blocks the steps are a scan, and JAX drops an ordered `io_callback` without results from the
# derivative of a scan: such a callback is heard where steps are single.
@pytest.mark.parametrize(
    "kind, chunk, size", [("debug", None, None), ("io", None, 1), ("debug", 2, None)]
)
def test_side_effects_happen_once_per_step_and_in_order(kind, chunk, size):
    assert said(kind, chunk, size) == [float(x[0]) for x in XS]


def test_jax_drops_an_ordered_callback_from_the_derivative_of_a_scan():
    """If this fails, callbacks are heard in blocks too: the case above needs no single steps."""
    heard = []

    def total(w):
        def body(h, x):
            io_callback(lambda v: heard.append(float(v)), None, x, ordered=True)
            return w * h + x, h

        return lax.scan(body, 1.0, jnp.arange(3.0))[1].sum()

    jax.grad(total)(0.5)
    jax.effects_barrier()
    assert heard == []


# ------------------------------------------------------------------- batches, windows, sequences


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop"])
def test_batched_model_in_blocks(rule):
    xs, ys = normal(1, 7, 3, 2), normal(2, 7, 3, 2)
    check(lambda: learner(rule, x=xs[0], batch=3), plain, (xs, ys), (3,))


def test_mapped_learner_takes_the_options_of_blocks():
    xs, ys = normal(1, 7, 3, 2), normal(2, 7, 3, 2)
    plain_batch = learner(x=xs[0], batch=3)
    brainstate.nn.init_all_states(plain_batch.model4compile, batch_size=3)
    want = plain_batch.etrace_grad(xs, ys, step_fn=plain(plain_batch), block_size=1)
    for options in ({}, {"block_size": 3}, {"memory_budget": 100}, {"keep_traces": False}):
        algo = bt.compile(Recurrent(), "d_rtrl", xs[0], batch_size=3, vmap=True)
        assert_close(algo.etrace_grad(xs, ys, step_fn=plain(algo), **options), want)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(traces_of(algo.module)))


class Gained(Recurrent):
    def update(self, x, gain):
        return super().update(gain * x)


@pytest.mark.parametrize("method", ["single-step", "multi-step"])
def test_windows_made_by_the_step_function(method):
    windows, gains = normal(1, 5, 3, 2), normal(2, 5, 2)

    def make():
        algo = bt.D_RTRL(models_state(Gained()), vjp_method=method)
        algo.compile_graph(XS[0], XS[0])
        return algo

    def step(algo):
        return lambda x, g: squares(algo(bt.MultiStepData(x), bt.SingleStepData(g)))

    check(make, step, (windows, gains), (6,), mask=jnp.asarray([1, 0, 2.0, 1, 0]))


def models_state(model):
    brainstate.nn.init_all_states(model)
    return model


@pytest.mark.parametrize("rule, length", [("d_rtrl", 1), ("pp_prop", 2), ("snap2", 1), ("rtrl", 2)])
def test_sequence_shorter_than_a_block(rule, length):
    sequences = (XS[:length], YS[:length])
    check(lambda: learner(rule), plain, sequences, (3,))


@pytest.mark.parametrize("lengths", [(3, 7), (7, 5)])
def test_sequences_of_another_length_with_the_same_learner(lengths):
    found = []
    for size in (1, 3):
        algo = learner()
        run = lambda n, algo=algo, size=size: algo.etrace_grad(
            XS[:n], YS[:n], step_fn=plain(algo), block_size=size, return_value=True
        )
        run(lengths[0])
        found.append((run(lengths[1]), values_of(algo)))
    assert_same(*found[::-1])


def test_two_halves_continue_each_other():
    want = outcome(learner(), plain, (XS, YS), block_size=1, reduction="sum")
    algo, total = learner(), None
    for part in (slice(0, 4), slice(4, 7)):
        grads = algo.etrace_grad(XS[part], YS[part], step_fn=plain(algo), reduction="sum")
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    assert_same((total, values_of(algo)), (want["found"][0], want["states"]))


def test_small_budget_of_memory_gives_small_blocks():
    algo, want = learner(), outcome(learner(), plain, (XS, YS), block_size=1)
    assert_same(outcome(algo, plain, (XS, YS), memory_budget=1), want)
    assert in_blocks(algo)
    assert 2 * temporaries(64, memory_budget=1) < temporaries(64, memory_budget=1 << 20)


CHOSEN = {
    "state": lambda m: m.w,
    "list": lambda m: [m.v, m.w],
    "tuple": lambda m: (m.r,),
    "dict": lambda m: {"z": m.w, "a": m.v},
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_chosen_weights_in_blocks(kind):
    def gradient(size):
        algo = learner()
        weights = CHOSEN[kind](algo.model4compile)
        return outcome(algo, plain, (XS, YS), weights=weights, block_size=size)["found"][0]

    want, got = gradient(1), gradient(3)
    assert type(got) is type(want)
    assert_alive(got)
    assert_close(got, want)


# ---------------------------------------------------------------------------------------- masks

NAN_LATE = YS.at[5:].set(jnp.nan)
MASKS = {
    "bool": (np.array([1, 0, 1, 1, 0, 1, 1], bool), XS, YS),
    "float": (np.array([0.5, 0, 2.0, 1, 0, 1, 3]), XS, YS),
    "a whole block": (np.array([1.0, 1, 0, 0, 0, 0, 1]), XS, YS),
    "nothing counts": (np.zeros(7), XS, YS),
    "NaN targets": (np.array([1.0, 0, 1, 0, 1, 0, 0]), XS, NAN_LATE.at[1].set(jnp.nan)),
    "NaN inputs at the end": (np.array([1.0, 1, 1, 1, 1, 0, 0]), XS.at[5:].set(jnp.nan), NAN_LATE),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_blocks(name):
    mask, xs, ys = MASKS[name]
    want = check(learner, plain, (xs, ys), (2,), mask=mask)
    grads = jax.tree.leaves(want["found"][0])
    assert all(np.isfinite(g).all() for g in grads)
    assert any(np.any(g) for g in grads) == bool(mask.any())


@pytest.mark.parametrize("rule", ["pp_prop", "snap2", "rtrl", "d_rtrl, windows of 2"])
def test_nan_of_uncounted_steps_reaches_no_gradient(rule):
    mask, xs, ys = MASKS["NaN inputs at the end"]
    chunk = RULES[rule][1].get("chunk", 1)
    wrap = bt.MultiStepData if chunk > 1 else lambda x: x
    mask = mask if chunk == 1 else np.array([1.0, 1, 1, 1, 0, 0, 0])  # a window counts or does not
    xs = xs if chunk == 1 else xs.at[4:].set(jnp.nan)
    step = lambda algo: lambda x, y: jnp.sum((algo(wrap(x)) - y) ** 2, -1)
    blocks = rule != "rtrl"  # its reverse mode passes all steps of a block
    make = lambda: learner(rule)
    want = check(make, step, (xs, ys), (4,), blocks, mask=mask, chunk_size=chunk)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(want["found"][0]))


@pytest.mark.parametrize(
    "rule, size", [("d_rtrl", 3), ("pp_prop", None), ("rtrl", 3), ("d_rtrl, windows of 2", None)]
)
def test_traces_that_are_not_kept_are_zero(rule, size):
    chunk = RULES[rule][1].get("chunk", 1)
    wrap = bt.MultiStepData if chunk > 1 else lambda x: x
    step = lambda algo: lambda x, y: jnp.sum((algo(wrap(x)) - y) ** 2, -1)
    options = {"chunk_size": chunk, "reduction": "sum"}
    want = outcome(learner(rule), step, (XS, YS), block_size=1, **options)
    algo = learner(rule)
    got = outcome(algo, step, (XS, YS), block_size=size, keep_traces=False, **options)
    assert_close(got["found"], want["found"])
    assert_close(algo.model4compile.h.value, want["states"][("model4compile", "h")])
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(traces_of(algo)))
    assert int(algo.running_index.value) == 0
    other = learner(rule)
    other.etrace_grad(XS, YS, step_fn=step(other), block_size=1, chunk_size=chunk)
    other.reset_state()
    again = [outcome(a, step, (XS[:4], YS[:4]), **options) for a in (algo, other)]
    assert_same(*again)


def test_states_saved_before_a_sequence_can_be_put_back():
    algo = learner()
    algo.etrace_evolve(XS[:2])
    saved = values_of(algo)
    first = outcome(algo, plain, (XS, YS), eager=True)
    restore(algo, saved)
    assert_same(outcome(algo, plain, (XS, YS), eager=True), first)
