"""Unmodified cells of other libraries: every parameter is traced, or the report says why not."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import braintrace as bt

T, I, N = 8, 3, 4


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def double_of(tree):
    convert = lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a
    return jax.tree.map(convert, tree)


# A case is a step, parameters, a state and the inputs of all steps.


def inputs(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=(T, *shape)))


def of_equinox(make, several=False):
    def case(batch):
        cell = double_of(make(jax.random.PRNGKey(1)))
        call = (
            (lambda p, x, s: p(x, s))
            if batch is None
            else jax.vmap(lambda p, x, s: p(x, s), (None, 0, 0))
        )

        def step(cell, state, x):
            state = call(cell, x, state)
            return state, state[0] if several else state

        lead = () if batch is None else (batch,)
        zeros = jnp.zeros((*lead, N))
        return step, cell, (zeros, zeros) if several else zeros, inputs(*lead, I)

    return case


def of_nnx(make):
    def case(batch):
        lead = () if batch is None else (batch,)
        cell = make(I, N, rngs=nnx.Rngs(0), dtype=jnp.float64, param_dtype=jnp.float64)
        structure, params = nnx.split(cell)
        step = lambda params, carry, x: nnx.merge(structure, params)(carry, x)
        carry = cell.initialize_carry((*lead, I), nnx.Rngs(1))
        return step, params, double_of(carry), inputs(*lead, I)

    return case


def of_linen(make):
    def case(batch):
        lead = () if batch is None else (batch,)
        cell = make(N, dtype=jnp.float64, param_dtype=jnp.float64)
        carry = double_of(cell.initialize_carry(jax.random.PRNGKey(0), (*lead, I)))
        xs = inputs(*lead, I)
        params = cell.init(jax.random.PRNGKey(1), carry, xs[0])["params"]
        step = lambda params, carry, x: cell.apply({"params": params}, carry, x)
        return step, params, carry, xs

    return case


class Stack(eqx.Module):
    """Three recurrent cells with layer norms between, and a read-out."""

    cells: list
    norms: list
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        sizes = [I, N, N]
        self.cells = [eqx.nn.GRUCell(n, N, key=k) for n, k in zip(sizes, keys, strict=False)]
        self.norms = [eqx.nn.LayerNorm(N) for _ in range(2)]
        self.out = eqx.nn.Linear(N, 2, key=keys[3])

    def __call__(self, x, states):
        new = []
        for i, (cell, h) in enumerate(zip(self.cells, states, strict=True)):
            new.append(cell(x, h))
            x = self.norms[i](new[-1]) if i < 2 else new[-1]
        return new, self.out(x)


def stack(batch):
    net = double_of(Stack(jax.random.PRNGKey(2)))
    call = lambda p, x, s: p(x, s)
    call = call if batch is None else jax.vmap(call, (None, 0, 0))
    lead = () if batch is None else (batch,)
    zeros = [jnp.zeros((*lead, N))] * 3
    return lambda net, state, x: call(net, x, state), net, zeros, inputs(*lead, I)


CASES = {
    "equinox GRU": of_equinox(lambda key: eqx.nn.GRUCell(I, N, key=key)),
    "equinox LSTM": of_equinox(lambda key: eqx.nn.LSTMCell(I, N, key=key), several=True),
    "nnx GRU": of_nnx(nnx.GRUCell),
    "nnx LSTM": of_nnx(nnx.LSTMCell),
    "nnx optimized LSTM": of_nnx(nnx.OptimizedLSTMCell),
    "nnx simple": of_nnx(nnx.SimpleCell),
    "linen GRU": of_linen(linen.GRUCell),
    "linen LSTM": of_linen(linen.LSTMCell),
    "equinox stack": stack,
}


def squares(out):
    return jnp.sum(out**2)


def gradient(case, rule, **options):
    step, params, state, xs = case
    net = bt.online(step, rule, **options)
    carry = net.init(params, state, xs[0])
    return jax.tree.leaves(net.grad(squares)(params, carry, xs)[0]), net


def bptt(case):
    step, params, state, xs = case

    def total(params):
        def body(state, x):
            state, out = step(params, state, x)
            return state, squares(out)

        return lax.scan(body, state, xs)[1].sum()

    return jax.tree.leaves(eqx.filter_grad(total)(params))


def close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("name", CASES)
def test_a_cell_of_another_library_learns_online(name, batch):
    case = CASES[name](batch)
    want = bptt(case)
    got, net = gradient(case, "rtrl")
    close(got, want)
    assert all(p.exact for p in net.report.parameters.values())
    got, net = gradient(case, "d_rtrl")
    for a, b, p in zip(got, want, net.report.parameters.values(), strict=True):
        assert p.how in ("trace", "within-step") or p.dropped
        if p.exact:
            close([a], [b])
        else:
            assert np.abs(a - b).max() > 1e-9


def test_an_equinox_module_gets_gradients_for_its_optimizer():
    step, cell, state, xs = of_equinox(lambda key: eqx.nn.GRUCell(I, N, key=key))(2)
    net = bt.online(step, "d_rtrl")
    carry = net.init(cell, state, xs[0])
    grads, _ = eqx.filter_jit(net.grad(squares))(cell, carry, xs)
    updated = eqx.apply_updates(cell, jax.tree.map(lambda g: -0.1 * g, grads))
    assert isinstance(updated, eqx.nn.GRUCell)
    assert [".".join(map(str, p)) for p in net.report.parameters] == [
        "weight_ih",
        "weight_hh",
        "bias",
        "bias_n",
    ]
