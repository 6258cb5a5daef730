"""Sparse matrices of JAX and ragged products: their entries are traced like any weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from library_cases import I, inputs
from unmarked_gradients import bptt, close, gradient

import braintrace

DENSE = np.random.default_rng(2).normal(size=(3, 4)) * (np.arange(12).reshape(3, 4) % 3 > 0)


def leak(product):
    def step(w, h, x):
        h = 0.8 * h + jnp.tanh(product(w, x))
        return h, h

    return step


def sparse_cases():
    bcoo = sparse.BCOO.fromdense(jnp.asarray(DENSE), nse=10)  # two entries only pad
    rows = sparse.BCSR.fromdense(jnp.asarray(DENSE.T))
    of = lambda w: sparse.BCOO((w, bcoo.indices), shape=bcoo.shape)
    of_rows = lambda w: sparse.BCSR((w, rows.indices, rows.indptr), shape=rows.shape)
    entries = 2 * 8 * rows.data.size
    yield "right", lambda w, x: x @ of(w), bcoo.data, 2 * 8 * bcoo.data.size
    yield "left", lambda w, x: (of(w).T @ x.T).T, bcoo.data, 2 * 8 * bcoo.data.size
    yield "rows", lambda w, x: (of_rows(w) @ x.T).T, rows.data, entries
    yield "mapped rows", lambda w, x: jax.vmap(lambda x: of_rows(w) @ x)(x), rows.data, entries
    yield "in the tree", lambda w, x: x @ w, bcoo, None


SPARSE = ("right", "left", "rows", "mapped rows", "in the tree")


@pytest.mark.parametrize("name", SPARSE)
def test_the_entries_of_a_sparse_matrix_are_traced(name):
    product, w, size = {k: rest for k, *rest in sparse_cases()}[name]
    case = leak(product), w, jnp.zeros((2, 4)), inputs(2, I)
    got, net = gradient(case, "d_rtrl")
    close(got, bptt(case)[:1])
    assert all(p.exact and p.how == "trace" for p in net.report.parameters.values())
    assert size is None or net.memory == size  # one number per sample and entry


def test_a_recurrent_sparse_matrix_learns_like_its_marked_twin():
    square = sparse.BCOO.fromdense(jnp.asarray(DENSE @ DENSE.T))

    def layer(product):
        def step(w, h, x):
            h = jnp.tanh(x + product(h, w))
            return h, h

        return step, square.data, jnp.zeros((2, I)), inputs(2, I)

    plain = layer(lambda h, w: h @ sparse.BCOO((w, square.indices), shape=square.shape))
    marked = layer(lambda h, w: braintrace.sparse_matmul(h, w, sparse_mat=square))
    got, net = gradient(plain, "d_rtrl")
    want, twin = gradient(marked, "d_rtrl")
    close(got, want)
    assert net.memory == twin.memory
    close(gradient(plain, "rtrl")[0], bptt(marked))
    step, w, h, xs = plain
    inside = braintrace.online(step, "d_rtrl")
    jax.eval_shape(inside.init, w, h, xs[0])  # analysed while another function is traced
    assert inside.memory == twin.memory


@pytest.mark.parametrize("varying", [False, True])
def test_the_matrices_of_a_ragged_product_are_traced(varying):
    def product(w, x):
        n = (x[0, 0] > 0).astype(jnp.int32) if varying else jnp.ones((), jnp.int32)
        return lax.ragged_dot(x, w, jnp.stack([n, 1 - n + n * varying]))  # maybe a row of no group

    w = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 4)))
    case = leak(product), w, jnp.zeros((2, 4)), inputs(2, I)
    got, net = gradient(case, "d_rtrl")
    close(got, bptt(case))
    assert all(p.exact and p.how == "trace" for p in net.report.parameters.values())
    close(gradient(case, "rtrl")[0], got)


@pytest.mark.parametrize("rule", ["kf_rtrl", "uoro", "rtrl"])
@pytest.mark.parametrize("block_size", [None, 2])
def test_rules_that_go_step_by_step_read_the_indices_in_their_backward_pass(rule, block_size):
    """The indices are arguments of the compiled program around the loop over the steps."""
    matrix = sparse.BCOO.fromdense(jnp.asarray(DENSE))
    places = tuple(matrix.indices.T)

    def layer(product):
        def step(w, h, x):
            h = jnp.tanh(0.8 * h + product(w, x))
            return h, h

        return step

    def gradient(step):
        net = braintrace.online(step, rule)
        xs = inputs(2, I)
        carry = net.init(matrix.data, jnp.zeros((2, 4)), xs[0])
        loss = lambda out: (out**2).sum()
        return net.grad(loss, block_size=block_size)(matrix.data, carry, xs)[0]

    marked = layer(lambda w, x: braintrace.sparse_matmul(x, w, sparse_mat=matrix))
    plain = layer(lambda w, x: x @ jnp.zeros(DENSE.shape).at[places].set(w))
    if rule == "kf_rtrl":  # another operator has other signs
        plain = layer(lambda w, x: x @ sparse.BCOO((w, matrix.indices), shape=DENSE.shape))
    close(gradient(marked), gradient(plain))
