"""What JAX alone cannot know: precision, copies, transformations around a learner."""

import copy
import pickle

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace

from .designed import XS, X, assert_designed
from .reference import (
    Leaky,
    assert_close,
    bptt,
    leaky,
    online,
    squares,
    values,
)

BATCH = jnp.ones((3, 2))


def test_states_of_64_bits_while_jax_computes_in_32():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    before = values(learner)
    with jax.enable_x64(False):
        xs = jnp.ones((4, 2))
        for call in (
            lambda: learner(xs[0]),
            lambda: learner.etrace_grad(xs, step_fn=lambda x: squares(learner(x))),
            lambda: braintrace.D_RTRL(learner.model4compile).compile_graph(xs[0]),
        ):
            with pytest.raises(ValueError) as error:
                call()
            assert_designed(error, "float64", "jax_enable_x64 is switched off")
        narrow = braintrace.compile(Leaky(), "d_rtrl", xs[0])
        assert narrow(xs[0]).dtype == jnp.float32
    narrow(xs[0])  # and 32 bits stay 32 bits
    assert all(a is b for a, b in zip(values(learner).values(), before.values(), strict=True))


@pytest.mark.parametrize("vmap", [False, True])
def test_learner_cannot_be_pickled_and_can_be_copied(vmap):
    options = {"vmap": True, "batch_size": 3} if vmap else {}
    x = BATCH if vmap else X
    learner = braintrace.compile(Leaky(), "d_rtrl", x, **options)
    with pytest.raises(TypeError) as error:
        pickle.dumps(learner)
    assert_designed(error, "cannot be pickled", "learner.save", "learner.load")
    learner(x)
    twin, shared = copy.deepcopy(learner), copy.copy(learner)
    assert vmap or twin._losses is not learner._losses
    want = twin(2 * x)  # with states of its own
    np.testing.assert_array_equal(learner(2 * x), want)
    assert not np.array_equal(shared(2 * x), want)  # with those of the learner: a step later


def fast_square(value):
    return sum((g**2).sum() for g in jax.tree.leaves(value))


SECOND = {
    "hessian": lambda f, theta: brainstate.transform.hessian(f, theta)(),
    "gradient of a gradient": lambda f, theta: brainstate.transform.grad(
        lambda: fast_square(brainstate.transform.grad(f, theta)()), theta
    )(),
}


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_second_derivative_through_a_learner_is_refused(rule, second):
    learner = braintrace.compile(Leaky(), rule, X)
    with pytest.raises(braintrace.NotSupportedError) as error:
        second(lambda: squares(learner(X)), learner.param_states)
    assert_designed(error, "differentiated once more", "the model itself")


def test_gradient_of_a_sequence_is_refused_as_a_function_of_the_inputs():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    total = lambda xs: fast_square(learner.etrace_grad(xs, step_fn=lambda x: squares(learner(x))))
    with pytest.raises(braintrace.NotSupportedError) as error:
        brainstate.transform.grad(total)(XS)
    assert_designed(error, "differentiated once more")


def test_gradient_of_a_sequence_is_refused_as_a_function_of_the_parameters_of_its_step():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    scale = brainstate.ParamState(jnp.asarray(2.0))
    step = lambda x: squares(learner(x) * scale.value)
    total = lambda: fast_square(learner.etrace_grad(XS, step_fn=step, weights=learner.param_states))
    with pytest.raises(braintrace.NotSupportedError) as error:
        brainstate.transform.grad(total, scale)()
    assert_designed(error, "differentiated once more")


RAW = {
    "checkpoint": lambda f: jax.checkpoint(f),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[0],
    "jit": lambda f: jax.jit(f),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_learner_inside_of_a_transformation_of_jax_is_refused(raw):
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    loss = lambda x: squares(raw(learner)(x))
    for call in (
        lambda: brainstate.transform.grad(loss, learner.param_states)(X),
        lambda: learner.etrace_grad(XS, step_fn=loss),
        lambda: learner.etrace_grad(XS, step_fn=loss, block_size=1),
    ):
        with pytest.raises(braintrace.NotSupportedError) as error:
            call()
        assert_designed(error, "inside of a transformation of JAX", "brainstate.transform")
    assert_close(online(learner, XS), bptt(leaky(), XS))  # nothing has leaked into the states


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_transformation_of_jax_around_a_learner_is_refused(raw):
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    train = lambda x: learner.etrace_grad(XS * x.sum(), step_fn=lambda x: squares(learner(x)))
    twice = "differentiated once more" if raw is RAW["vjp"] else "inside of a transformation of JAX"
    for call, what in ((learner, "inside of a transformation of JAX"), (train, twice)):
        with pytest.raises(braintrace.NotSupportedError) as error:
            raw(call)(X)
        assert_designed(error, what)
    assert_close(online(learner, XS), bptt(leaky(), XS))


def test_learner_inside_of_a_checkpoint_of_brainstate():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    again = brainstate.transform.checkpoint(learner)
    total = lambda: brainstate.transform.for_loop(lambda x: squares(again(x)), XS).sum()
    got = brainstate.transform.jit(brainstate.transform.grad(total, learner.param_states))()
    assert_close(got, bptt(leaky(), XS))
