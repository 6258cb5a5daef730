"""The network of examples/connectome.py and benchmarks/connectome.py: its edges, its gradient."""

import importlib.util
import sys
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from gradients import bptt_grad, online_grad

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def connectome():
    path, modules = list(sys.path), set(sys.modules)
    spec = importlib.util.spec_from_file_location("fly", FOLDER / "connectome.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name == "connectome":
            del sys.modules[name]


def gradients(make, through, *rules):
    """Learners of a small network, their gradients, and that of BPTT."""
    rng = np.random.default_rng(0)
    edges = {k: rng.integers(0, 5, 14) for k in ("pre", "post")}
    edges |= {"weight": 3 * rng.normal(size=14), "delay": rng.integers(1, 5, 14)}
    xs, target = jnp.asarray(rng.random((8, 8))), jnp.asarray(rng.uniform(5, 20, 5))
    loss = lambda net, x: jnp.mean((net(x) / u.Hz - target) ** 2)
    with brainstate.environ.context(dt=1.0 * u.ms):
        network = make(edges, through=through)
        network.bias = network.bias + 30 * u.mV  # so that all of them fire
        learners = [braintrace.compile(network, rule, xs[0]) for rule in rules]
        online = [online_grad(a, loss, xs, block_size=2) for a in learners]
        brainstate.nn.init_all_states(network)
        return learners, online, bptt_grad(network, loss, xs)


def close(a, b):
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    jax.tree.map(same, dict(a), dict(b))


def exact(learner):
    return {p.exact for p in learner.report.parameters.values()}


def width(learner):
    return next(iter(learner.etraces.values())).value["weight"].shape[-1]


@pytest.mark.parametrize("kind", ["Connectome", "Conductances"])
def test_synapses_are_exact_where_spikes_are_sent_without_a_derivative(connectome, kind):
    (learner,), (online,), bptt = gradients(getattr(connectome, kind), False, "d_rtrl")
    assert exact(learner) == {True} and width(learner) == 2
    close(online, bptt)
    assert all(np.abs(a).max() > 1e-3 for a in jax.tree.leaves(dict(bptt)))


def test_a_derivative_of_spikes_changes_rtrl_only(connectome):
    make = connectome.Connectome
    (cut, full), (d_rtrl, rtrl), bptt = gradients(make, True, "d_rtrl", "rtrl")
    _, (sent,), _ = gradients(make, False, "d_rtrl")
    assert exact(full) == {True} and exact(cut) == {False} and width(cut) == 5
    close(rtrl, bptt)
    close(d_rtrl, sent)
    off = jax.tree.map(lambda a, b: np.abs(a - b).max(), dict(rtrl), dict(d_rtrl))
    assert max(jax.tree.leaves(off)) > 1e-5
