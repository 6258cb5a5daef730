"""Maps between slots: products with vectors and with each other are those of matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.engine import Transition

PLACES = (3, 2)


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape))


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 4, 6])
def test_maps_are_matrices(slots, table):
    if table and slots < 5:
        return  # a table has more slots than are written out
    first, second = drawn(*PLACES, slots, slots), drawn(*PLACES, slots, slots) + 1
    vector = drawn(*PLACES, slots)
    later, earlier = (Transition.of(a, table, singular=True) for a in (first, second))
    np.testing.assert_allclose(later.jacobian, first)
    moved = later.slots(later.apply(later.vector(vector)))
    np.testing.assert_allclose(moved, jnp.einsum("...kj,...j->...k", first, vector))
    back = later.slots(later.transpose(later.vector(vector), masked=True))
    np.testing.assert_allclose(back, jnp.einsum("...kj,...k->...j", first, vector))
    np.testing.assert_allclose(later.compose(earlier).jacobian, first @ second)
    np.testing.assert_allclose(later.identity(PLACES).compose(earlier).jacobian, second)
    assert later.places == PLACES
    parts = [vector[..., k] for k in range(slots)]
    np.testing.assert_allclose(later.slots(later.vector_of(parts)), vector)


@pytest.mark.parametrize("slots", [1, 2, 6])
def test_zero_is_zero_beside_infinity(slots):
    full = jnp.full((slots, slots), jnp.inf)
    zeros = jnp.zeros(slots)
    infinite = Transition.of(full, slots > 4, singular=True)
    none = Transition.of(jnp.zeros_like(full), slots > 4, singular=True)
    read = lambda map, vector: map.slots(vector)
    assert not read(infinite, infinite.apply(infinite.vector(zeros))).any()
    assert not read(none, none.transpose(none.vector(zeros + jnp.inf))).any()
    assert not read(infinite, infinite.transpose(infinite.vector(zeros), masked=True)).any()
    assert not infinite.compose(none).jacobian.any()
