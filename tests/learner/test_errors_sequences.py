"""Mistakes of users with batches, sequences, masks and losses."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace

from .designed import XS, X, assert_designed
from .reference import (
    Leaky,
    assert_close,
    bptt,
    leaky,
    learner_of,
    online,
    squares,
)


def test_changed_batch_size():
    algo = learner_of(leaky(2), jnp.ones((2, 2)))
    with pytest.raises(ValueError) as error:
        algo(jnp.ones((3, 2)))
    assert_designed(error, "float64[2, 2]", "float64[3, 2]", "reset(batch_size=")
    with pytest.raises(TypeError) as error:
        algo.reset(batch_size=3.0)
    assert_designed(error, "batch_size has type float")


def test_changed_batch_size_of_the_model_alone():
    model = leaky(2)
    algo = learner_of(model, jnp.ones((2, 2)))
    brainstate.nn.init_all_states(model, batch_size=4)
    with pytest.raises((TypeError, ValueError)) as error:
        algo(jnp.ones((2, 2)))
    assert_designed(error, "batch")
    with pytest.raises(ValueError) as error:
        algo(jnp.ones((4, 2)))
    assert_designed(error, "reset(batch_size=")


def test_changed_batch_size_of_a_mapped_learner():
    algo = braintrace.compile(Leaky(), "d_rtrl", jnp.ones((3, 2)), batch_size=3, vmap=True)
    with pytest.raises(ValueError) as error:
        algo(jnp.ones((4, 2)))
    assert_designed(error, "3", "4", "batch")


@pytest.mark.parametrize("how", ["reset", "reset_state"])
def test_batch_size_for_a_learner_without_batch(how):
    with pytest.raises(ValueError) as error:
        getattr(learner_of(leaky(), X), how)(batch_size=4)
    assert_designed(error, "no batch axis")


def test_empty_batch_is_refused_or_gives_zeros():
    try:
        got = online(learner_of(leaky(0), jnp.zeros((0, 2))), jnp.zeros((2, 0, 2)))
    except (ValueError, braintrace.CompilationError) as error:
        assert "why:" in str(error) and "do:" in str(error)
        assert "mixes units" not in str(error)
    else:
        assert all(not np.asarray(g).any() for g in jax.tree.leaves(got))


@pytest.mark.parametrize("size", ["3", -3, 2.5], ids=str)
def test_batch_size_that_is_no_count(size):
    with pytest.raises((TypeError, ValueError)) as error:
        braintrace.compile(Leaky(), "d_rtrl", jnp.ones((3, 2)), batch_size=size)
    assert_designed(error, "batch_size")


def test_vmap_without_batch_size():
    with pytest.raises(ValueError) as error:
        braintrace.compile(Leaky(), "d_rtrl", jnp.ones((3, 2)), vmap=True)
    assert_designed(error, "vmap=True without batch_size")


@pytest.mark.parametrize("bad", [jnp.ones((4, 2)), jnp.ones(())], ids=["mismatch", "scalar"])
def test_vmap_with_inputs_of_another_batch(bad):
    with pytest.raises(ValueError) as error:
        braintrace.compile(Leaky(), "d_rtrl", bad, vmap=True, batch_size=3)
    assert_designed(error, str(bad.shape), "3", "axis 0")


# ------------------------------------------------------------------------------------ sequences


def drive(algo=None, sequences=(XS,), **options):
    algo = algo or learner_of(leaky(), X)
    options.setdefault("step_fn", lambda x, *rest: squares(algo(x)))
    return algo.etrace_grad(*sequences, **options)


SEQUENCES = {
    "none": ((), "no sequence"),
    "empty tree": ((XS, {}), "empty pytree"),
    "scalar": ((XS, 1.0), "scalar"),
    "lengths": ((XS, XS[:2]), "[2, 4]"),
    "zero": ((XS[:0],), "zero steps"),
}


@pytest.mark.parametrize("sequences, part", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("method", ["etrace_grad", "etrace_evolve"])
def test_sequences_that_do_not_fit(sequences, part, method):
    with pytest.raises(ValueError) as error:
        if method == "etrace_grad":
            drive(sequences=sequences)
        else:
            learner_of(leaky(), X).etrace_evolve(*sequences)
    assert_designed(error, part)


def test_sequence_already_wrapped():
    for wrap in (braintrace.MultiStepData, braintrace.SingleStepData):
        with pytest.raises(TypeError) as error:
            drive(sequences=(wrap(XS),))
        assert_designed(error, "wrapped", "step_fn")


@pytest.mark.parametrize("data", [1.0, [1.0, 2.0]], ids=["scalar", "list"])
def test_window_of_scalars(data):
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), X)(braintrace.MultiStepData(data))
    assert_designed(error, "MultiStepData holds a scalar", "SingleStepData")


def test_windows_of_different_lengths():
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), X)(braintrace.MultiStepData((XS, XS[:2])))
    assert_designed(error, "different lengths", "2", "4", "lockstep")


@pytest.mark.parametrize("when", ["compile", "call"])
def test_window_of_zero_steps(when):
    algo = braintrace.D_RTRL(leaky())
    if when == "call":
        algo.compile_graph(X)
    window = braintrace.MultiStepData(XS[:0])
    with pytest.raises(ValueError) as error:
        algo(window) if when == "call" else algo.compile_graph(window)
    assert_designed(error, "zero steps")


OPTIONS = {
    "mask": (ValueError, {"mask": jnp.ones(3)}, "mask has shape (3,)"),
    "reduction": (ValueError, {"reduction": "max"}, "reduction='max'"),
    "loss_output": (ValueError, {"loss_output": "x"}, "loss_output='x'"),
    "zero window": (ValueError, {"chunk_size": 0}, "chunk_size=0"),
    "boolean window": (TypeError, {"chunk_size": True}, "chunk_size has type bool"),
    "float window": (TypeError, {"chunk_size": 2.0}, "chunk_size has type float"),
    "window": (ValueError, {"chunk_size": 2}, "multi-step"),
    "no step_fn": (TypeError, {"step_fn": None}, "step_fn"),
    "step_fn": (TypeError, {"step_fn": 3}, "step_fn"),
    "weights": (TypeError, {"weights": 3}, "weights"),
    "weights by name": (
        TypeError,
        {"weights": ["W"]},
        "choose among learner.param_states: b, v, w",
    ),
    "nearly a name": (TypeError, {"weights": "vv"}, "did you mean v?"),
    "NaN mask": (ValueError, {"mask": jnp.asarray([1, jnp.nan, 0, 1])}, "first at step 1"),
    "infinite mask": (ValueError, {"mask": [1, 1, 1, np.inf]}, "mask is not a finite number"),
    "network first": (TypeError, {"step_fn": lambda net, x: squares(net(x))}, "verify.compare"),
    "no weights": ((TypeError, ValueError), {"weights": []}, "weights"),
}


@pytest.mark.parametrize("kind, options, part", OPTIONS.values(), ids=OPTIONS)
def test_unknown_options_of_etrace_grad(kind, options, part):
    with pytest.raises(kind) as error:
        drive(**options)
    assert_designed(error, part)


def test_weights_that_are_none():
    algo = learner_of(leaky(), X)
    own = {
        "h": brainstate.HiddenState(jnp.zeros(2)),
        "count": brainstate.ParamState(jnp.zeros(2, int)),
        "unread": brainstate.ParamState(jnp.zeros(2)),
    }
    parts = {"h": "h (a HiddenState of float", "count": "of int", "unread": "weights holds unread"}
    for name, state in {**own, "h": algo.model4compile.h}.items():
        with pytest.raises(ValueError) as error:
            drive(algo, weights={name: state, "w": algo.model4compile.w})
        assert_designed(error, parts[name], "choose among learner.param_states: b, v, w")
    with pytest.raises(ValueError, match="no weight"):
        algo.init_optimizer(optax.sgd(0.1), [algo.model4compile.h])


def test_mask_with_nan_inside_of_jit_is_a_gradient_of_nan():
    algo = learner_of(leaky(), X)
    gradient = brainstate.transform.jit(lambda mask: drive(algo, mask=mask))
    found = gradient(jnp.asarray([1, jnp.nan, 0, 1]))
    assert all(np.isnan(g).all() for g in jax.tree.leaves(found))


LOSSES = {
    "shape": (lambda out: out, False, "shape (2,)"),
    "integer": (lambda out: squares(out).astype(int), False, "int"),
    "complex": (lambda out: squares(out) * 1j, False, "complex"),
    "None": (lambda out: None, False, "None"),
    "unit": (lambda out: squares(out) * u.mV, False, "mV"),
    "missing aux": (squares, True, "has_aux"),
    "surplus aux": (lambda out: (squares(out), out), False, "has_aux"),
}


@pytest.mark.parametrize("loss, has_aux, part", LOSSES.values(), ids=LOSSES)
def test_loss_that_is_no_real_number(loss, has_aux, part):
    algo = learner_of(leaky(), X)
    with pytest.raises((TypeError, ValueError)) as error:
        algo.etrace_grad(XS, step_fn=lambda x: loss(algo(x)), has_aux=has_aux)
    assert_designed(error, part)


def test_window_losses_must_be_one_per_step():
    algo = learner_of(leaky(), X, vjp_method="multi-step")
    with pytest.raises(ValueError) as error:
        algo.etrace_grad(
            XS, step_fn=lambda x: squares(algo(braintrace.MultiStepData(x))), chunk_size=2
        )
    assert_designed(error, "shape ()", "(2,)")


# ------------------------------------------------------------------------------------------ NaN


def test_nan_input_gives_nan_and_reset_clears_it():
    algo = learner_of(leaky(), X)
    want = online(learner_of(leaky(), X), XS)
    assert np.isnan(np.asarray(algo(jnp.full(2, jnp.nan)))).all()
    algo.reset()
    assert_close(online(algo, XS), want)


def test_nan_of_a_masked_last_step_does_not_reach_the_gradient():
    padded = XS.at[3].set(jnp.nan)
    algo = learner_of(leaky(), X)
    got = drive(algo, (padded,), mask=jnp.asarray([1.0, 1.0, 1.0, 0.0]), reduction="sum")
    assert_close(got, bptt(leaky(), XS[:3]))
