"""Nodes of NIR without weights that are no neurons: pools, delays, thresholds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._errors import value_error
from ...nn import surrogate as surrogate_of
from ...nn._cell import Cell
from ...nn._shapes import Layer

Array = jax.Array
POOLS = ("SumPool2d", "AvgPool2d")


class Pool(Layer):
    """The sums or means of windows of an image, channels first; padding counts as zeros."""

    def __init__(self, name: str, node: Any, shape: tuple[int, ...]):
        super().__init__()
        kind = type(node).__name__
        pair = lambda value: tuple(int(n) for n in np.broadcast_to(np.ravel(value), 2))
        self.node, self.window, self.stride = node, pair(node.kernel_size), pair(node.stride)
        self.padding = pair(node.padding)
        if len(shape) != 3 or min(*self.window, *self.stride) < 1 or min(self.padding) < 0:
            raise value_error(
                f"node {name!r} ({kind}) has a window {self.window}, stride {self.stride} and "
                f"padding {self.padding}, its input is {shape}.",
                why="a pool is over the height and width of an image (channels, height, width)",
                do="connect it to a Conv2d, and correct its numbers",
            )
        self.scale = 1.0 if kind == "SumPool2d" else 1.0 / (self.window[0] * self.window[1])
        sizes = zip(shape[1:], self.window, self.stride, self.padding, strict=True)
        space = tuple((n + 2 * p - w) // s + 1 for n, w, s, p in sizes)
        if min(space) < 1:
            raise value_error(
                f"node {name!r} ({kind}) has a window {self.window}, its input is {shape}.",
                why="nothing is left of an image that is smaller than the window",
                do="correct the file",
            )
        self.in_size, self.out_size = shape, (shape[0], *space)

    def update(self, x: Array) -> Array:
        """The pooled image."""
        lead = (1,) * (x.ndim - 2)
        padding = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in self.padding]
        window, stride = (*lead, *self.window), (*lead, *self.stride)
        return self.scale * lax.reduce_window(x, 0.0, lax.add, window, stride, padding)


class Delays(Cell):
    """What came in so many steps ago, for each number of the input its own."""

    state_names = ("past",)

    def __init__(self, name: str, node: Any, shape: tuple[int, ...], dt: float):
        super().__init__(shape, shape)
        delay = np.asarray(node.delay, np.float64)
        steps = np.broadcast_to(delay, shape) / dt if delay.size == 1 else delay / dt
        whole = np.round(steps)
        if steps.shape != shape or not (np.isfinite(steps) & (steps > -0.5)).all():
            raise value_error(
                f"node {name!r} (Delay) has the delays {delay}, its input is {shape}.",
                why="each number of the input has a delay, which is not negative",
                do="correct the file",
            )
        between = np.abs(steps - whole)
        if between.max() > 1e-3:
            raise value_error(
                f"node {name!r} (Delay) has a delay of {steps.flat[between.argmax()]:g} steps.",
                why="a simulation in steps knows the input at whole steps only",
                do="pass a dt that divides the delays, or round them in the file",
            )
        self.node, self.steps = node, whole.astype(int)
        self.longest = max(1, int(self.steps.max()))
        self.state_size = (self.longest, *shape)

    def update(self, x: Array) -> Array:
        """Advance one step; returns what arrives."""
        axis = -len(self.state_size)
        known = jnp.concatenate([jnp.expand_dims(x, axis), self.past.value], axis=axis)
        self.past.value = lax.slice_in_dim(known, 0, self.longest, axis=known.ndim + axis)
        index = np.expand_dims(self.steps, tuple(range(known.ndim + axis + 1)))
        index = np.broadcast_to(index, (*x.shape[: known.ndim + axis], 1, *self.out_size))
        return jnp.take_along_axis(known, jnp.asarray(index), axis=axis)[
            (..., 0, *(slice(None),) * len(self.out_size))
        ]


class Threshold(Layer):
    """1 where the input is above a threshold, 0 elsewhere, with the derivative of a spike."""

    def __init__(
        self,
        name: str,
        node: Any,
        shape: tuple[int, ...],
        surrogate: str | Callable[[Array], Array],
    ):
        super().__init__()
        value = np.asarray(node.threshold, brainstate.environ.dftype())
        if (value.size != 1 and value.shape != shape) or not np.isfinite(value).all():
            raise value_error(
                f"node {name!r} (Threshold) has the threshold {value}, its input is {shape}.",
                why="it has a finite number for each of these, or one for all",
                do="correct the file",
            )
        self.node, self.in_size, self.out_size = node, shape, shape
        self.threshold = jnp.asarray(
            np.broadcast_to(value.reshape(-1)[0] if value.size == 1 else value, shape)
        )
        self.scale = jnp.where(self.threshold > 0, self.threshold, 1.0)
        self.surrogate = surrogate_of(surrogate)

    def update(self, x: Array) -> Array:
        """The spikes."""
        return self.surrogate((x - self.threshold) / self.scale)
