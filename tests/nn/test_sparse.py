import brainevent
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
import scipy.sparse
from jax.experimental.sparse import BCOO, BCSR

from braintrace.nn import SparseLinear

DENSE = np.array([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 3.0, 0.0], [4.0, 5.0, 0.0, 6.0]])
ROWS, COLS = np.nonzero(DENSE)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)))

FORMATS = {  # functions of a dense matrix
    "bcoo": BCOO.fromdense,
    "bcoo_padded": lambda dense: BCOO.fromdense(dense, nse=9),
    "bcsr": BCSR.fromdense,
    "saiunit_csr": u.sparse.CSR.fromdense,
    "saiunit_csc": u.sparse.CSC.fromdense,
    "saiunit_coo": u.sparse.COO.fromdense,
    "brainevent_csr": brainevent.CSR.fromdense,
    "brainevent_csc": brainevent.CSC.fromdense,
    **{
        f"scipy_{kind}": getattr(scipy.sparse, f"{kind}_array")
        for kind in ("csr", "csc", "coo", "lil", "dok", "dia", "bsr")
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_starts_with_its_own_numbers(name):
    dense = DENSE if name.startswith("scipy") else jnp.asarray(DENSE)
    layer = SparseLinear(FORMATS[name](dense))
    assert layer.in_size == (3,) and layer.out_size == (4,)
    np.testing.assert_allclose(layer(X), X @ DENSE, rtol=1e-6)


def test_whole_numbers_become_trainable():
    layer = SparseLinear(scipy.sparse.csr_matrix(DENSE.astype(int)), b_init=1)
    assert {a.dtype for a in layer.weight.value.values()} == {jnp.dtype("float64")}
    np.testing.assert_allclose(layer(X), X @ DENSE + 1)


def test_one_number_for_all_connections_is_one_weight():
    indices, pointers = jnp.asarray(COLS), jnp.asarray([0, 2, 3, 6])
    mat = brainevent.CSR((jnp.array([0.5]), indices, pointers), shape=(3, 4))
    layer = SparseLinear(mat)
    assert layer.weight.value["weight"].shape == (1,)
    np.testing.assert_allclose(layer(X), X @ (0.5 * (DENSE != 0)))


def test_units_and_leading_sizes_are_kept():
    indices, pointers = jnp.asarray(COLS), jnp.asarray([0, 2, 3, 6])
    mat = u.sparse.CSR((jnp.arange(1.0, 7.0) * u.mS, indices, pointers), shape=(3, 4))
    layer = SparseLinear(mat, b_init=0 * u.uA, in_size=(5, 3))
    assert layer.in_size == (5, 3) and layer.out_size == (5, 4)
    y = layer(jnp.ones((2, 5, 3)) * u.mV)
    assert y.shape == (2, 5, 4)
    np.testing.assert_allclose(y.to_decimal(u.uA)[0, 0], DENSE.sum(0))


def test_sparse_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"in_size \(2, 4\) does not fit(.|\n)*end in 3"):
        SparseLinear(BCOO.fromdense(DENSE), in_size=(2, 4))
    with pytest.raises(ValueError, match=r"b_init.*\(3,\)"):
        SparseLinear(BCOO.fromdense(DENSE), b_init=jnp.ones(3))
    with pytest.raises(TypeError, match="cannot use a"):
        SparseLinear(jnp.asarray(DENSE))
