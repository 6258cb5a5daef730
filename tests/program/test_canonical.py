"""Programs are of a small language: what is rewritten, and that nothing is forgotten."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, primitives

from braintrace.program import (
    CANONICAL,
    INLINED,
    REWRITTEN,
    deep_equations,
    evaluate,
    trace,
)

RNG = np.random.RandomState(0)
X = jnp.asarray(RNG.randn(2, 3, 4))
ONES = jnp.asarray(RNG.randn(1, 3, 1))
I = jnp.asarray(RNG.randint(0, 9, (2, 3)))

# Of these no program has any; of the others that are rewritten, those that move elements.
GONE = set(REWRITTEN) - CANONICAL
# Whatever they read may reach all that they return: the sound worst case.
OPAQUE = set(
    """
    all_gather all_to_all approx_top_k axis_index bitcast_convert_type custom_jvp_call custom_lin
    custom_linear_solve custom_vjp_call eig eigh get hessenberg householder_product linear_solve lu
    pmax pmin ppermute psum psum2 qr ragged_all_to_all random_bits random_clone random_fold_in
    random_gamma random_seed random_split random_unwrap random_wrap reduce reduce_window
    rng_bit_generator rng_uniform scatter-max scatter-min scatter_max scatter_min schur
    select_and_scatter select_and_scatter_add svd swap threefry2x32 tridiagonal tridiagonal_solve
    """.split()
)
# They stand in no step that JAX traces from a function of arrays.
ELSEWHERE = set("after_all call core_call create_token dce_sink empty2 stage".split())

REWRITES = {
    "reshape": (lambda x: lax.reshape(x, (4, 6), (2, 0, 1)), (X,)),
    "reshape of an order that is one": (lambda x: lax.reshape(x, (4, 6), (0, 1, 2)), (X,)),
    "ravel by columns": (lambda x: jnp.ravel(x, order="F"), (X,)),
    "reshape by columns": (lambda x: jnp.reshape(x, (6, 4), order="F"), (X,)),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), (ONES,)),
    "expand_dims": (lambda x: lax.expand_dims(x, (0, 2)), (X,)),
    "stack": (lambda x, y: jnp.stack([x, y], -1), (X, 2 * X)),
    "stack of one": (lambda x: jnp.stack([x], 1), (X,)),
    "unstack": (lambda x: jnp.unstack(x, axis=1), (X,)),
    "split": (lambda x: lax.split(x, (1, 0, 3), 2), (X,)),
    "split into one": (lambda x: jnp.split(x, 1, 0), (X,)),
    "tile": (lambda x: jnp.tile(x, (1, 2, 3)), (X,)),
    "tile once": (lambda x: jnp.tile(x, (1, 1, 1)), (X,)),
    "rev": (lambda x: lax.rev(x, (0, 1)), (ONES,)),
    "rev of ones": (lambda x: lax.rev(x, (0, 2)), (ONES,)),
    "copy": (lambda x: jnp.array(x, copy=True), (X,)),
    "name": (lambda x: checkpoint_name(x, "a"), (X,)),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), (X, ONES)),
    "device": (lambda x, y: jax.device_put((x, y), jax.devices()[0]), (X, ONES)),
    "sum of ones": (lambda x: x.sum((0, 2)), (ONES,)),
    "maximum of ones": (lambda x: x.max(2, keepdims=True), (ONES,)),
    "cumulation of ones": (lambda x: jnp.cumsum(x, 2), (ONES,)),
    "of keys": (lambda i: jax.random.key_data(jax.random.split(jax.random.key(i), 3)[0]), (3,)),
    "in a branch": (
        lambda x: lax.cond(x[0, 0, 0] > 0, lambda: x.T, lambda: jnp.ravel(x, "F").reshape(4, 3, 2)),
        (X,),
    ),
}


@pytest.mark.parametrize("name", REWRITES)
def test_sugar_is_rewritten_and_computes_the_same(name):
    function, args = REWRITES[name]
    program, values = trace(function, *args)
    for eqn in deep_equations(program):
        assert eqn.name not in GONE
        assert eqn.name != "reshape" or eqn.params["dimensions"] is None
    got = evaluate(program, values, jax.tree.leaves(args))
    for a, b in zip(got, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_tangents_are_of_the_same_language():
    def f(x):
        a, b = jnp.split(jnp.ravel(x, order="F"), 2)
        return jnp.stack([a, jnp.tile(b[:4], 3)]).max(0)

    program, values = trace(lambda x, t: jax.jvp(f, (x,), (t,)), X, X)
    names = {eqn.name for eqn in deep_equations(program)}
    assert not names & GONE
    want = jax.jvp(f, (X,), (X,))
    for a, b in zip(evaluate(program, values, [X, X]), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_primitive_of_jax_is_known():
    """A new one is canonical, is rewritten, or is listed as one that nothing is known about."""
    spaces = (vars(lax), vars(primitives))
    names = {p.name for space in spaces for p in space.values() if isinstance(p, Primitive)}
    assert names - CANONICAL - INLINED - set(REWRITTEN) - OPAQUE - ELSEWHERE == set()


FUNCTIONS = [
    lambda x: jnp.einsum("abc,adc->bd", x, x),
    lambda x: jnp.roll(x, 1, 1),
    lambda x: jnp.repeat(x, 2, 0),
    lambda x: jnp.kron(x[0], x[0]),
    lambda x: jnp.flip(x),
    lambda x: x.at[0, 1].set(0.0),
    lambda x: x.at[0].add(1.0),
    lambda x: x[:, jnp.asarray([2, 0])],
    lambda x: jnp.where(x > 0, x, 0),
    lambda x: jnp.clip(x, 0, 1),
    lambda x: jnp.linalg.norm(x),
    lambda x: jax.nn.softmax(x),
    lambda x: jax.nn.gelu(x),
    lambda x: jax.nn.logsumexp(x, 1),
    lambda x: jnp.sort(x, 1),
    lambda x: jnp.argsort(x, 1),
    lambda x: lax.top_k(x, 2),
    lambda x: jnp.median(x, 1),
    lambda x: jnp.convolve(x[0, 0], x[0, 1]),
    lambda x: jnp.interp(x, jnp.arange(3.0), jnp.arange(3.0)),
    lambda x: jnp.pad(x, 1, mode="wrap"),
    lambda x: jnp.triu(x[0]),
    lambda x: jnp.diag(x[0, 0]),
    lambda x: jax.nn.one_hot(I, 4) * x,
    lambda x: jnp.cumsum(x, 1),
    lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 1, 1), "SAME"),
    lambda x: jnp.unravel_index(jnp.argmax(x), x.shape),
    lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
    lambda x: jax.random.bernoulli(jax.random.key(0), x.clip(0, 1)),
    lambda x: lax.associative_scan(jnp.add, x),
    lambda x: jnp.fft.fft(x),
    lambda x: jnp.linalg.solve(x[0, :, :3], x[0, :, 3]),
    lambda x: lax.scan(lambda c, a: (c + a, c), x[0], x),
    lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x),
    lambda x: jax.vmap(lambda a: lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, a))(x),
    lambda x: jax.checkpoint(jnp.sin)(x),
    lambda x: lax.conv_general_dilated(x, x[:, :, :2], (1,), "SAME"),
    lambda x: lax.dynamic_update_slice(x, x[:1], (I[0, 0], 0, 0)),
    lambda x: jax.nn.relu(x).astype("float32"),
    lambda x: jnp.nan_to_num(x),
    lambda x: jnp.histogram(x, 3)[0],
    lambda x: jnp.searchsorted(x[0, 0], x[0, 1]),
    lambda x: jnp.unique(x, size=3),
    lambda x: jnp.cov(x[0]),
    lambda x: jax.scipy.special.erf(x) + jax.scipy.special.digamma(abs(x)),
]


def test_programs_of_many_functions_are_of_known_primitives():
    known = (CANONICAL | OPAQUE) - GONE
    for number, function in enumerate(FUNCTIONS):
        for f in (function, lambda x, f=function: _pushed(f, x)):
            program, _ = trace(f, X)
            assert {eqn.name for eqn in deep_equations(program)} - known == set(), number


def _pushed(function, x):
    floats = lambda x: [a for a in jax.tree.leaves(function(x)) if jnp.issubdtype(a.dtype, float)]
    return jax.jvp(floats, (x,), (x,))
