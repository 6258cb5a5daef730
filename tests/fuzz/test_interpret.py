"""The interpreter of random programs computes what XLA computes, primitive by primitive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import interpret

REALS = np.array([-2.5, -1.0, -0.0, 0.0, 0.3, 1.0, 7.0, np.inf, -np.inf, np.nan, 1e300, -3e9])
WHOLE = np.array([-7, -1, 0, 2, 3, 9, 2**40, -(2**40), 1, 5, 4, 6])
CUBE = np.arange(24.0).reshape(2, 3, 4)
COMPLEX = REALS[:6] + 1j * REALS[1:7]
one = lambda f: [(f, (REALS,))]
unary = "tanh exp log log1p expm1 sin cos sqrt square abs sign floor logistic erf neg"
binary = "mul add sub atan2 max min eq ne lt le gt ge div"
contract = lambda *dims, **k: lambda a, b: lax.dot_general(a, b, dims, **k)

# Per primitive: functions of one equation and their operands, the rarer parameters among them.
CASES = {
    **{name: one(getattr(lax, name)) for name in unary.split()},
    **{name: [(getattr(lax, name), (REALS, REALS[::-1]))] for name in binary.split()},
    "add_any": [(lambda a: jax.vjp(lambda v: (2 * v, 3 * v), a)[1]((a, a))[0], (REALS,))],
    "copy": one(jnp.copy),
    "copy_p": one(jnp.copy),
    "stop_gradient": one(lax.stop_gradient),
    "integer_pow": [
        *((lambda v, n=n: lax.integer_pow(v, n), (REALS,)) for n in (-2, -1, 0, 2, 3, 5)),
        (lambda v: lax.integer_pow(v, 3), (WHOLE,)),
    ],
    "select_n": [
        (lax.select_n, (REALS > 0, REALS, REALS[::-1])),
        (lax.select_n, (np.True_, REALS, REALS[::-1])),
        (lax.select_n, (WHOLE.astype(np.int32) % 3, REALS, 2 * REALS, 3 * REALS)),
    ],
    "convert_element_type": [
        *((lambda v, t=t: lax.convert_element_type(v, t), (REALS,)) for t in (int, "int8", bool)),
        *((lambda v, t=t: lax.convert_element_type(v, t), (WHOLE,)) for t in ("int8", float)),
        (lambda v: lax.convert_element_type(v, float), (COMPLEX,)),
    ],
    "broadcast_in_dim": [
        (lambda v: lax.broadcast_in_dim(v, (3, 12), (1,)), (REALS,)),
        (lambda v: lax.broadcast_in_dim(v, (2, 5, 4), (0, 2)), (CUBE[:, :1, 0],)),
    ],
    "reshape": [
        (lambda v: lax.reshape(v, (4, 6)), (CUBE,)),
        (lambda v: lax.reshape(v, (4, 6), (2, 0, 1)), (CUBE,)),
    ],
    "squeeze": [(lambda v: lax.squeeze(v, (0, 2)), (CUBE[:1, :, :1],))],
    "expand_dims": [(lambda v: lax.expand_dims(v, (0, 2)), (CUBE[0],))],
    "transpose": [(lambda v: lax.transpose(v, (2, 0, 1)), (CUBE,))],
    "rev": [(lambda v: lax.rev(v, (0, 2)), (CUBE,))],
    "slice": [
        (lambda v: lax.slice(v, (0, 1, 1), (2, 3, 4)), (CUBE,)),
        (lambda v: lax.slice(v, (0, 1, 0), (2, 3, 4), (1, 2, 3)), (CUBE,)),
    ],
    "pad": [
        (lambda v: lax.pad(v, 9.0, ((1, 2, 0),)), (REALS,)),
        (lambda v: lax.pad(v, 9.0, ((-1, 2, 1),)), (REALS,)),
    ],
    "concatenate": [(lambda a, b: lax.concatenate([a, b], 1), (CUBE, 2 * CUBE))],
    "reduce_sum": [(lambda v: v.sum((0, 2)), (CUBE,)), (lambda v: v.sum(), (WHOLE,))],
    "reduce_max": [(lambda v: v.max((0, 2)), (CUBE,)), (lambda v: v.max(), (REALS,))],
    "dot_general": [
        (contract(((2,), (2,)), ((0,), (0,))), (CUBE, 2 * CUBE)),
        (contract(((1, 2), (1, 2)), ((), ())), (CUBE, 2 * CUBE)),
        (contract(((0,), (0,)), ((), ()), preferred_element_type=float), (WHOLE, WHOLE % 5)),
    ],
    "dynamic_slice": [
        (lambda v, i, j: lax.dynamic_slice(v, (i, j, i), (1, 2, 3)), (CUBE, at, 1 - at))
        for at in (np.int32(-5), np.int32(0), np.int32(1), np.int32(7))
    ],
    "dynamic_update_slice": [
        (lambda v, u, i, j: lax.dynamic_update_slice(v, u, (i, j)), (CUBE[0], CUBE[1, :2], at, -at))
        for at in (np.int32(-5), np.int32(0), np.int32(1), np.int32(7))
    ],
    "rem": [
        (lax.rem, (REALS, REALS[::-1])),
        (lax.rem, (WHOLE, 3 - 2 * (WHOLE % 4))),
        (lax.rem, (WHOLE, WHOLE[::-1])),
    ],
    "stack": [(lambda a, b: jnp.stack([a, b], 1), (CUBE, 2 * CUBE))],
    **{
        name: [(f, (WHOLE, WHOLE[::-1])), (f, (REALS > 0, REALS > 0.5))]
        for name, f in (("and", lax.bitwise_and), ("or", lax.bitwise_or))
    },
    "not": [(lax.bitwise_not, (WHOLE,)), (lax.bitwise_not, (REALS > 0,))],
    "iota": [(lambda t=t: lax.broadcasted_iota(t, (2, 3), 1), ()) for t in (int, "float32")],
    "split": [(lambda v: lax.split(v, (1, 0, 3), 2)[2], (CUBE,))],
}


def test_every_kernel_has_a_case():
    assert set(CASES) == set(interpret.NUMPY)


@pytest.mark.parametrize("name", sorted(CASES))
def test_kernel_is_the_primitive(name):
    for fn, operands in CASES[name]:
        closed = jax.make_jaxpr(fn)(*operands)
        with np.errstate(all="ignore"):
            (found,) = interpret.run(closed, operands)
        wanted = jax.jit(fn)(*operands)
        assert np.shape(found) == wanted.shape and np.asarray(found).dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-300, err_msg=str(closed))
        used = {e.primitive.name for e in closed.eqns}
        assert name in used or name in ("copy_p", "expand_dims", "stack"), (
            used
        )  # other versions of JAX


def test_control_flow_is_that_of_xla():
    def program(v):
        v = lax.scan(lambda c, x: (0.5 * c + x, jnp.sin(c)), v, jnp.stack([v, v]), reverse=True)
        v = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.cos(c[1])), (0, v[1]))[1]
        v = jax.vmap(lambda w: lax.fori_loop(0, 1 + (w > 0).sum(), lambda i, c: 2 * c, w))(v[0])
        return lax.switch(7, [jnp.sin, jnp.cos], v)

    (found,) = interpret.run(jax.make_jaxpr(program)(CUBE[0]), [CUBE[0]])
    np.testing.assert_allclose(found, jax.jit(program)(CUBE[0]), rtol=1e-14)
