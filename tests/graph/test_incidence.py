"""What each result of a linear primitive reads, against the pattern of its Jacobian."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braintrace.graph._moves import _RULES, incidence, width
from braintrace.graph._sets import NONE
from braintrace.program import trace

SEEDS = range(3)


def shape(rng, rank=3):
    return tuple(int(n) for n in rng.integers(2, 5, rank))


def draw(rng, *sizes):
    return jnp.asarray(rng.normal(size=sizes))


def some_axis(rng, a):
    return int(rng.integers(a.ndim))


def gather(rng, a):
    rows = rng.integers(0, a.shape[0], 3)
    return lambda a: a[rows]


def scatter(rng, a, how="set"):
    rows, new = rng.permutation(a.shape[0])[:2], draw(rng, 2, *a.shape[1:])
    return lambda a: getattr(a.at[rows], how)(new)


def scattered(rng, a):
    rows = rng.integers(0, 6, a.shape[0])
    return lambda a: jnp.zeros((6, *a.shape[1:])).at[rows].add(a)


def slices(rng, a):
    low = [int(rng.integers(n)) for n in a.shape]
    strides = [int(n) for n in rng.integers(1, 3, a.ndim)]
    return lambda a: lax.slice(a, low, a.shape, strides)


def pad(rng, a):
    config = [(int(rng.integers(-1, 3)), 1, int(rng.integers(3))) for _ in a.shape]
    return lambda a: lax.pad(a, 0.0, config)


def windows(rng, a):
    strides = (1, 1, int(rng.integers(1, 3)))
    return lambda a: lax.reduce_window(a, 0.0, lax.add, (1, 2, 2), strides, "VALID")


def contract(rng, a):
    other = draw(rng, a.shape[0], a.shape[-1], 3)
    return lambda a: lax.dot_general(a, other, (((a.ndim - 1,), (1,)), ((0,), (0,))))


def conv(rng, a):
    kernel = draw(rng, 2, a.shape[1], int(rng.integers(1, 3)))
    strides, dilation = (int(n) for n in rng.integers(1, 3, 2))
    return lambda a: lax.conv_general_dilated(a, kernel, (strides,), [(1, 1)], (dilation,))


def solve_triangular(rng, a):
    n, lower = a.shape[-2], bool(rng.integers(2))
    matrix = jnp.broadcast_to(draw(rng, n, n) + 3 * jnp.eye(n), (a.shape[0], n, n))
    return lambda a: lax.linalg.triangular_solve(matrix, a, left_side=True, lower=lower)


def cable(rng, a):
    off = jnp.full(a.shape[:-1], 0.2)
    low, high = off.at[:, 0].set(0), off.at[:, -1].set(0)
    return lambda a: lax.linalg.tridiagonal_solve(low, 1 + off, high, a)


# One linear equation of a primitive, from random numbers and its operand; whether the rule claims
# no more than there is.
EQUATIONS = {
    "transpose": (lambda r, a: partial(jnp.transpose, axes=tuple(r.permutation(a.ndim))), True),
    "reshape": (lambda r, a: lambda a: a.reshape(-1, a.shape[0]), True),
    "rev": (lambda r, a: partial(jnp.flip, axis=some_axis(r, a)), True),
    "broadcast_in_dim": (lambda r, a: lambda a: jnp.broadcast_to(a, (2, *a.shape)), True),
    "slice": (slices, True),
    "pad": (pad, True),
    "concatenate": (lambda r, a: lambda a: lax.concatenate([a, 2 * a], 1), True),
    "gather": (gather, True),
    "scatter": (scatter, True),
    "scatter-add": (scattered, True),
    "reduce_sum": (lambda r, a: partial(jnp.sum, axis=some_axis(r, a)), True),
    "reduce_window_sum": (windows, True),
    "dot_general": (contract, True),
    "conv_general_dilated": (conv, False),
    "cumsum": (lambda r, a: partial(lax.cumsum, axis=some_axis(r, a)), False),
    "triangular_solve": (solve_triangular, False),
    "tridiagonal_solve": (cable, True),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EQUATIONS)
def test_incidence_is_the_pattern_of_the_jacobian(name, seed):
    rng = np.random.default_rng(seed)
    make, exact = EQUATIONS[name]
    a = draw(rng, *shape(rng))
    fun = make(rng, a)
    program, values = trace(fun, a)
    known = dict(zip(program.consts, map(np.asarray, values), strict=True))
    known[program.inputs[0]] = np.asarray(a)
    sets = {program.inputs[0]: np.arange(a.size).reshape((*a.shape, 1))}
    seen = set()
    for eqn in program.equations:
        read = [sets.get(i) for i in eqn.inputs]
        facts = [i.value if hasattr(i, "value") else known.get(i) for i in eqn.inputs]
        facts = [None if f is None or f.dtype.kind == "f" else f for f in facts]
        if any(s is not None for s in read):
            seen.add(eqn.name)
            what = width(eqn, read, facts)
            sets.update(zip(eqn.outputs, incidence(eqn, read, facts), strict=True))
        else:
            inputs = [i.value if hasattr(i, "value") else known[i] for i in eqn.inputs]
            outs = eqn.primitive.bind(*map(jnp.asarray, inputs), **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
            known.update(zip(eqn.outputs, map(np.asarray, outs), strict=True))
    assert name in seen
    found = sets[program.outputs[0]]
    claimed = np.zeros((program.outputs[0].size, a.size), bool)
    result, slot = np.nonzero(found.reshape(len(claimed), found.shape[-1]) != NONE)
    claimed[result, found.reshape(len(claimed), found.shape[-1])[result, slot]] = True
    true = np.abs(np.asarray(jax.jacfwd(fun)(a))).reshape(claimed.shape) > 0
    assert not (true & ~claimed).any()
    assert not exact or not (claimed & ~true).any()
    if seen == {name} and name != "scatter-add":  # what it adds is no sum for the walk: a union
        assert true.sum(1).max(initial=0) <= what.reads
        assert what.reads == 1 or what.fans or "window" in name or true.sum(0).max() <= 1


def test_every_rule_is_tested_here_or_in_the_walk():
    elsewhere = {
        "select_n", "dynamic_slice", "dynamic_update_slice", "optimization_barrier", "device_put",
        "select_and_gather_add", "custom_linear_solve", "shard_map", "scatter_add", "scatter-mul",
        "scatter_mul", "scatter-sub", "scatter_sub", "cumlogsumexp", "cumprod", "cummax", "cummin",
    }  # fmt: skip
    assert set(_RULES) == set(EQUATIONS) | elsewhere
