"""Steps that call Python: `pure_callback` without a `vmap_method` is run step by step."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace

from .reference import assert_alive, assert_close, normal

XS = normal(5, 6, 2)


@jax.custom_jvp
def called(x):
    return jax.pure_callback(lambda a: 2 * np.asarray(a), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


called.defjvp(lambda x, t: (called(*x), 2 * t[0]))


def plain(x):
    return 2 * x


PLACES = {
    "input": lambda f, h, x: (h, f(x)),
    "state": lambda f, h, x: (f(h), x),
    "branch": lambda f, h, x: (lax.cond(x[0] > 0, f, plain, h), x),
}


class Calling(brainstate.nn.Module):
    def __init__(self, function, place):
        super().__init__()
        self.function, self.place = function, place
        self.w = brainstate.ParamState(normal(0, 2, 3))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x):
        h, x = self.place(self.function, self.h.value, x)
        self.h.value = 0.4 * jnp.tanh(h) + braintrace.matmul(x, self.w.value)
        return self.h.value


def gradient(model, rule, chunk=None, outer=plain):
    method = "multi-step" if chunk else "single-step"
    learner = braintrace.compile(model, rule, XS[0], vjp_method=method)
    wrap = braintrace.MultiStepData if chunk else lambda x: x
    loss = lambda x: (outer(learner(wrap(x))) ** 2).sum(-1)
    return learner.etrace_grad(XS, step_fn=loss, chunk_size=chunk)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("rule, chunk", [("d_rtrl", None), ("d_rtrl", 3), ("rtrl", None)])
def test_callback_in_the_step_that_cannot_be_mapped(place, rule, chunk):
    got = gradient(Calling(called, place), rule, chunk)
    assert_alive(got)
    assert_close(got, gradient(Calling(plain, place), rule, chunk))


def test_callback_in_the_loss_that_cannot_be_mapped():
    model = lambda: Calling(plain, PLACES["input"])
    assert_close(gradient(model(), "d_rtrl", outer=called), gradient(model(), "d_rtrl"))
