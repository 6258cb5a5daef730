"""Small models: a step function over named parameters and states, with random numbers of a name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np


class Net(brainstate.nn.Module):
    """Parameters, and states: arrays, or what is a state already; anything else is kept as is."""

    def __init__(self, update: Callable, params: dict[str, Any], states: dict[str, Any]):
        super().__init__()
        self._update = update
        for name, value in params.items():
            setattr(self, name, brainstate.ParamState(value))
        for name, value in states.items():
            arrays = all(isinstance(a, jax.Array | np.ndarray) for a in jax.tree.leaves(value))
            state = arrays and not isinstance(value, brainstate.State)
            setattr(self, name, brainstate.HiddenState(value) if state else value)

    def update(self, x: Any) -> Any:
        return self._update(self, x)


def net(params: dict[str, Any], states: dict[str, Any]):
    """Decorator: a step function made into a model."""
    return lambda update: Net(update, params, states)


class Draw:
    """Random numbers of a test, the same in every run."""

    def __init__(self, name: str):
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, *shape: int, scale: float = 0.7) -> jax.Array:
        return jnp.asarray(scale * self.rng.normal(size=shape))

    def complex(self, *shape: int) -> jax.Array:
        return self(*shape) + 1j * self(*shape)


def small(params: dict[str, Any], states: dict[str, Any], x: Any = None):
    """Decorator: a step function made into a maker of a model, `maker(draw)`, of these shapes.

    With `x`, a shape or a sequence of inputs, the maker returns it beside the model.
    """

    def maker(update: Callable) -> Callable:
        def make(draw: Draw) -> Any:
            drawn = [
                {name: draw(*np.atleast_1d(shape)) for name, shape in shapes.items()}
                for shapes in (params, states)
            ]
            return Net(update, *drawn) if x is None else (Net(update, *drawn), x)

        make.__name__ = update.__name__
        return make

    return maker


@jax.custom_jvp
def spike(v):
    """A step with a surrogate derivative."""
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + jnp.abs(3 * v)) ** 2
