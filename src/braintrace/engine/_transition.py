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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_WRITTEN_OUT = 4  # maps of up to so many slots are sums of products of arrays


class Width(Enum):
    """How many slots a map is between: one, a few that are written out, or a table of them."""

    ONE = auto()
    FEW = auto()
    TABLE = auto()


Cells = tuple[tuple[Array, ...], ...]
Vector = Any  # an array; of a few slots a tuple of one for each


@dataclass(frozen=True, slots=True)
class Transition:
    """Maps from slots to slots: (*lead, *places), or with two axes of slots behind, (to, from).

    Of a few slots `array` is a tuple of such rows, and a vector a tuple of arrays (*lead, *places):
    what a loop reads and writes has no axis of two behind that of the units, which a CPU would go
    along. Vectors of many slots have an axis of slots behind. `singular` says that entries may be
    infinite.
    """

    array: Array | Cells
    width: Width
    singular: bool

    @staticmethod
    def of(jacobian: Array, table: bool, singular: bool) -> Transition:
        """From an array with both axes of slots; `table` if there are many."""
        if jacobian.shape[-1] == 1:
            return Transition(jacobian[..., 0, 0], Width.ONE, singular)
        if table or jacobian.shape[-1] > _WRITTEN_OUT:
            return Transition(jacobian, Width.TABLE, singular)
        # Unstacked: of D that was stacked of its entries the compiler then sees the entries.
        cells = tuple(jnp.unstack(row, axis=-1) for row in jnp.unstack(jacobian, axis=-2))
        return Transition(cells, Width.FEW, singular)

    @property
    def jacobian(self) -> Array:
        """The array with both axes of slots."""
        if self.width is Width.FEW:
            return jnp.stack([jnp.stack(row, -1) for row in self.array], -2)
        return self._array[..., None, None] if self.width is Width.ONE else self._array

    @property
    def _array(self) -> Array:
        assert not isinstance(self.array, tuple)
        return self.array

    def vector(self, array: Array) -> Vector:
        """An array with an axis of slots as a vector of this map."""
        if self.width is Width.FEW:
            return jnp.unstack(array, axis=-1)
        return array.reshape(array.shape[:-1]) if self.width is Width.ONE else array

    def vector_of(self, slots: Sequence[Array]) -> Vector:
        """A vector from arrays slot by slot, which may repeat."""
        each = jnp.broadcast_arrays(*slots)
        if self.width is Width.FEW:
            return tuple(each)
        return each[0] if self.width is Width.ONE else jnp.stack(each, -1)

    def slots(self, vector: Vector) -> Array:
        """The inverse of `vector`."""
        if self.width is Width.FEW:
            return jnp.stack(vector, -1)
        return vector[..., None] if self.width is Width.ONE else vector

    @property
    def places(self) -> tuple[int, ...]:
        """The axes of steps and places."""
        first = jax.tree.leaves(self)[0]
        return first.shape[:-2] if self.width is Width.TABLE else first.shape

    def identity(self, places: tuple[int, ...]) -> Transition:
        """The map that leaves everything as it is, at these places."""
        dtype = jax.tree.leaves(self)[0].dtype
        if self.width is Width.ONE:
            return replace(self, array=jnp.ones(places, dtype))
        if self.width is Width.FEW:
            one, zero = jnp.ones(places, dtype), jnp.zeros(places, dtype)
            each = range(len(self.array))
            cells = tuple(tuple(one if k == j else zero for j in each) for k in each)
            return replace(self, array=cells)
        n = self._array.shape[-1]
        eye = jnp.eye(n, dtype=dtype)
        return replace(self, array=jnp.broadcast_to(eye, (*places, n, n)))

    def apply(self, vector: Vector) -> Vector:
        """D v. Axes of places with one entry in D repeat; they may have more in v."""
        if self.width is Width.ONE:
            return self._product(self._array, vector)
        if self.width is Width.FEW:
            return tuple(_sum(list(map(self._product, row, vector))) for row in self.array)
        D = self._array
        if self.singular:
            once = tuple(a for a in range(vector.ndim - 1) if D.shape[a] == 1)
            D = jnp.where((vector != 0).any(once, keepdims=True)[..., None, :], D, 0)
        return _contracted(D, vector)

    def transpose(self, vector: Vector, masked: bool = False) -> Vector:
        """D^T q; if `masked`, a q of zero counts as zero whatever it meets."""
        if self.width is Width.ONE:
            return self._product(vector, self._array, masked)
        if self.width is Width.FEW:
            columns = zip(*self.array, strict=True)
            each = tuple(_sum(list(map(self._product, vector, column))) for column in columns)
            if not masked:
                return each
            none = reduce(jnp.logical_and, [q == 0 for q in vector])
            return tuple(jnp.where(none, 0, a) for a in each)
        D, q = self._array, vector
        out = _contracted(jnp.swapaxes(D, -1, -2), q)
        out = jnp.where((D == 0).all(-2), 0, out) if self.singular else out
        return jnp.where((q == 0).all(-1, keepdims=True), 0, out) if masked else out

    def compose(self, earlier: Transition) -> Transition:
        """This map after an earlier one."""
        if self.width is Width.ONE:
            return replace(self, array=self._product(self._array, earlier._array))
        if self.width is Width.FEW:
            columns = list(zip(*earlier.array, strict=True))
            cell = lambda row, column: _sum(list(map(self._product, row, column)))
            rows = tuple(tuple(cell(row, column) for column in columns) for row in self.array)
            return replace(self, array=rows)
        D = earlier._array
        out = self._array @ D
        out = jnp.where((D == 0).all(-2, keepdims=True), 0, out) if self.singular else out
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
