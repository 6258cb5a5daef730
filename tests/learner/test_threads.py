"""One learner shared by threads: calls wait for each other, no array is given away twice."""

import threading

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

T, I, N = 40, 3, 5
XS = jnp.ones((T, I))


class Cell(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full((I, N), 0.1))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(N))

    def update(self, x):
        self.h.value = jnp.tanh(0.9 * self.h.value + braintrace.matmul(x, self.w.value))
        return self.h.value


def at_once(call, n=4, times=5):
    """Run a function in threads at once; raise the first error of any."""
    errors = []

    def run():
        try:
            for _ in range(times):
                call()
        except Exception as error:  # raised below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("way", ["etrace_grad", "etrace_train", "call"])
def test_threads_share_a_learner(way):
    learner = braintrace.compile(Cell(), "d_rtrl", XS[0])
    loss = lambda x: (learner(x) ** 2).sum()
    calls = {
        "etrace_grad": lambda: learner.etrace_grad(XS, step_fn=loss),
        "etrace_train": lambda: learner.etrace_train(XS, step_fn=loss, optimizer=optimizer),
        "call": lambda: learner(XS[0]),
    }
    optimizer = optax.sgd(1e-3)
    calls[way]()
    learner.reset()
    before = np.asarray(learner.model4compile.w.value)
    at_once(calls[way])
    steps = 20 if way == "call" else 20 * T
    assert learner.running_index.value == steps
    moved = np.abs(learner.model4compile.w.value - before).max()
    assert (moved > 0) == (way == "etrace_train")


def test_threads_share_a_learner_of_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Leaky(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full((I, N), 0.1))
            self.h = nnx.Variable(jnp.zeros(N))

        def __call__(self, x):
            self.h[...] = 0.9 * self.h[...] + x @ self.w[...]
            return self.h[...]

    learner = braintrace.compile(Leaky(), "d_rtrl", XS[0])
    gradient = learner.grad(lambda out: (out**2).sum())
    at_once(lambda: gradient(XS))
    assert learner.carry.steps == 20 * T
