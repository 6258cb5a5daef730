"""brainstate's own cells learn online with `unmarked=True`; without it nothing changes."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from gradients import bptt_grad, online_grad
from oracle import reference_grad
from recognised import Recognised

T, B, I, N = 8, 2, 3, 4
CELLS = {
    "GRU": brainstate.nn.GRUCell,
    "LSTM": brainstate.nn.LSTMCell,
    "vanilla": brainstate.nn.ValinaRNNCell,
    "MGU": brainstate.nn.MGUCell,
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        yield


def compiled(kind, rule, batch=B):
    brainstate.random.seed(0)
    x = jnp.zeros((batch, I))
    return bt.compile(kind(I, N), rule, x, batch_size=batch, unmarked=True, seed=0)


def close(got, want):
    leaf = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        leaf(a, b)


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_brainstate(name):
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(T, B, I)))
    step = lambda net, x: jnp.sum(net(x) ** 2)
    learner = compiled(CELLS[name], "rtrl")
    learner.reset()
    want = bptt_grad(learner.model4compile, step, xs, reduction="sum")
    learner.reset()
    got = learner.etrace_grad(xs, step_fn=lambda x: step(learner, x), reduction="sum")
    close(got, want)
    diagonal = compiled(CELLS[name], "d_rtrl")
    assert all(p.how == "trace" for p in diagonal.report.parameters.values())

    def of_blocks(size):
        diagonal.reset()
        return diagonal.etrace_grad(xs, step_fn=lambda x: step(diagonal, x), block_size=size)

    close(of_blocks(1), of_blocks(3))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("batch", [2, 1])
def test_cells_of_brainstate_by_definition(name, batch):
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(T, batch, I)))
    step = lambda net, x: jnp.sum(net(x) ** 2)
    learner = compiled(CELLS[name], "d_rtrl", batch)
    got, truth = online_grad(learner, step, xs), bptt_grad(learner.model4compile, step, xs)
    for path, p in learner.report.parameters.items():
        pairs = zip(jax.tree.leaves(got[path]), jax.tree.leaves(truth[path]), strict=True)
        assert p.exact != any(np.abs(a - b).max() > 1e-9 for a, b in pairs), p
    graph, states = learner.graph, learner.model4compile.states()
    leaf = lambda leaf: jax.tree.leaves(states[leaf.path].value)[leaf.index]
    analysed = graph.analysis.step
    arrays = (list(map(leaf, leaves)) for leaves in (analysed.params, analysed.hidden))
    model = Recognised(graph.analysis, graph.module_info.consts, *arrays)
    want = reference_grad("d_rtrl", model, lambda m, x: jnp.sum(m(x)[0] ** 2), xs)
    for i, leaf in enumerate(analysed.params):
        close([jax.tree.leaves(got[leaf.path])[leaf.index]], [want["w", i]])


def test_without_it_a_plain_cell_is_refused_and_told_of_it():
    with pytest.raises(bt.CompilationError, match="unmarked=True") as refusal:
        bt.compile(brainstate.nn.GRUCell(I, N), "d_rtrl", jnp.zeros((B, I)), batch_size=B)
    assert "None" not in str(refusal.value)  # its lines are not the user's


def test_a_mapped_learner_takes_it_too():
    learner = bt.compile(
        brainstate.nn.GRUCell(I, N),
        "d_rtrl",
        jnp.zeros((B, I)),
        batch_size=B,
        vmap=True,
        unmarked=True,
    )
    assert all(p.how == "trace" for p in learner.report.parameters.values())
