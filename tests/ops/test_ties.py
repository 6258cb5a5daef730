import jax
import jax.numpy as jnp
import pytest
from jax import lax

from braintrace.ops._ties import tied_axes

W = jnp.ones((3, 4))


@pytest.mark.parametrize(
    "fun, shape, ties",
    [
        (lambda x, w: x @ w, (2, 3), ((1, 1),)),
        (lambda x, w: (x @ w).T, (2, 3), ((0, 1),)),
        (lambda x, w: x + w, (2, 3, 4), ((1, 0), (2, 1))),
        (lambda x, w: x * w.reshape(3, 4, 1), (3, 4, 2), ((0, 0), (1, 1))),
        (lambda x, w: x * w.reshape(12), (12,), ()),
        (lambda x, w: x + w.sum(0), (4,), ((0, 1),)),
        (lambda x, w: x * jnp.cumsum(w, 0), (3, 4), ((1, 1),)),
        (lambda x, w: x * w.at[1, 1].set(0.0), (3, 4), ((0, 0), (1, 1))),
        (lambda x, w: x * jnp.linalg.qr(w)[1], (3, 4), ()),
        (lambda x, w: jnp.concatenate([w, w]) * x, (6, 4), ((1, 1),)),
        (lambda x, w: w[:2] * x, (2, 4), ((1, 1),)),
        (lambda x, w: (w + w.sum(0)) * x, (3, 4), ((1, 1),)),
        (lambda x, w: x * 2, (3, 4), ()),
        (lambda x, w: w[x.argmax()] * x, (4,), ((0, 1),)),
        (lambda x, w: w[:, x.argmax(-1)], (2, 4), ((0, 0),)),
        (lambda x, w: lax.dynamic_slice_in_dim(w, x.argmax(), 1) * x, (1, 4), ((1, 1),)),
        (lambda x, w: jax.vmap(lambda v, i: v @ w.T[i])(x, x.argmax(-1) % 4), (2, 3), ()),
    ],
)
def test_ties_follow_the_axes_of_the_weight(fun, shape, ties):
    assert tied_axes(fun, (jnp.ones(shape), W), 1) == ties


def test_a_stretched_axis_of_size_one_is_not_tied():
    # `y + bias` may hold a (1, 4, 1) bias next to a (2, 4, 3) output in one equation.
    assert tied_axes(lambda y, b: y + b, (jnp.ones((2, 4, 3)), jnp.ones((1, 4, 1))), 1) == ((1, 1),)
