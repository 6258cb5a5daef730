"""What the tests of errors share: what a message must have, and a model of one function."""

import re

import brainstate
import jax.numpy as jnp
import pytest

import braintrace

from .reference import (
    normal,
)

X = jnp.ones(2)
XS = normal(0, 4, 2)


def text_of(error: BaseException) -> str:
    """The message with the notes attached to it."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def assert_designed(error: pytest.ExceptionInfo, *parts: str, here: bool = False) -> None:
    """Why and do are there, the parts are named, and the line of a test or a model if `here`."""
    assert not isinstance(error.value, AssertionError)
    text = text_of(error.value)
    for part in ("why:", "do:", *parts):
        assert part in text, f"{part!r} is missing in:\n{text}"
    if here:
        assert "where:" in text and re.search(r"(test_errors\w*|designed)\.py:\d", text), text


class Step(brainstate.nn.Module):
    """A model made of one update function."""

    def __init__(self, update, state=None, weight=None):
        super().__init__()
        self.rule = update
        self.w = brainstate.ParamState(normal(0, 2, 3) if weight is None else weight)
        self.h = brainstate.HiddenState(jnp.zeros(3) if state is None else state)

    def update(self, x):
        return self.rule(self, x)


def integrate(model, x):
    model.h.value = 0.5 * model.h.value + braintrace.matmul(x, model.w.value)
    return model.h.value
