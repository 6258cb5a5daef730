"""Mistakes of users with units, keywords and step functions."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from jax.experimental import io_callback

import braintrace

from .designed import Step, X, assert_designed, integrate, text_of
from .reference import (
    Leaky,
    assert_close,
    learner_of,
    normal,
)


def test_input_with_another_unit_than_compiled():
    volts = Step(integrate, state=jnp.zeros(3) * u.mV)
    algo = learner_of(volts, X * u.mV)
    for bad, shown in ((X, "float64[2])"), (X * u.volt, "float64[2] V")):
        with pytest.raises(ValueError) as error:
            algo(bad)
        assert_designed(error, "float64[2] mV", shown)


def test_input_with_a_unit_into_a_plain_state():
    with pytest.raises(Exception) as error:
        learner_of(Step(integrate), X * u.mV)
    assert_designed(error, "mV", here=True)


def lose_unit(model, x):
    model.h.value = braintrace.matmul(x, model.w.value)


def test_state_that_loses_its_unit():
    with pytest.raises(ValueError) as error:
        learner_of(Step(lose_unit, state=jnp.zeros(3) * u.mV), X)
    assert_designed(error, "h", "mV", here=True)


def test_state_that_loses_its_unit_keeps_its_value():
    model = Step(lose_unit, state=jnp.zeros(3) * u.mV)
    with pytest.raises(ValueError):
        learner_of(model, X)
    assert not isinstance(u.get_mantissa(model.h.value), jax.core.Tracer)
    assert u.get_unit(model.h.value) == u.mV


def test_state_that_changes_the_scale_of_its_unit_is_refused_or_converted():
    def rescaled(model, x):
        model.h.value = (0.5 * model.h.value + braintrace.matmul(x, model.w.value)).in_unit(u.volt)

    model = Step(rescaled, state=jnp.zeros(3) * u.mV)
    try:
        algo = learner_of(model, X * u.mV)
    except ValueError as error:
        assert "why:" in text_of(error) and "mV" in text_of(error)
    else:
        algo(X * u.mV)
        assert_close(model.h.value.to_decimal(u.mV), X @ normal(0, 2, 3))


def test_windows_of_a_mapped_learner_are_those_of_a_batch():
    options = {"batch_size": 3, "vjp_method": "multi-step"}
    make = lambda **more: braintrace.compile(Leaky(), "d_rtrl", jnp.ones((3, 2)), **options, **more)
    mapped, batch = make(vmap=True), make()
    xs = jnp.arange(24.0).reshape((4, 3, 2)) / 24
    loss = lambda net: lambda x: (net(braintrace.MultiStepData(x)) ** 2).sum((1, 2))
    found, want = (n.etrace_grad(xs, step_fn=loss(n), chunk_size=2) for n in (mapped, batch))
    assert_close(dict(found), dict(want))
    assert_close(*(n(braintrace.MultiStepData(xs)) for n in (mapped, batch)))


def test_value_of_a_side_effect_that_reaches_a_state_is_refused():
    def listening(model, x):
        heard = io_callback(lambda: np.ones(3), jax.ShapeDtypeStruct((3,), float))
        model.h.value = heard * model.h.value + braintrace.matmul(x, model.w.value)

    with pytest.raises(braintrace.NotSupportedError) as error:
        learner_of(Step(listening), X)
    assert_designed(error, "side effect", here=True)


class Gained(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 3)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x, *, gain=1.0):
        self.h.value = 0.5 * self.h.value + gain * braintrace.matmul(x, self.w.value)
        return self.h.value


def test_keywords_of_update_are_told_to_compile():
    x = jnp.ones(2)
    learner = braintrace.compile(Gained(), "d_rtrl", x, kwargs={"gain": 1.0})
    np.testing.assert_allclose(learner(x, gain=2.0), 4.0)
    found = learner.etrace_grad(
        jnp.ones((4, 2)), step_fn=lambda x: jnp.sum(learner(x, gain=3.0)), reduction="sum"
    )
    assert bool((found["w",] > 0).all())
    with pytest.raises(ValueError, match="kwargs=") as error:
        braintrace.compile(Gained(), "d_rtrl", x)(x, gain=2.0)
    assert_designed(error, "keywords of `update`")
    with pytest.raises(braintrace.NotSupportedError) as error:
        braintrace.compile(
            Gained(), "d_rtrl", x[None], batch_size=1, vmap=True, kwargs={"gain": jnp.ones(1)}
        )
    assert_designed(error, "gain")


def test_step_function_must_call_the_learner():
    cell = Gained()
    learner = braintrace.compile(cell, "d_rtrl", jnp.ones(2))
    xs = jnp.ones((4, 2))
    with pytest.raises(ValueError, match="does not call the learner") as error:
        learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(cell(x)))
    assert_designed(error, "learner(x)")
    old, learner = learner, braintrace.compile(Gained(), "d_rtrl", jnp.ones(2))
    with pytest.raises(ValueError) as error:
        learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(old(x)))
    assert_designed(error, "notebook", "define step_fn again")
    with pytest.raises(ValueError, match="does not call the learner"):
        learner.etrace_train(xs, step_fn=lambda x: jnp.sum(cell(x)), optimizer=optax.sgd(0.1))
    once = brainstate.transform.jit(lambda x: jnp.sum(learner(x)))
    learner.etrace_grad(xs, step_fn=once)
    learner.etrace_grad(xs, step_fn=once)  # traced before
