"""Data movement between an operator and a state, and inside a recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import braintrace as bt

from .zoo import T, check, element_wise, matmul, net, sigmoid

at = lambda x: (x[0] > 0).astype(int) + (x[1] > 0)  # a place that depends on the data
PLACES = jnp.asarray([3, 0, 4])
COLUMNS = jnp.asarray([[2, 0], [1, 1]])
_23 = lambda y: y.reshape(2, 3)

# name: (outputs of the operator, shape of the state, tail of the operator)
TAILS = {
    "slice": (6, (4,), lambda y, x: y[1:5]),
    "strided slice": (6, (3,), lambda y, x: y[::-2]),
    "dynamic slice, constant start": (6, (4,), lambda y, x: lax.dynamic_slice(y, (1,), (4,))),
    "dynamic slice, data start": (6, (4,), lambda y, x: lax.dynamic_slice(y, (at(x),), (4,))),
    "take": (6, (4,), lambda y, x: jnp.take(y, jnp.asarray([5, 0, 0, 3]))),
    "index": (6, (2, 2), lambda y, x: y[jnp.asarray([[5, 0], [1, 3]])]),
    "boolean index": (6, (3,), lambda y, x: y[np.array([1, 0, 1, 0, 0, 1], bool)]),
    "take, data index": (4, (2,), lambda y, x: jnp.take(y, at(x) + jnp.asarray([0, 1]))),
    "index, data": (4, (3,), lambda y, x: y[jnp.asarray([0, 1, 0]) + at(x)]),
    "data permutation": (3, (3,), lambda y, x: y[jnp.argsort(x)]),
    "choice by data": (3, (3,), lambda y, x: jnp.where(x > 0, y, y[::-1])),
    "set": (3, (5,), lambda y, x: jnp.zeros(5).at[PLACES].set(y)),
    "add": (4, (3,), lambda y, x: jnp.zeros(3).at[jnp.asarray([0, 2, 2, 1])].add(y)),
    "multiply": (4, (4,), lambda y, x: y.at[1:3].multiply(jnp.asarray([2.0, 3.0]))),
    "set, data index": (2, (4,), lambda y, x: jnp.zeros(4).at[at(x)].set(y[0]).at[3].set(y[1])),
    "add, data index": (2, (4,), lambda y, x: jnp.zeros(4).at[at(x) + jnp.arange(2)].add(y)),
    "reshape": (4, (2, 2), lambda y, x: y.reshape(2, 2)),
    "transpose": (6, (3, 2), lambda y, x: y.reshape(2, 3).T),
    "swapped axes": (8, (2, 2, 2), lambda y, x: jnp.moveaxis(y.reshape(2, 2, 2), 0, 2)),
    "rotation": (6, (3, 2), lambda y, x: jnp.rot90(y.reshape(2, 3))),
    "roll": (4, (4,), lambda y, x: jnp.roll(y, 1)),
    "flip": (4, (4,), lambda y, x: jnp.flip(y)),
    "permutation": (4, (4,), lambda y, x: y[jnp.asarray([2, 0, 3, 1])]),
    "pad": (2, (5,), lambda y, x: jnp.pad(y, (1, 2))),
    "reflecting pad": (3, (5,), lambda y, x: jnp.pad(y, 1, mode="reflect")),
    "tile": (2, (4,), lambda y, x: jnp.tile(y, 2)),
    "repeat": (2, (4,), lambda y, x: jnp.repeat(y, 2)),
    "concatenate": (2, (4,), lambda y, x: jnp.concatenate([y, jnp.sin(y)])),
    "stack": (2, (2, 2), lambda y, x: jnp.stack([y, jnp.sin(y)], axis=1)),
    "split": (6, (2,), lambda y, x: _product(*jnp.split(y, 3))),
    "one output, many units": (1, (4,), lambda y, x: jnp.broadcast_to(y, (4,))),
    "one element, many units": (3, (4,), lambda y, x: y[1] * jnp.arange(1.0, 5.0)),
    "diagonal matrix": (3, (3, 3), lambda y, x: jnp.diag(y)),
    "diagonal": (4, (2,), lambda y, x: jnp.diagonal(y.reshape(2, 2))),
    "triangle": (4, (2, 2), lambda y, x: jnp.tril(y.reshape(2, 2))),
    "outer sum": (2, (2, 2), lambda y, x: y[:, None] + jnp.sin(y)[None, :]),
    "sum over features": (4, (2,), lambda y, x: y.reshape(2, 2).sum(-1)),
    "mean over features": (4, (2,), lambda y, x: jnp.sin(y.reshape(2, 2)).mean(0)),
    "sum to a scalar": (3, (), lambda y, x: y.sum()),
    "maximum over features": (4, (2,), lambda y, x: y.reshape(2, 2).max(-1)),
    "product over features": (4, (2,), lambda y, x: y.reshape(2, 2).prod(-1)),
    "norm of features": (4, (2,), lambda y, x: jnp.linalg.norm(y.reshape(2, 2), axis=-1)),
    "einsum that scales": (3, (3,), lambda y, x: jnp.einsum("i,i->i", y, x)),
    "einsum that spreads": (2, (2, 3), lambda y, x: jnp.einsum("i,j->ij", y, x)),
    "einsum that transposes": (4, (2, 2), lambda y, x: jnp.einsum("ij->ji", y.reshape(2, 2))),
    "einsum that contracts": (6, (2,), lambda y, x: jnp.einsum("ij,j->i", y.reshape(2, 3), x)),
    "reshape of permuted axes": (6, (3, 2), lambda y, x: lax.reshape(_23(y), (3, 2), (1, 0))),
    "interior pad": (3, (6,), lambda y, x: lax.pad(y, 0.0, [(1, 0, 1)])),
    "negative pad": (4, (2,), lambda y, x: lax.pad(y, 0.0, [(-1, -1, 0)])),
    "take along an axis": (6, (2, 2), lambda y, x: jnp.take_along_axis(_23(y), COLUMNS, 1)),
    "mapped index": (6, (2,), lambda y, x: jax.vmap(lambda r, i: r[i])(_23(y), COLUMNS[0])),
    "mapped set": (
        6,
        (2, 3),
        lambda y, x: jax.vmap(lambda r, i: r.at[i].set(0))(_23(y), COLUMNS[0]),
    ),
    "set beyond the end": (3, (4,), lambda y, x: jnp.zeros(4).at[jnp.asarray([0, 9, 2])].set(y)),
    "clipped index": (3, (2,), lambda y, x: y.at[jnp.asarray([1, 9])].get(mode="clip")),
    "minimum at": (4, (4,), lambda y, x: y.at[1:3].min(0.1)),
    "delete": (4, (3,), lambda y, x: jnp.delete(y, 2)),
    "update of a slice": (2, (4,), lambda y, x: lax.dynamic_update_slice(jnp.zeros(4), y, (1,))),
    "select": (3, (3,), lambda y, x: jnp.select([x > 0.5, x > 0], [y, 2 * y], y[::-1])),
    "piecewise": (3, (3,), lambda y, x: jnp.piecewise(y, [y < 0, y > 1], [jnp.sin, jnp.cos, 0.5])),
    "interleaved": (2, (4,), lambda y, x: jnp.stack([y, 2 * y], -1).reshape(-1)),
    "kronecker product": (2, (4,), lambda y, x: jnp.kron(y, jnp.asarray([1.0, 2.0]))),
    "named and held": (3, (3,), lambda y, x: lax.optimization_barrier(checkpoint_name(y, "y"))),
    "dot with a constant": (4, (2,), lambda y, x: y.reshape(2, 2) @ jnp.asarray([0.5, 2.0])),
}


def _product(a, b, c):
    return a * sigmoid(b) + c


@pytest.mark.parametrize("name", TAILS)
def test_tail(draw, name):
    n, shape, tail = TAILS[name]

    @net({"w": draw(3, n)}, {"h": draw(*shape)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + tail(matmul(x, m.w.value), x))
        return m.h.value

    check(model, draw(T, 3), rules=2)


FUNCTIONS = {
    "powers": lambda v: jnp.cbrt(v) + jnp.hypot(v, 1.0) + jnp.abs(v) ** 1.5 + 1 / (3 + v**3),
    "circular": lambda v: jnp.arctan2(v, 1.0) + jnp.sinc(v) + jnp.arcsin(v / 9) + jnp.mod(v, 1.0),
    "special": lambda v: (
        jax.lax.lgamma(9 + v) + jax.scipy.special.erf(v) + jnp.i0(v) + jnp.expm1(v)
    ),
    "gamma": lambda v: jax.scipy.special.gammainc(2.0, jnp.abs(v) + 1) + jax.lax.digamma(9 + v),
    "logarithms": lambda v: (
        jnp.logaddexp(v, 0.3) + jax.scipy.special.logit(sigmoid(v)) + jnp.exp2(v)
    ),
    "kinks": lambda v: jnp.maximum(v, 0.1) + jnp.abs(v) + jnp.fmod(v, 0.7) + jnp.nan_to_num(v),
    "whole numbers": lambda v: (
        jnp.floor(v) * v + jnp.sign(v) + jnp.heaviside(v, 0.5) + jnp.round(v)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of_one_unit(draw, name):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.4 * FUNCTIONS[name](m.h.value + matmul(x, m.w.value)))
        return m.h.value

    check(model, draw(T, 3), rules=2)


# name: (shape of the state, movement of the state)
MOVES = {
    "roll": ((4,), lambda h, x: jnp.roll(h, 1)),
    "flip": ((4,), lambda h, x: jnp.flip(h)),
    "transpose": ((2, 2), lambda h, x: h.T),
    "permutation": ((4,), lambda h, x: h[jnp.asarray([2, 0, 3, 1])]),
    "shift": ((4,), lambda h, x: jnp.concatenate([jnp.zeros(1), h[:-1]])),
    "halves swapped": ((4,), lambda h, x: jnp.concatenate(jnp.split(h, 2)[::-1])),
    "one unit read by all": ((3,), lambda h, x: h.at[1:].set(h[0])),
    "set at a constant place": ((4,), lambda h, x: h.at[1].set(h[0])),
    "set at a data place": ((3,), lambda h, x: h.at[at(x)].set(0.3)),
}
# Any unit may be read, the own one too: that is kept, the others are neighbours.
MOVES_BY_DATA = {
    "take": lambda h, x: h[(jnp.arange(3) + at(x)) % 3],
    "roll": lambda h, x: jnp.roll(h, at(x)),
    "dynamic slice": lambda h, x: lax.dynamic_slice(jnp.tile(h, 2), (at(x),), (3,)),
}


@pytest.mark.parametrize("name", MOVES_BY_DATA)
def test_move_of_the_state_by_data(draw, name):
    @net({"w": draw(3, 3)}, {"h": draw(3)})
    def model(m, x):
        moved = MOVES_BY_DATA[name](m.h.value, x)
        m.h.value = 0.9 * jnp.sin(moved) + matmul(x, m.w.value)
        return m.h.value

    check(model, draw(T, 3), exact=False, rules=2)


@pytest.mark.parametrize("name", MOVES)
def test_move_of_the_state(draw, name):
    shape, move = MOVES[name]
    n = int(np.prod(shape))

    @net({"w": draw(3, n)}, {"h": draw(*shape)})
    def model(m, x):
        y = matmul(x, m.w.value).reshape(shape)
        m.h.value = 0.9 * jnp.sin(move(m.h.value, x)) + y
        return m.h.value

    check(model, draw(T, 3), rules=2)


def test_output_reads_the_state_at_a_data_index(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value[at(x)] * jnp.take(m.h.value, jnp.argsort(m.h.value))[:2]

    check(model, draw(T, 3))


def test_fused_gates(draw):
    @net({"w": draw(3, 8), "b": draw(8)}, {"c": draw(2, 2), "h": draw(2, 2)})
    def model(m, x):
        gates = matmul(x, m.w.value, m.b.value)
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        m.c.value = sigmoid(f) * m.c.value + sigmoid(i) * jnp.tanh(g)
        m.h.value = sigmoid(o) * jnp.tanh(m.c.value) + 0.3 * m.h.value
        return m.h.value

    check(model, draw(T, 2, 3))


def test_scalar_gain_for_all_units(draw):
    @net({"w": draw(3, 4), "g": draw(), "a": draw(1)}, {"h": draw(2, 4)})
    def model(m, x):
        leak = element_wise(m.a.value, sigmoid)
        m.h.value = leak * m.h.value + element_wise(m.g.value) * matmul(x, m.w.value)
        return m.h.value

    check(model, draw(T, 2, 3))


def pool(y, init, reducer):
    return lax.reduce_window(y, init, reducer, (1, 1, 2), (1, 1, 2), "VALID")


@pytest.mark.parametrize("kind", ["average", "reshaped average", "max"])
def test_convolution_and_pooling(draw, kind):
    @net({"k": draw(2, 2, 3), "b": draw(2)}, {"h": draw(1, 4)})
    def model(m, x):
        y = bt.conv(x, m.k.value, m.b.value)  # (1, 2, 4)
        if kind == "average":
            y = pool(y, 0.0, lax.add) / 2
        elif kind == "max":
            y = pool(y, -jnp.inf, lax.max)
        else:
            y = y.reshape(1, 2, 2, 2).mean(-1)
        m.h.value = jnp.tanh(0.8 * m.h.value + y.reshape(1, 4))
        return m.h.value

    check(model, draw(T, 1, 2, 4), rules=2)


def test_convolution_and_flatten(draw):
    @net({"k": draw(2, 2, 3)}, {"h": draw(1, 8)})
    def model(m, x):
        y = jax.nn.relu(bt.conv(x, m.k.value)).reshape(1, -1)
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    check(model, draw(T, 1, 2, 4))


def test_batch_that_is_averaged(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value).mean(0))
        return m.h.value

    check(model, draw(T, 2, 3))
