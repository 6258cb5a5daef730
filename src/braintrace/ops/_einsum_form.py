"""Contractions `y = einsum(equation, x, w)` of one input with one weight, and their features.

Letters of x alone are summed; every letter of w is in x or in y. With `free` = the letters of y
that are not in w, dy/dw in trace coordinates is x itself:

    y[free, w∩y] = Σ x[free, w∩x] w[w]      features[free, w] = x[free, w∩x], constant along w∖x
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._operator import ETPPrimitive, Params, Rules, Shape, Shapes, Weights, register_primitive
from ._twin import twins


@dataclass(frozen=True, slots=True)
class EinsumForm:
    """The letters of the axes of x, of the weight and of y."""

    x: str
    w: str
    y: str

    @staticmethod
    def parse(equation: str) -> EinsumForm:
        """Split a well-formed equation `x,w->y`."""
        operands, y = equation.split("->")
        x, w = operands.split(",")
        return EinsumForm(x, w, y)

    def apply(self, x: Array, w: Array) -> Array:
        """y, as one `dot_general` whose axes can be followed (see `_ties`)."""
        dtype = jnp.result_type(x, w)
        x, w = self._summed(x).astype(dtype), w.astype(dtype)
        left = self._unsummed
        shared = [l for l in left if l in self.w]
        batch = [l for l in shared if l in self.y]
        contracted = [l for l in shared if l not in self.y]
        index = lambda letters, spec: tuple(spec.index(l) for l in letters)
        out = lax.dot_general(
            x,
            w,
            (
                (index(contracted, left), index(contracted, self.w)),
                (index(batch, left), index(batch, self.w)),
            ),
        )
        order = batch + [l for s in (left, self.w) for l in s if l not in shared]
        return jnp.transpose(out, index(self.y, order))

    def features(self, x: Array) -> Array:
        """dy/dw, broadcastable to (*free, *w.shape)."""
        x = self._summed(x)
        size = dict(zip(self._unsummed, x.shape, strict=True))
        order = [l for l in self.y if l not in self.w] + [l for l in self.w if l in size]
        x = jnp.transpose(x, [self._unsummed.index(l) for l in order])
        free = [size[l] for l in self.y if l not in self.w]
        return x.reshape((*free, *(size.get(l, 1) for l in self.w)))

    def pull(self, x: Array, c: Array, like: Shape) -> Array:
        """The gradient of w, summed over a leading axis of x and c."""
        place = {l: i + 1 for i, l in enumerate(dict.fromkeys(self.x + self.w + self.y))}
        index = lambda letters: [place[l] for l in letters]
        x = jax.vmap(self._summed)(x)
        dtype = jnp.result_type(x, c)
        of_x, of_c = self._unsummed, self.y
        # One axis of all steps and samples: XLA's CPU products over two transpose copies of both.
        # On several devices the samples may be divided among them.
        one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
        while one_cpu and of_x and of_x[0] == of_c[:1] and of_x[0] not in self.w:
            of_x, of_c = of_x[1:], of_c[1:]
            x, c = (a.reshape((-1, *a.shape[2:])) for a in (x, c))
        left, right = [0, *index(of_x)], [0, *index(of_c)]
        out = jnp.einsum(x.astype(dtype), left, c.astype(dtype), right, index(self.w))
        return _as_gradient(out, like)

    @property
    def _unsummed(self) -> str:
        return "".join(l for l in self.x if l in self.w or l in self.y)

    def _summed(self, x: Array) -> Array:
        gone = tuple(i for i, l in enumerate(self.x) if l not in self._unsummed)
        return jnp.sum(x, axis=gone) if gone else x


def biased(form: EinsumForm) -> Callable[..., Array]:
    """The contraction as a primitive's function, with an optional bias on the last axes of y."""

    def function(x: Array, weight: Array, bias: Array | None = None, *, has_bias: bool = False):
        y = form.apply(x, weight)
        return y if bias is None else y + bias

    return function


def biased_features(form: EinsumForm) -> Callable[..., Weights]:
    """The features of `biased(form)`, whatever its other static parameters."""

    def features(x: Array, shapes: Shapes, **static: object) -> Weights:
        return with_bias_features(form.features(x), shapes)

    return features


def with_bias_features(weight: Array, shapes: Shapes) -> Weights:
    """Add a bias, where there is one: a row of the weight whose input is 1."""
    out = {"weight": weight}
    if "bias" in shapes:
        out["bias"] = jnp.ones(shapes["bias"].shape, shapes["bias"].dtype)
    return out


def biased_rules(form: EinsumForm) -> Rules:
    """Hand-written forms for `biased(form)`."""

    def pull(x: Array, c: Array, shapes: Shapes, **static: object) -> Weights:
        out = {"weight": form.pull(x, c, shapes["weight"])}
        if "bias" in shapes:
            bias = shapes["bias"]
            out["bias"] = _as_gradient(c.sum(tuple(range(c.ndim - len(bias.shape)))), bias)
        return out

    def part(weights: Weights, axis: int, start: int, stop: int, **static: object) -> Array | None:
        letter = form.x[axis]
        if letter not in form.w or letter in form.y:
            return None
        return lax.slice_in_dim(weights["weight"], start, stop, axis=form.w.index(letter))

    def of_part(x: Array, rows: Array, **static: object) -> Array:
        return form.apply(x, rows)

    return Rules(features=biased_features(form), pull=pull, part=part, of_part=of_part)


def _as_gradient(value: Array, like: Shape) -> Array:
    real = not jnp.issubdtype(like.dtype, jnp.complexfloating)
    return (value.real if real else value).astype(like.dtype)


def biased_pair(batched: str, single: str, form: EinsumForm) -> tuple[ETPPrimitive, ETPPrimitive]:
    """Operators of these names with an optional bias: with a batch axis, and as `form` says."""

    def primitive(name: str, form: EinsumForm, batched: bool) -> ETPPrimitive:
        return register_primitive(
            name,
            biased(form),
            batched=batched,
            trainable_invars_fn=weight_and_bias,
            rules=biased_rules(form),
        )

    with_batch = EinsumForm(f"b{form.x}", form.w, f"b{form.y}")
    return twins(primitive(batched, with_batch, True), primitive(single, form, False))


def weight_and_bias(params: Params) -> dict[str, int]:
    """Positions of the trained operands of `biased`."""
    return {"weight": 1, "bias": 2} if params.get("has_bias") else {"weight": 1}
