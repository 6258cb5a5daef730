"""The one product: `y = einsum(equation, x, w) + bias`, of an input with a weight.

    matmul           bi,io,o->bo          one axis of samples, or none: i,io,o->o
    grouped          bgk,gkn,gn->bgn
    W @ x of JAX     bi,oi->bo            the samples first, whichever side the weight was on
    vmap             Zbi,io,o->Zbo        a letter more for what is mapped, and for y

Letters of x alone are summed; every letter of w is in x or in y, and those of a bias are in y. With
`free` = the letters of y that are not in w, dy/dw in coordinates of the trace is x itself:

    y[free, w∩y] = Σ x[free, w∩x] w[w]      features[free, w] = x[free, w∩x], constant along w∖x
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._operator import ETPPrimitive, Rules, Shapes, Weights
from ._twin import unit_parts


@dataclass(frozen=True, slots=True)
class Contraction:
    """The letters of the axes of x, of the weight, of y, and of a bias if there is one."""

    x: str
    w: str
    y: str
    bias: str | None = None

    @staticmethod
    def parse(equation: str) -> Contraction:
        """Split a well-formed equation, `x,w->y` or `x,w,bias->y`."""
        operands, y = equation.split("->")
        x, w, *bias = operands.split(",")
        return Contraction(x, w, y, *bias)

    def __str__(self) -> str:
        bias = "" if self.bias is None else f",{self.bias}"
        return f"{self.x},{self.w}{bias}->{self.y}"

    def apply(self, x: Array, w: Array, bias: Array | None = None, **how: Any) -> Array:
        """y, as one `dot_general` whose axes can be followed (see `_ties`)."""
        dtype = jnp.result_type(x, w)
        x, w = self._summed(x).astype(dtype), w.astype(dtype)
        lead, left, y = x.shape[: self._samples], self._unsummed, self.y
        if len(lead) > 1:  # one axis of all samples: XLA's CPU products over two transpose copies
            x = x.reshape((-1, *x.shape[len(lead) :]))
            left, y = left[len(lead) - 1 :], y[len(lead) - 1 :]
        # "bgk,gkn->bgn": left bgk, shared g k; g is in y, so it is a batch axis of the product, k
        # is not, so it is summed over. `dot_general` gives g b n, and the transposition b g n.
        shared = [l for l in left if l in self.w]
        batch, over = [l for l in shared if l in y], [l for l in shared if l not in y]
        index = lambda letters, spec: tuple(spec.index(l) for l in letters)
        axes_of = lambda letters: (index(letters, left), index(letters, self.w))
        out = lax.dot_general(x, w, (axes_of(over), axes_of(batch)), **how)
        order = batch + [l for s in (left, self.w) for l in s if l not in shared]
        out = jnp.transpose(out, index(y, order))
        if len(lead) > 1:
            out = out.reshape((*lead, *out.shape[1:]))
        if bias is None or self.bias is None:
            return out
        return out + lax.broadcast_in_dim(bias, out.shape, index(self.bias, self.y))

    @property
    def _samples(self) -> int:
        """How many axes of samples, that x and y begin with, become one: under `vmap`.

        On several devices they may be divided among these.
        """
        one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
        if not one_cpu or unit_parts() or not self.x[:1].isupper():
            return 0
        same = [a == b not in self.w for a, b in zip(self._unsummed, self.y, strict=False)]
        return [*same, False].index(False)

    def features(self, x: Array) -> Array:
        """dy/dw, broadcastable to (*free, *w.shape)."""
        x = self._summed(x)
        size = dict(zip(self._unsummed, x.shape, strict=True))
        order = [l for l in self.y if l not in self.w] + [l for l in self.w if l in size]
        x = jnp.transpose(x, [self._unsummed.index(l) for l in order])
        free = [size[l] for l in self.y if l not in self.w]
        return x.reshape((*free, *(size.get(l, 1) for l in self.w)))

    def pull(self, x: Array, c: Array, **how: Any) -> Array:
        """The gradient of w from inputs and cotangents of y that begin with a mapped axis.

        As a contraction of its own, `Zbi,Zbo->io`, it comes in the order of w. JAX's transpose of
        `apply` has the order (o, i), and a copy turns it round where samples are on a mesh.
        """
        x, n = self._summed(x), max(self._samples, 1)
        x, c = (a.reshape((-1, *a.shape[n:])) for a in (x, c))
        return Contraction(self._unsummed[n - 1 :], self.y[n - 1 :], self.w).apply(x, c, **how)

    def without_bias(self) -> Contraction:
        """The product alone."""
        return Contraction(self.x, self.w, self.y)

    def mapped(self, axes: tuple[int | None, ...]) -> Contraction:
        """The contraction under a `vmap` over some operands, whose first axis is the new one."""
        new = next(l for l in string.ascii_uppercase if l not in str(self))
        specs = (self.x, self.w, *([] if self.bias is None else [self.bias]))
        pairs = zip(specs, axes, strict=True)
        x, w, *bias = (s if a is None else f"{new}{s}" for s, a in pairs)
        return Contraction(x, w, f"{new}{self.y}", *bias)

    @property
    def _unsummed(self) -> str:
        return "".join(l for l in self.x if l in self.w or l in self.y)

    def _summed(self, x: Array) -> Array:
        gone = tuple(i for i, l in enumerate(self.x) if l not in self._unsummed)
        return jnp.sum(x, axis=gone) if gone else x


# ------------------------------------------------------------------------------------ primitives


def _contract(
    x: Array, weight: Array, bias: Array | None = None, *, equation: str, **how: Any
) -> Array:
    return Contraction.parse(equation).apply(x, weight, bias, **how)


def _features(x: Array, shapes: Shapes, *, equation: str, **how: Any) -> Weights:
    return with_bias_features(Contraction.parse(equation).features(x), shapes)


def _pull(x: Array, c: Array, shapes: Shapes, *, equation: str, **how: Any) -> Weights:
    form = Contraction.parse(equation)
    form = form.mapped((0, *(None for _ in shapes)))
    out = {"weight": form.pull(x, c, **how)}
    if form.bias is not None:
        of_y = [l for l in form.y if l in form.bias]
        total = c.sum(tuple(i for i, l in enumerate(form.y) if l not in of_y))
        out["bias"] = jnp.transpose(total, [of_y.index(l) for l in form.bias])
    real = lambda k: not jnp.issubdtype(shapes[k].dtype, jnp.complexfloating)
    return {k: (g.real if real(k) else g).astype(shapes[k].dtype) for k, g in out.items()}


def _part(
    weights: Weights, axis: int, start: int, stop: int, *, equation: str, **how: Any
) -> Array | None:
    form = Contraction.parse(equation)
    letter = form.x[axis]
    spread = form.bias is None or form.y.endswith(form.bias)
    if letter not in form.w or letter in form.y or not spread:
        return None
    return lax.slice_in_dim(weights["weight"], start, stop, axis=form.w.index(letter))


def _joint(*, equation: str, **how: Any) -> dict[str, int] | None:
    form = Contraction.parse(equation)
    specs = {"weight": form.w, "y": form.y} | ({} if form.bias is None else {"bias": form.bias})
    letters = [l for l in form.y if l not in form.x and all(l in s for s in specs.values())]
    return {k: spec.index(letters[-1]) for k, spec in specs.items()} if letters else None


_RULES = Rules(features=_features, pull=_pull, part=_part, joint=_joint)


def contraction(name: str, batched: ETPPrimitive | None = None) -> ETPPrimitive:
    """A primitive for contractions; `batched` is its name with samples, if it has none itself."""
    primitive = ETPPrimitive(name, _contract, weights=("weight", "bias"), rules=_RULES)

    def twin(operands, axes, params):
        if axes[0] is None and axes[1] is None:
            return None
        pairs = zip(operands, axes, strict=True)
        moved = [o if a is None else jnp.moveaxis(o, a, 0) for o, a in pairs]
        equation = str(Contraction.parse(params["equation"]).mapped(axes))
        target = primitive if batched is None or any(a is not None for a in axes[1:]) else batched
        return target.bind(*moved, **{**params, "equation": equation})

    primitive.twin = twin
    return primitive


def with_bias_features(weight: Array, shapes: Shapes) -> Weights:
    """Add a bias, where there is one: a row of the weight whose input is 1."""
    out = {"weight": weight}
    if "bias" in shapes:
        out["bias"] = jnp.ones(shapes["bias"].shape, shapes["bias"].dtype)
    return out


etp_mm = contraction("etp_mm")
etp_mv = contraction("etp_mv", etp_mm)
etp_gmm = contraction("etp_gmm")
etp_gmv = contraction("etp_gmv", etp_gmm)
etp_einsum = contraction("etp_einsum")
plain_dot = contraction("unmarked_dot_general")
