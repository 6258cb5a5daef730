"""What the recurrent cells share; `[a, b]` is the concatenation of a and b, W a `Linear` layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init
from jax import Array

from .._errors import value_error
from ._linear import Linear
from ._shapes import ZERO, Init, Layer, Size, batched, one_of

Activation = str | Callable[[Array], Array]


class Orthogonal(init.Orthogonal):
    """Of any precision: linear algebra takes nothing below float32, so it is rounded afterwards."""

    def __call__(self, shape: Size, **kwargs: Any) -> Array:
        dtype = kwargs.pop("dtype", brainstate.environ.dftype())
        wide = jnp.promote_types(dtype, jnp.float32)
        return super().__call__(shape, dtype=wide, **kwargs).astype(dtype)


ORTHOGONAL = Orthogonal()


def identity(x: Array) -> Array:
    """x itself."""
    return x


def positive(x: Array) -> Array:
    """x + 1/2 above zero, σ(x) below: never negative, so that its logarithm may be taken."""
    return jnp.where(x >= 0, x + 0.5, jax.nn.sigmoid(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    name: getattr(brainstate.nn, name)
    for name in """
    celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid mish relu
    relu6 selu sigmoid silu soft_sign softplus squareplus swish tanh
    """.split()
} | {"identity": identity, "positive": positive}


def activation_of(name: Activation) -> Callable[[Array], Array]:
    """A function of its own, or one by name: of `brainstate.nn`, `identity` or `positive`."""
    if callable(name):
        return name
    do = "use one of these names, or pass a function."
    return one_of("activation", name, ACTIVATIONS, do)


class Cell(Layer):
    """Sizes, layers, and hidden states called `state_names`, each of `state_size`.

    A cell whose only state is `h` writes `_next(x, h)`, others `update(x)`.
    """

    _next: Callable[[Array, Array], Array]

    state_names: tuple[str, ...] = ("h",)
    _reads: tuple[tuple[str, str], ...] = ()  # layers, and what they read: x, h or xh, both joined

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        state_init: Init = ZERO,
        activation: Activation = identity,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        self.state_size: tuple[int, ...] = self.out_size
        self.state_init = state_init
        self.activation = activation_of(activation)

    def _add_layers(self, w_init: Init, b_init: Init | None) -> None:
        """Set the layers of `_reads` as attributes."""
        for name, reads in self._reads:
            setattr(self, name, self._layer(reads, w_init, b_init))

    def _layer(self, reads: str, w_init: Init, b_init: Init | None) -> Linear:
        size = {"x": self.in_size[-1], "h": self.out_size[-1]}
        n_in = sum(size[letter] for letter in reads)
        return Linear((*self.in_size[:-1], n_in), self.out_size, w_init, b_init)

    def _initial(self, batch_size: int | None) -> Array:
        return batched(self.state_init, self.state_size, batch_size)

    def init_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        """Create the hidden states, with a leading batch axis if there is a `batch_size`."""
        for name in self.state_names:
            setattr(self, name, brainstate.HiddenState(self._initial(batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        """Set the hidden states to their initial values."""
        for name in self.state_names:
            getattr(self, name).value = self._initial(batch_size)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the new state."""
        self.h.value = self._next(x, self.h.value)
        return self.h.value


class Gated(Cell):
    """The constructor of cells with several layers, those of `_reads`."""

    _w_init: Init = ORTHOGONAL
    _activation: Activation = "tanh"

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init | None = None,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: Activation | None = None,
        name: str | None = None,
    ):
        activation = self._activation if activation is None else activation
        super().__init__(in_size, out_size, state_init, activation, name)
        self._add_layers(self._w_init if w_init is None else w_init, b_init)


def join(x: Array, h: Array) -> Array:
    """`[x, h]`."""
    return jnp.concatenate([x, h], axis=-1)


def radii(what: str, n: int, least: float, most: float) -> Array:
    """Moduli of n eigenvalues, uniform in the area of a ring; never quite 0 or 1."""
    if not 0 <= least < most <= 1:
        raise value_error(
            f"{what}: r_min is {least} and r_max is {most}.",
            why="an eigenvalue's modulus is drawn between them; beyond 1 the states explode.",
            do="choose 0 <= r_min < r_max <= 1.",
        )
    area = brainstate.random.uniform(1e-4, 1 - 1e-4, (n,))
    return jnp.sqrt(area * (most**2 - least**2) + least**2)
