"""Spikes and their surrogate derivatives: `height * shape((V - V_th) / width)`, shape(0) = 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import value_error
from ._shapes import one_of
from ._time import refuted


def _multi_gaussian(a: Array) -> Array:
    # A bump between two wide and shallow dents, six times as wide, one width to either side.
    def side(b: Array) -> Array:
        return jnp.exp(-((b / 6) ** 2) / 2) / 6

    dents = 0.15 * (side(a - 1) + side(a + 1))
    return (1.15 * jnp.exp(-(a**2) / 2) - dents) / (1.15 - 0.05 * math.exp(-1 / 72))


SHAPES: dict[str, Callable[[Array], Array]] = {
    "arctan": lambda a: 1 / (1 + a**2),
    "fast_sigmoid": lambda a: 1 / (1 + jnp.abs(a)) ** 2,
    "gaussian": lambda a: jnp.exp(-(a**2) / 2),
    "multi_gaussian": _multi_gaussian,
    "sigmoid": lambda a: 4 * jax.nn.sigmoid(a) * jax.nn.sigmoid(-a),
    "triangle": lambda a: jnp.maximum(0, 1 - jnp.abs(a)),
}


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A step from 0 to 1 at 0 with a surrogate derivative."""

    name: str
    width: float
    height: float

    def __call__(self, v: Array) -> Array:
        return _step(self, v)

    def derivative(self, v: Array) -> Array:
        return self.height * SHAPES[self.name](v / self.width)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _step(spike: Surrogate, v: Array) -> Array:
    return jnp.asarray(v > 0, jnp.result_type(v))


@_step.defjvp
def _step_jvp(
    spike: Surrogate, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (v,), (dv,) = primals, tangents
    return _step(spike, v), dv * spike.derivative(v)


def surrogate(
    name: str | Callable[[Array], Array], width: float = 1.0, height: float = 0.3
) -> Callable[[Array], Array]:
    """A spike function by name, with the width and height of its derivative.

    With `a = v / width`, the shapes are `arctan`: 1/(1 + a²), `fast_sigmoid`: 1/(1 + |a|)²,
    `gaussian`: exp(-a²/2), `multi_gaussian`: a gaussian with negative flanks, `sigmoid`:
    4 σ(a) σ(-a), `triangle`: max(0, 1 - |a|).

    Args:
        name: one of these, or a function `v -> spike` of its own, returned as it is.
        width: how far from the threshold the derivative reaches, in thresholds.
        height: the derivative at the threshold.

    Returns:
        A function of `(V - threshold) / V_th`: 1 where it is positive, 0 elsewhere.

    Raises:
        ValueError: if no shape has this name, a number is not positive, or a function lets no
            gradient through.

    Example:
        >>> import jax, braintrace
        >>> spike = braintrace.nn.surrogate("triangle", width=2.0, height=1.0)
        >>> float(spike(-1.0)), float(jax.grad(spike)(-1.0))
        (0.0, 0.5)
    """
    if callable(name):
        _check(name)
        return name
    one_of("surrogate", name, SHAPES, "use one of these names, or pass a function of v.")
    for label, value in (("width", width), ("height", height)):
        if not value > 0:
            raise value_error(
                f"surrogate: {label} is {value}.",
                why="a derivative without extent lets no gradient through.",
                do=f"make {label} positive.",
            )
    return Surrogate(name, float(width), float(height))


def _check(spike: Callable[[Array], Array]) -> None:
    """Refuse a plain step: its derivative is zero, and nothing would be learned through it."""
    v = jnp.linspace(-0.5, 0.5, 5)
    z, slope = jax.jvp(spike, (v,), (jnp.ones_like(v),))
    if not jnp.issubdtype(z.dtype, jnp.inexact) or refuted(jnp.any(slope != 0)):
        raise value_error(
            f"surrogate: the derivative of {getattr(spike, '__name__', spike)} is zero.",
            why="a spike is a step, and without a derivative of its own it passes no gradient.",
            do="take one by name, such as 'triangle', one of braintools.surrogate, or define "
            "the derivative with jax.custom_jvp.",
        )
