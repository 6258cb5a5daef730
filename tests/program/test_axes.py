"""The table of axes, against what the primitives of JAX read: no less, and no more."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braintrace.program import CANONICAL, CONTROL, ELEMENTWISE, bind, lines, parameters, trace

RNG = np.random.RandomState(0)
draw = lambda *shape: jnp.asarray(RNG.randn(*shape))
whole = lambda most, *shape: jnp.asarray(RNG.randint(0, most, shape))

dot = lambda contract, batch: lambda x, y: lax.dot_general(x, y, (contract, batch))
conv = lambda spec, **more: (
    lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=spec, **more)
)
batched = lambda x, i: x[jnp.arange(3)[:, None], i]  # of each row other places
taken = lambda x, i: jax.vmap(lambda a, k: a[k])(x, i)
put = lambda x, i, u: jax.vmap(lambda a, k, v: a.at[k].set(v))(x, i, u)

CASES = {
    "mul": [(lax.mul, draw(2, 3), draw(2, 3)), (lambda x: x * 2.0, draw(2, 3))],
    "add": [(lambda x, y: x + y, draw(1, 3), draw(2, 3))],
    "select_n": [(jnp.where, whole(2, 2, 3) > 0, draw(2, 3), draw(2, 3))],
    "broadcast_in_dim": [
        (lambda x: jnp.broadcast_to(x, (3, 2, 3)), draw(2, 3)),
        (lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)), draw(1, 3)),
        (lambda x: jnp.broadcast_to(x, (2, 3)), draw()),
    ],
    "iota": [(lambda: lax.broadcasted_iota("int32", (2, 3, 2), 1),)],
    "transpose": [(lambda x: x.transpose(2, 0, 1), draw(2, 3, 4))],
    "reshape": [
        (lambda x, s=s: x.reshape(s), draw(2, 6, 2))
        for s in ((12, 2), (2, 12), (2, 2, 3, 2), (4, 3, 2), (2, 6, 1, 2), (2, 3, 4), (1, 24))
    ],
    "slice": [
        (lambda x: x[:, 1:3], draw(3, 4)),
        (lambda x: x[::2, :], draw(3, 4)),
    ],
    "pad": [
        (lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, 0, 0), (0, 0, 1)]), draw(2, 2, 3)),
        (lambda x: lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 0)]), draw(3, 2)),
    ],
    "concatenate": [(lambda x, y: jnp.concatenate([x, y], 1), draw(2, 3), draw(2, 2))],
    "rev": [(lambda x: lax.rev(x, (1,)), draw(2, 3, 2))],
    "sort": [
        (lambda x: lax.sort(x, dimension=0), draw(3, 2)),
        (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), draw(2, 4), draw(2, 4)),
    ],
    "top_k": [(lambda x: lax.top_k(x, 2), draw(2, 3))],
    **{f"reduce_{k}": [(getattr(jnp, k), draw(2, 3, 2), 1)] for k in ("sum", "max", "min", "prod")},
    **{
        f"reduce_{k}": [(getattr(jnp, f), whole(2, 2, 3) > 0, 0)]
        for k, f in (("and", "all"), ("or", "any"))
    },
    "reduce_xor": [(lambda x: lax.reduce_xor(x, (0,)), whole(9, 2, 3))],
    **{k: [(getattr(jnp, k), draw(2, 4), 1)] for k in ("argmax", "argmin")},
    **{
        f"cum{k}": [(getattr(lax, f"cum{k}"), draw(2, 3), 1)]
        for k in ("sum", "prod", "max", "min", "logsumexp")
    },
    "reduce_window_sum": [
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID"), draw(2, 4)),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1), (1, 2), "VALID"), draw(3, 3)),
    ],
    "reduce_window_max": [
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "VALID"), draw(3, 2))
    ],
    "reduce_window_min": [
        (lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 1), (1, 1), "VALID"), draw(3, 2))
    ],
    "select_and_gather_add": [
        (
            lambda x, t: jax.jvp(
                lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"),
                (x,),
                (t,),
            ),
            draw(2, 4),
            draw(2, 4),
        )
    ],
    "dot_general": [
        (jnp.matmul, draw(2, 3), draw(3, 4)),
        (dot(((1,), (1,)), ((), ())), draw(2, 3), draw(4, 3)),
        (dot(((2,), (1,)), ((0,), (0,))), draw(2, 3, 4), draw(2, 4, 2)),
        (dot(((0,), (2,)), ((2,), (1,))), draw(3, 2, 4), draw(2, 4, 3)),
        (dot(((), ()), ((), ())), draw(2), draw(3)),
    ],
    "conv_general_dilated": [
        (conv(("NWC", "WIO", "NWC")), draw(2, 4, 3), draw(2, 3, 2)),
        (conv(("NCW", "OIW", "CNW")), draw(2, 3, 4), draw(2, 3, 2)),
        (conv(("NWC", "WIO", "NWC"), feature_group_count=2), draw(2, 4, 4), draw(2, 2, 6)),
    ],
    "gather": [
        (lambda x, i: x[i], draw(4, 3), whole(4, 2)),
        (lambda x, i: x[:, i], draw(2, 4), whole(4, 3)),
        (lambda x, i: x[:, i, :], draw(2, 4, 3), whole(4, 3, 2)),
        (batched, draw(3, 4), whole(4, 3, 2)),
        (taken, draw(2, 4, 3), whole(4, 2, 3)),
    ],
    "dynamic_slice": [
        (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 3)), draw(4, 3), whole(2)),
        (lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 2)), draw(2, 4), whole(2), whole(2)),
    ],
    "dynamic_update_slice": [
        (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), draw(4, 3), draw(2, 3), whole(3))
    ],
    "scatter": [
        (lambda x, i, u: x.at[i].set(u), draw(4, 3), whole(4, 2), draw(2, 3)),
        (lambda x, i, u: x.at[:, i].set(u), draw(2, 4), whole(4, 3), draw(2, 3)),
        (put, draw(2, 4, 3), whole(4, 2, 2), draw(2, 2, 3)),
    ],
    "scatter-add": [
        (lambda x, i, u: x.at[i].add(u), draw(4, 3), whole(4, 2), draw(2, 3)),
        (lambda x, i, u: x.at[:, i].add(u), draw(2, 4), whole(4, 3), draw(2, 3)),
    ],
    "scatter-mul": [(lambda x, i, u: x.at[i].multiply(u), draw(4, 3), whole(4, 2), draw(2, 3))],
    "scatter-sub": [(lambda x, i, u: x.at[i].subtract(u), draw(4, 3), whole(4, 2), draw(2, 3))],
    "fft": [(jnp.fft.fft, draw(2, 3)), (lambda x: jnp.fft.rfft2(x), draw(2, 2, 4))],
    "cholesky": [
        (lambda x: lax.linalg.cholesky(x @ x.mT + 1, symmetrize_input=False), draw(2, 3, 3))
    ],
    "triangular_solve": [
        (
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
            draw(2, 3, 3),
            draw(2, 3, 2),
        )
    ],
}
# Primitives that a test of their own would repeat, and names of other releases.
ALIKE = {"scatter_add", "scatter_mul", "scatter_sub"}
PAIRS = [(name, i) for name, some in CASES.items() for i in range(len(some))]


def test_every_structural_primitive_has_a_case():
    assert CANONICAL - ELEMENTWISE - CONTROL - ALIKE - set(CASES) == set()


def equation_of(name, number):
    """The equation of that name, and the values of its operands."""
    function, *args = CASES[name][number]
    fixed = [a for a in args if isinstance(a, int)]
    program, consts = trace(
        lambda *a: function(*a, *fixed), *[a for a in args if not isinstance(a, int)]
    )
    env = dict(zip(program.consts, consts, strict=True))
    env.update(zip(program.inputs, [a for a in args if not isinstance(a, int)], strict=True))
    for eqn in program.equations:
        values = [env[a] if a in env else a.value for a in eqn.inputs]
        if eqn.name == name:
            return eqn, [jnp.asarray(v) for v in values]
        env.update(zip(eqn.outputs, bind(eqn, values), strict=True))
    raise AssertionError(f"no {name}")


def reads(eqn, values):
    """Per operand the pairs (element of the result, element of the operand) seen to depend."""
    pairs = [set() for _ in values]
    run = jax.jit(jax.vmap(lambda *v: tuple(bind(eqn, v))))
    for k, value in enumerate(values):
        for _ in range(6):
            points = [_other(v, top=4) for v in values]
            many = [jnp.stack([p] * value.size) for p in points]
            places = np.arange(value.size)
            index = np.unravel_index(places, value.shape) if value.shape else ()
            new = _other(value, top=4).reshape(-1)
            moved = many[k].at[(places, *index)].set(new)
            base = bind(eqn, points)
            for out, was in zip(run(*many[:k], moved, *many[k + 1 :]), base, strict=True):
                changed = np.asarray(~((out == was) | ((out != out) & (was != was))))
                for j, *i in zip(*np.nonzero(changed), strict=True):
                    pairs[k].add((tuple(map(int, i)), tuple(int(a[j]) for a in index)))
    return pairs


def _other(value, top):
    if value.dtype == bool:
        return jnp.asarray(RNG.randint(0, 2, value.shape) > 0)
    if value.dtype.kind == "i":
        return jnp.asarray(RNG.randint(0, top, value.shape), value.dtype)
    return value + jnp.asarray(10 * RNG.randn(*value.shape), value.dtype)


@pytest.mark.parametrize(("name", "number"), PAIRS)
def test_lines_are_what_jax_computes(name, number):
    eqn, values = equation_of(name, number)
    table, seen = lines(eqn), reads(eqn, values)
    assert len({line.result for line in table}) == len(table)
    for line in table:  # what it claims
        for axis, pairs in zip(line.operands, seen, strict=True):
            assert axis is None or all(i[line.result] == j[axis] for i, j in pairs), line
    found = {line.result: line.operands for line in table}
    for k, pairs in enumerate(seen):  # and nothing is left out
        shape, out = eqn.inputs[k].shape, eqn.outputs[0].shape
        for axis, d in itertools.product(range(len(shape)), range(len(out))):
            if shape[axis] == out[d] > 1 and all(i[d] == j[axis] for i, j in pairs):
                assert d in found and found[d][k] == axis, (k, axis, d)


@pytest.mark.parametrize(("name", "number"), PAIRS)
def test_fewer_places_along_a_line_are_the_same_equation(name, number):
    eqn, values = equation_of(name, number)
    whole = bind(eqn, values)
    for line in lines(eqn):
        if not line.alike:
            continue
        for place in (0, eqn.outputs[0].shape[line.result] - 1):
            one = lambda a, axis, p=place: (
                a if axis is None else lax.slice_in_dim(a, p, p + 1, axis=axis)
            )
            operands = [one(v, a) for v, a in zip(values, line.operands, strict=True)]
            thin = replace(eqn, params=parameters(eqn, line, 1))
            for got, want in zip(bind(thin, operands), whole, strict=True):
                np.testing.assert_allclose(got, one(want, line.result), rtol=1e-12)
