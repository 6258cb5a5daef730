"""A linear map between the slots of an operator, at every place: the kept Jacobian, or a product.

Slots are few, and usually one, so that its products are arithmetic on arrays of places.

Zero is zero: reverse mode ends where nothing arrives, whatever it would be multiplied with, and so
must a product here. Of two factors the one that is earlier in time decides. With one unit, whose
state is h' = sqrt(where(done, 0, h)) + w x,

    D eps    from h = 0, D = inf, but nothing was deposited before the first step: eps = 0 stays 0
    D^T q    of a step with `done`, D = 0: q = inf, from the next step, is not passed on
    P D      the same: what happens to h after a reset is nothing to what was before it
    f q      the weight did not move h, f = 0: that h is singular later is nothing to the weight
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import jax
import jax.numpy as jnp
from jax import Array

_WRITTEN_OUT = 4  # products of matrices up to this size are sums of products of arrays


class Width(Enum):
    """How many slots a map is between: one, a few that are written out, or a table of them."""

    ONE = auto()
    FEW = auto()
    TABLE = auto()


@dataclass(frozen=True, slots=True)
class Transition:
    """Maps from slots to slots: (*lead, *places), or with two axes of slots behind, (to, from).

    `singular` says that entries may be infinite. Vectors are (*lead, *places), with an axis of
    slots behind where there is more than one: a loop need not copy an axis of one into place.
    """

    array: Array
    width: Width
    singular: bool

    @staticmethod
    def of(jacobian: Array, table: bool, singular: bool) -> Transition:
        """From an array with both axes of slots; `table` if there are many."""
        if jacobian.shape[-1] == 1:
            return Transition(jacobian[..., 0, 0], Width.ONE, singular)
        return Transition(jacobian, Width.TABLE if table else Width.FEW, singular)

    @property
    def jacobian(self) -> Array:
        """The array with both axes of slots."""
        return self.array[..., None, None] if self.width is Width.ONE else self.array

    def vector(self, array: Array) -> Array:
        """An array with an axis of slots as a vector of this map."""
        return array.reshape(array.shape[:-1]) if self.width is Width.ONE else array

    def slots(self, vector: Array) -> Array:
        """The inverse of `vector`."""
        return vector[..., None] if self.width is Width.ONE else vector

    def places(self, array: Array) -> tuple[int, ...]:
        """The axes of places of an array like this one."""
        return array.shape if self.width is Width.ONE else array.shape[:-2]

    def identity(self, places: tuple[int, ...]) -> Transition:
        """The map that leaves everything as it is, at these places."""
        if self.width is Width.ONE:
            return replace(self, array=jnp.ones(places, self.array.dtype))
        n = self.array.shape[-1]
        eye = jnp.eye(n, dtype=self.array.dtype)
        return replace(self, array=jnp.broadcast_to(eye, (*places, n, n)))

    def apply(self, vector: Array) -> Array:
        """D v. Axes of places with one entry in D repeat; they may have more in v."""
        D = self.array
        if self.width is Width.ONE:
            return self._product(D, vector)
        if self.width is Width.FEW:
            n = D.shape[-1]
            return _sum([self._product(D[..., j], vector[..., j : j + 1]) for j in range(n)])
        if self.singular:
            once = tuple(a for a in range(vector.ndim - 1) if D.shape[a] == 1)
            D = jnp.where((vector != 0).any(once, keepdims=True)[..., None, :], D, 0)
        return _contracted(D, vector)

    def transpose(self, vector: Array, masked: bool = False) -> Array:
        """D^T q; if `masked`, a q of zero counts as zero whatever it meets."""
        D, q = self.array, vector
        if self.width is Width.ONE:
            return self._product(q, D, masked)
        if self.width is Width.FEW:  # transposed slot by slot: D of all steps would be copied
            n = D.shape[-1]
            out = _sum([self._product(q[..., k : k + 1], D[..., k, :]) for k in range(n)])
        else:
            out = _contracted(jnp.swapaxes(D, -1, -2), q)
            out = jnp.where((D == 0).all(-2), 0, out) if self.singular else out
        return jnp.where((q == 0).all(-1, keepdims=True), 0, out) if masked else out

    def compose(self, earlier: Transition) -> Transition:
        """This map after an earlier one."""
        P, D = self.array, earlier.array
        if self.width is Width.ONE:
            return replace(self, array=self._product(P, D))
        n = D.shape[-1]
        if n > _WRITTEN_OUT:
            out = P @ D
            out = jnp.where((D == 0).all(-2, keepdims=True), 0, out) if self.singular else out
        else:
            out = _sum([self._product(P[..., m : m + 1], D[..., m : m + 1, :]) for m in range(n)])
        return replace(self, array=out)

    def _product(self, later: Array, earlier: Array, masked: bool = False) -> Array:
        return product(later, earlier, self.singular, masked)


jax.tree_util.register_dataclass(
    Transition, data_fields=["array"], meta_fields=["width", "singular"]
)


def product(later: Array, earlier: Array, singular: bool = True, masked: bool = False) -> Array:
    """`later * earlier`, zero where `earlier` is, if that may meet infinity: see above.

    If `masked`, it is zero where `later` is too.
    """
    out = later * earlier
    if singular:
        out = jnp.where(earlier == 0, jnp.zeros((), out.dtype), out)
    return jnp.where(later == 0, jnp.zeros((), out.dtype), out) if masked else out


def _sum(terms: list[Array]) -> Array:
    return sum(terms[1:], terms[0])


def _contracted(D: Array, vector: Array) -> Array:
    """The product of matrices and vectors; axes along which D repeats are not written out."""
    axes = range(vector.ndim - 1)
    varying = [a for a in axes if D.shape[a] != 1]
    flat = D.reshape([D.shape[a] for a in varying] + list(D.shape[-2:]))
    k, j = vector.ndim - 1, vector.ndim
    return jnp.einsum(flat, [*varying, j, k], vector, [*axes, k], [*axes, j])
