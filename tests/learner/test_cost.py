"""What a call costs: memory that does not grow, no second compilation."""

import os
import sys
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace._online import _blocks

from .reference import (
    XS,
    Leaky,
    compiles,
    leaky,
    learner_of,
    squares,
)


def temporaries(fun, xs):
    """Bytes the compiled function needs besides its inputs and outputs."""
    stateful = brainstate.transform.StatefulFunction(fun)
    stateful.make_jaxpr(xs)
    state = [s.value for s in stateful.get_states(xs)]
    compiled = jax.jit(stateful.jaxpr_call).lower(state, xs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def sequence_memory(make, length):
    algo = make()
    gradient = lambda xs: algo.etrace_grad(xs, step_fn=lambda x: squares(algo(x)))
    return temporaries(gradient, jnp.zeros((length, 2)))


def test_memory_of_a_sequence_gradient_grows_with_its_length_to_that_of_a_segment(monkeypatch):
    monkeypatch.setattr(_blocks, "SEGMENT", 1 << 15)
    monkeypatch.setattr(_blocks, "CACHED", 1 << 15)  # else 4,096 steps of 16 units are one block

    def make():
        return learner_of(leaky(n=16), jnp.zeros(2))

    short, long = sequence_memory(make, 512), sequence_memory(make, 4096)
    assert long <= 2 * short, (short, long)  # of eight times the steps


def test_memory_of_bptt_grows_with_the_length_of_the_sequence():
    model = leaky(n=16)
    params = model.states(brainstate.ParamState)

    def memory(length):
        loss = lambda xs: brainstate.transform.for_loop(lambda x: squares(model(x)), xs).sum()
        return temporaries(brainstate.transform.grad(loss, params), jnp.zeros((length, 2)))

    assert memory(1024) > 8 * memory(64)  # the control of the test above


class Counted(Leaky):
    traced = 0

    def update(self, x):
        type(self).traced += 1
        return super().update(x)


def test_second_call_under_jit_neither_traces_nor_compiles():
    model = Counted()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    grad = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)
    fast = brainstate.transform.jit(grad)
    fast(XS[0])
    before = Counted.traced
    assert compiles(lambda: fast(XS[1])) == 0
    assert Counted.traced == before


@pytest.mark.parametrize("with_grad", [False, True], ids=["call", "grad"])
def test_second_eager_call_compiles_nothing(with_grad):
    algo = learner_of(leaky(), XS[0])
    grad = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)
    run = grad if with_grad else algo
    run(XS[0])
    run(XS[1])
    assert compiles(lambda: run(XS[2])) == 0


def passed(call):
    """Functions of the library that a call runs, and its calls from one room into another."""
    package = str(Path(braintrace.__file__).parent) + os.sep
    inside = lambda frame: frame.f_code.co_filename.startswith(package)
    room = lambda frame: frame.f_code.co_filename.removeprefix(package).split(os.sep)[0]
    functions, between = 0, []

    def note(frame, event, arg):
        nonlocal functions
        if event != "call" or not inside(frame):
            return
        functions, caller = functions + 1, frame.f_back
        while caller is not None and not inside(caller):
            caller = caller.f_back
        if caller is not None and room(caller) != room(frame):
            between.append((room(caller), room(frame)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return functions, between


def test_a_gradient_that_is_compiled_already_passes_through_few_rooms():
    algo = learner_of(leaky(), XS[0])
    step = lambda x: squares(algo(x))
    for _ in range(2):
        algo.etrace_grad(XS, step_fn=step)
    functions, between = passed(lambda: algo.etrace_grad(XS, step_fn=step))
    assert functions <= 700
    assert len(between) <= 14, between
