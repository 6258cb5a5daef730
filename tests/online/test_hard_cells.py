"""Mamba-2, gated DeltaNet and RWKV-7 in plain JAX: what is claimed of each parameter is true."""

from functools import cache

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_cells import CELLS, I

import braintrace as bt
from interpret import computed
from oracle import reference_grad

T, TIGHT = 8, 1e-9


def loss(out):
    return jnp.sum(jnp.sin(out) ** 2 + out)


@cache
def inputs(batch):
    return jnp.asarray(np.random.default_rng(0).normal(size=(T, batch, I)))


@cache
def bptt(name, batch):
    step, params, state = CELLS[name](batch)

    def total(params):
        def body(state, x):
            state, out = step(params, state, x)
            return state, loss(out)

        return jax.lax.scan(body, state, inputs(batch))[1].sum()

    return computed(lambda: jax.grad(total)(params))


@cache
def learned(name, batch, rule, block_size):
    step, params, state = CELLS[name](batch)
    net = bt.online(step, rule)
    carry = net.init(params, state, inputs(batch)[0])
    grad = net.grad(loss, block_size=block_size)
    return net.report, computed(lambda: grad(params, carry, inputs(batch))[0])


def errors(got, want):
    return {k: np.abs(got[k] - want[k]).max() / max(1, np.abs(want[k]).max()) for k in want}


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("name", CELLS)
def test_rtrl_is_bptt(name, batch):
    report, got = learned(name, batch, "rtrl", 4 - batch)
    assert max(errors(got, bptt(name, batch)).values()) < TIGHT
    assert all(p.exact for p in report.parameters.values())


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("name", CELLS)
def test_what_is_called_exact_is_exact_and_nothing_else(name, batch):
    report, got = learned(name, batch, "d_rtrl", 3)
    error = errors(got, bptt(name, batch))
    assert list(error) == [k for (k,) in report.parameters]
    for (k,), p in report.parameters.items():
        assert p.exact == (error[k] < TIGHT), p
        assert p.exact or (p.dropped and all(d.line for d in p.dropped)), p


def twin(name):
    """The cell with operators of braintrace, as a module."""
    step, params, state = CELLS[name](1, bt.matmul, bt.element_wise)

    class Twin(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            for k, a in params.items():
                setattr(self, "w_" + k, brainstate.ParamState(a))
            self.states_of = {k: brainstate.HiddenState(a) for k, a in state.items()}

        def update(self, x):
            now = {k: s.value for k, s in self.states_of.items()}
            new, out = step({k: getattr(self, "w_" + k).value for k in params}, now, x)
            for k, s in self.states_of.items():
                s.value = new[k]
            return out

    return Twin()


@pytest.mark.parametrize("name", CELLS)
def test_d_rtrl_is_its_definition(name):
    want = reference_grad("d_rtrl", twin(name), lambda net, x: loss(net(x)), inputs(1))
    _, got = learned(name, 1, "d_rtrl", 3)
    error = errors(got, {path[0].removeprefix("w_"): a for path, a in want.items()})
    assert max(error.values()) < TIGHT, error


@pytest.mark.parametrize("name", CELLS)
def test_blocks_are_steps_are_the_gradient_of_a_scan(name):
    step, params, state = CELLS[name](2)
    net = bt.online(step, "d_rtrl")
    carry, xs = net.init(params, state, inputs(2)[0]), inputs(2)
    _, want = learned(name, 2, "d_rtrl", 3)

    def scanned(params):
        body = lambda carry, x: net(params, carry, x)
        return jnp.sum(jax.vmap(loss)(jax.lax.scan(body, carry, xs)[1]))

    blocks = lambda params: jnp.sum(jax.vmap(loss)(net.scan(params, carry, xs)[1]))
    for got in (
        learned(name, 2, "d_rtrl", 1)[1],
        computed(lambda: jax.grad(blocks)(params)),
        computed(lambda: jax.grad(scanned)(params)),
    ):
        assert max(errors(got, want).values()) < TIGHT


@pytest.mark.parametrize("name", CELLS)
def test_mapped_over_samples_is_a_batch(name):
    step, params, state = CELLS[name](2)
    one = lambda tree: jax.tree.map(lambda a: a[None], tree)

    def mapped(params, state, x):
        sample = lambda state, x: step(params, one(state), one(x))
        return jax.tree.map(lambda a: a[:, 0], jax.vmap(sample)(state, x))

    net = bt.online(mapped, "d_rtrl")
    carry = net.init(params, state, inputs(2)[0])
    got = computed(lambda: net.grad(loss, block_size=3)(params, carry, inputs(2))[0])
    report, want = learned(name, 2, "d_rtrl", 3)
    assert max(errors(got, want).values()) < TIGHT
    claims = lambda report: [(k, p.how, p.exact) for k, p in report.parameters.items()]
    assert claims(net.report) == claims(report)
