"""Step functions that do more than call the learner, around random programs.

A case is `('around', kinds, program)`; `kinds` says what the step function does besides:

    'encode'     a parameter of its own on the input, before the call
    'read_out'   a parameter of its own on the output, after the call
    'feedback'   a state of its own, from the output to the next input
    'again'      the program's own operator is registered again for another function, and run again
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
from programs import N_IN, N_OUT, Choose, Program, Spec, fit, numbers, program

KINDS = ("encode", "read_out", "feedback", "again")


def case(choose: Choose) -> Spec:
    """A random program, and what is around it."""
    kinds = tuple(k for k in KINDS if choose((False, True)))
    states, lets, updates, output = program(choose)
    if "again" in kinds:
        updates = (("add", ("gain", 0, "own", "x"), updates[0]), *updates[1:])
    return "around", kinds, (states, lets, updates, output)


def random_case(seed: int) -> Spec:
    return case(random.Random(seed).choice)


class Wrapped(Program):
    """A program with parameters and a state that only the step function uses."""

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.enc = brainstate.ParamState(numbers("enc", N_IN, N_IN))
        self.read = brainstate.ParamState(numbers("read", N_OUT, N_OUT))
        self.back = brainstate.ShortTermState(numbers("back", N_IN))


def step_around(model: Wrapped, kinds: tuple[str, ...]) -> Callable[..., Any]:
    """`step(net, x, target)` to the loss of a step."""

    def step(net: Any, x: Any, target: Any) -> Any:
        if "feedback" in kinds:
            x = x + 0.5 * model.back.value
        if "encode" in kinds:
            x = jnp.tanh(x @ model.enc.value)
        out = net(x)
        if "feedback" in kinds:
            model.back.value = fit(jnp.tanh(out), (N_IN,))
        if "read_out" in kinds:
            out = out @ model.read.value
        return 0.5 * jnp.sum((out - target) ** 2)

    return step
