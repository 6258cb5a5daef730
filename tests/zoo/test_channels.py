"""What stays within a unit or a channel though its equation looks as if it mixed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import braintrace as bt
from braintrace.verify._compare import comparison
from gradients import bptt_grad, online_grad
from oracle import reference_grad

from .zoo import TIGHT, T, check, element_wise, matmul, net, sigmoid, squares

GAINS = np.asarray([0.5, 0.9, 0.4, 0.7])
DIAGONAL = np.diag(GAINS)
SWAP = np.asarray([1, 0, 3, 2])


def conv(h, kernel, groups):
    return lax.conv_general_dilated(h, kernel, (1,), "VALID", feature_group_count=groups)


def attention(h):
    one = h[:, None, None, :]
    return jax.nn.dot_product_attention(jnp.tanh(one), jnp.sin(one), one)[:, 0, 0]


def sharded(h):
    mesh = jax.make_mesh((1,), ("b",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("b")
    return jax.shard_map(lambda a: jnp.sin(a), mesh=mesh, in_specs=spec, out_specs=spec)(h)


def reversed_in_a_loop(h):
    return lax.fori_loop(0, 4, lambda i, a: a.at[:, i].set(0.9 * h[:, 3 - i]), jnp.zeros_like(h))


KEEPS_UNITS = {
    "convolution of one channel": lambda h: conv(h[:, None], jnp.full((1, 1, 1), 0.7), 1)[:, 0],
    "convolution by channel": lambda h: conv(h[..., None], GAINS[:, None, None], 4)[..., 0],
    "convolution by a diagonal": lambda h: conv(h[..., None], jnp.diag(GAINS)[..., None], 1)[
        ..., 0
    ],
    "product with a constant diagonal": lambda h: h @ DIAGONAL,
    "product with a permutation": lambda h: h @ (0.7 * jnp.eye(4)[SWAP]),
    "attention over one position": attention,
    "shard_map": sharded,
    "solve": lambda h: jnp.linalg.solve(jnp.diag(1 + GAINS), h.T).T,
    "triangular solve": lambda h: jax.scipy.linalg.solve_triangular(jnp.diag(1 + GAINS), h.T).T,
    "permutation in a long loop": lambda h: lax.fori_loop(0, 21, lambda i, a: a[:, SWAP], h),
    "index in a loop": reversed_in_a_loop,
}


def driven(draw, f):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        m.h.value = jnp.tanh(f(m.h.value) + matmul(x, m.w.value))
        return m.h.value

    return model


@pytest.mark.parametrize("name", KEEPS_UNITS)
def test_equation_that_keeps_units_apart_is_followed(name, draw):
    model = driven(draw, KEEPS_UNITS[name])
    check(model, draw(T, 2, 3), rules=("d_rtrl",))
    assert bt.compile(model, "d_rtrl", draw(2, 3)).report.parameters["w",].exact


def test_equations_that_mix_are_still_cut(draw):
    dense = np.ones((4, 4)) - np.eye(4)
    for f in (
        lambda h: 0.2 * h @ dense,
        lambda h: conv(h[..., None], jnp.full((4, 4, 1), 0.2), 1)[..., 0],
        lambda h: jnp.linalg.solve(2 * jnp.eye(4) + 0.1 * dense, h.T).T,
    ):
        learner = bt.compile(driven(draw, f), "d_rtrl", draw(2, 3))
        assert not learner.report.parameters["w",].exact


def test_reference_of_a_solve_that_mixes(draw):
    dense = 2 * jnp.eye(4) + 0.1 * np.ones((4, 4))
    model, x, y = (
        driven(draw, lambda h: jnp.linalg.solve(dense, h.T).T),
        draw(T, 2, 3),
        draw(T, 2, 4),
    )
    found = online_grad(bt.compile(model, "d_rtrl", x[0]), squares, x, y)
    assert comparison(found, reference_grad("d_rtrl", model, squares, x, y)).max_error < TIGHT


def test_zeros_of_a_constant_are_looked_at_anew_when_they_change(draw):
    model = driven(draw, lambda h: h @ model.matrix)
    model.matrix = np.diag(GAINS)
    learner = bt.compile(model, "d_rtrl", draw(2, 3))
    learner(draw(2, 3))
    model.matrix = np.eye(4)[SWAP]
    with pytest.raises(bt.CompilationError, match="reach other states"):
        learner(draw(2, 3))


@pytest.mark.parametrize("length", [19, 20, 600, 601])
def test_long_loop_of_a_permutation_ends_where_it_ends(length, draw):
    turn = np.asarray([1, 2, 3, 0])
    f = lambda h: lax.fori_loop(0, length, lambda i, a: a[:, turn], h)
    report = bt.compile(driven(draw, f), "d_rtrl", draw(2, 3)).report
    order = 4 // np.gcd(4, length)  # of the permutation as a whole
    assert report.parameters["w",].trace_shapes == ((2, 3, 4, order),)


def mamba(draw, add_up):
    """The step of Mamba-2: a short convolution in front of a matrix state with a scalar decay."""
    heads, p, n, taps = 2, 2, 3, 3
    channels = heads * p
    params = {
        "win": draw(3, channels),
        "conv": draw(taps, channels),
        "wb": draw(3, n),
        "wdt": draw(3, heads),
        "a": draw(heads),
    }

    @net(params, {"past": draw(2, taps - 1, channels), "s": draw(2, heads, p, n)})
    def model(m, x):
        recent = jnp.concatenate([m.past.value, matmul(x, m.win.value)[:, None]], 1)
        m.past.value = recent[:, 1:]
        u = jax.nn.silu(add_up(recent, element_wise(m.conv.value))).reshape(2, heads, p)
        dt = jax.nn.softplus(matmul(x, m.wdt.value))
        decay = jnp.exp(-dt * jnp.exp(element_wise(m.a.value)))
        inward = (dt[..., None] * u)[..., None] * matmul(x, m.wb.value)[:, None, None]
        m.s.value = decay[..., None, None] * m.s.value + inward
        return jnp.einsum("bhpn,bn->bhp", m.s.value, jnp.cos(x))

    return model


@pytest.mark.parametrize(
    "add_up",
    [lambda u, w: (u * w).sum(1), lambda u, w: jnp.einsum("bkc,kc->bc", u, w)],
    ids=["sum", "einsum"],
)
def test_short_convolution_in_front_of_a_matrix_state(add_up, draw):
    model, x = mamba(draw, add_up), draw(T, 2, 3)
    check(model, x, rules=("d_rtrl", "pp_prop"))
    report = bt.compile(model, "d_rtrl", x[0]).report
    assert all(p.exact for p in report.parameters.values()), report.parameters
    assert report.parameters["win",].trace_shapes == ((2, 3, 4, 5),)  # 2 of the past, 3 of s


def delta(draw, key):
    """The delta rule: a matrix memory S corrected along a key, column by column."""

    @net({"wk": draw(3, 3), "wv": draw(3, 4), "wb": draw(3, 1)}, {"s": draw(2, 3, 4)})
    def model(m, x):
        k = key(m, x)
        k = k / jnp.sqrt((k**2).sum(-1, keepdims=True) + 0.1)
        rate = sigmoid(matmul(x, m.wb.value))
        read = jnp.einsum("bk,bkv->bv", k, m.s.value)
        wrong = rate * (matmul(x, m.wv.value) - read)
        m.s.value = m.s.value + k[..., None] * wrong[:, None]
        return jnp.einsum("bk,bkv->bv", jnp.cos(x), m.s.value)

    return model


def test_value_side_of_a_delta_rule(draw):
    check(delta(draw, lambda m, x: x @ lax.stop_gradient(m.wk.value)), draw(T, 2, 3))


def test_value_side_is_exact_beside_a_key_that_is_not(draw):
    model, x = delta(draw, lambda m, x: matmul(x, m.wk.value)), draw(8, 2, 3)
    y = jnp.cos(jnp.arange(8 * 2 * 4.0)).reshape(8, 2, 4)
    learner = bt.compile(model, "d_rtrl", x[0])
    got, want = online_grad(learner, squares, x, y), bptt_grad(model, squares, x, y)
    exact = {path for path, p in learner.report.parameters.items() if p.exact}
    assert exact == {("wv",), ("wb",)}
    for path in exact:
        assert comparison({path: got[path]}, {path: want[path]}).max_error <= TIGHT
    assert comparison({"k": got["wk",]}, {"k": want["wk",]}).max_error > 1e-3


def test_a_product_within_the_columns_of_a_matrix_state(draw):
    @net({"w": draw(3, 4)}, {"s": draw(2, 3, 4)})
    def model(m, x):
        mixed = jnp.einsum("bij,bjv->biv", jnp.eye(3) - x[..., None] * x[:, None], m.s.value)
        m.s.value = 0.5 * mixed + x[..., None] * matmul(x, m.w.value)[:, None]
        return m.s.value.sum(1)

    check(model, draw(T, 2, 3), rules=("d_rtrl",))


def test_a_channel_with_too_many_places_is_cut(draw):
    @net({"w": draw(3, 2)}, {"s": draw(65, 2)})
    def model(m, x):
        m.s.value = 0.5 * m.s.value - 0.01 * m.s.value.sum(0) + matmul(x, m.w.value)
        return m.s.value

    report = bt.compile(model, "d_rtrl", draw(3)).report
    assert not report.parameters["w",].exact
