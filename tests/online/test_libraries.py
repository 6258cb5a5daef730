"""Unmodified cells: every parameter is traced, or the report says why not."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from library_cases import CASES, EQUINOX, FLOAT, T
from paper_cells import CELLS as PAPERS
from unmarked_gradients import bptt, close, definition, differ, gradient, learner, loss

import braintrace as bt
from interpret import interpreted


def each(test):
    """For every case, with a batch of two and of one."""
    return pytest.mark.parametrize("batch", [2, 1])(pytest.mark.parametrize("name", CASES)(test))


built = cache(lambda name, batch: CASES[name](batch))


@cache
def d_rtrl(name, batch):
    return gradient(built(name, batch), "d_rtrl")


@cache
def truth(name, batch):
    return bptt(built(name, batch))


@each
def test_d_rtrl_is_exact_where_it_says_so_and_nowhere_else(name, batch):
    got, net = d_rtrl(name, batch)
    for a, b, p in zip(got, truth(name, batch), net.report.parameters.values(), strict=True):
        assert p.how == "trace" or p.exact or p.dropped
        assert p.exact != differ(a, b), p


@each
def test_rtrl_is_bptt(name, batch):
    got, net = gradient(built(name, batch), "rtrl")
    close(got, truth(name, batch))
    assert all(p.exact for p in net.report.parameters.values())


# States packed into one array are judged by a twin with separate ones: test_packed.py.
PACKED = ("ALIF", "CuBaLIF", "adaptive network")


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("name", [n for n in CASES if not n.endswith(PACKED)])
def test_d_rtrl_is_its_definition(name, batch):
    got, net = d_rtrl(name, batch)
    close(got, definition(built(name, batch), net))


@each
def test_blocks_are_steps_are_the_gradient_of_a_scan(name, batch):
    case = built(name, batch)
    _, params, _, xs = case
    want, net = gradient(case, "d_rtrl", 1)
    close(gradient(case, "d_rtrl", T)[0], want)
    close(d_rtrl(name, batch)[0], want)
    carry = learner(case, "d_rtrl")[1]

    def total(params):
        return jax.vmap(loss)(net.scan(params, carry, xs)[1]).sum()

    close(jax.tree.leaves(interpreted(lambda: eqx.filter_grad(total)(params), lower=False)), want)


@pytest.mark.parametrize("name", PAPERS)
def test_mapped_over_samples_is_a_batch(name):
    case = step, params, state, xs = PAPERS[name](2)
    one = lambda tree: jax.tree.map(lambda a: a[None], tree)

    def mapped(params, state, x):
        sample = lambda state, x: step(params, one(state), one(x))
        return jax.tree.map(lambda a: a[:, 0], jax.vmap(sample)(state, x))

    got, net = gradient((mapped, params, state, xs), "d_rtrl")
    want, of_batch = gradient(case, "d_rtrl")
    close(got, want)
    claims = lambda net: [(k, p.how, p.exact) for k, p in net.report.parameters.items()]
    assert claims(net) == claims(of_batch)


# --------------------------------------------------------------------------- what fits around it


def test_an_equinox_module_in_the_tools_of_equinox(tmp_path):
    step, cell, state, xs = EQUINOX["GRU"](2)
    net = bt.online(step, "d_rtrl")
    carry = net.init(cell, state, xs[0])
    grads, _ = eqx.filter_jit(net.grad(loss))(cell, carry, xs)
    updated = eqx.apply_updates(cell, jax.tree.map(lambda g: -0.1 * g, grads))
    assert isinstance(updated, eqx.nn.GRUCell)
    names = ["weight_ih", "weight_hh", "bias", "bias_n"]
    assert [".".join(map(str, p)) for p in net.report.parameters] == names

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def total(cell):
        return jax.vmap(loss)(net.scan(cell, carry, xs)[1]).sum()

    close(jax.tree.leaves(total(cell)[1]), jax.tree.leaves(grads))

    # Module and carry in one file; loaded, the gradient of the rest is the same.
    carry = net.scan(cell, carry, xs[:3])[0]
    eqx.tree_serialise_leaves(tmp_path / "net.eqx", (updated, carry))
    like = jax.tree.map(jnp.zeros_like, (cell, carry))
    loaded, at = eqx.tree_deserialise_leaves(tmp_path / "net.eqx", like)
    gradient_of = net.grad(loss)
    want = gradient_of(updated, carry, xs[3:])[0]
    close(jax.tree.leaves(gradient_of(loaded, at, xs[3:])[0]), jax.tree.leaves(want))


def test_a_cell_of_nnx_and_its_optimizer():
    cell = nnx.GRUCell(3, 3, rngs=nnx.Rngs(0), **FLOAT)
    structure, params = nnx.split(cell, nnx.Param)
    step = lambda params, carry, x: nnx.merge(structure, params)(carry, x)
    xs = CASES["nnx Linear"](2)[3]
    net = bt.online(step, "d_rtrl")
    carry = net.init(params, jnp.zeros((2, 3)), xs[0])
    grads, (_, losses) = net.grad(loss)(params, carry, xs)
    before = jax.tree.leaves(params)
    nnx.Optimizer(cell, optax.sgd(0.01), wrt=nnx.Param).update(cell, grads)
    after = nnx.state(cell, nnx.Param)
    steps = [(a - b) / 0.01 for a, b in zip(before, jax.tree.leaves(after), strict=True)]
    close(steps, jax.tree.leaves(grads))
    assert net.grad(loss)(after, carry, xs)[1][1].sum() < losses.sum()
