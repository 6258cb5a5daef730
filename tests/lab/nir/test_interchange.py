"""Networks as graphs of NIR and back, and the same files in another simulator."""

from importlib.metadata import version

import brainstate
import jax
import jax.numpy as jnp
import nir
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace.lab.nir import from_nir, to_nir
from braintrace.nn import Conv1d, Conv2d, LeakyRateReadout, LeakySpikeReadout, LIFCell, Linear
from interpret import computed

T, I, N = 24, 3, 5
DT = 1e-3


@pytest.fixture(autouse=True)
def setting():
    brainstate.random.seed(3)
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


def normal(*shape, scale=1.0, seed=0):
    array = scale * np.random.default_rng(seed).normal(size=shape)
    return array.astype(brainstate.environ.dftype())


def cell(n_in=I, n_out=N, **options):
    tau = np.linspace(3.0, 20.0, n_out) * u.ms
    options = {"w_init": normal(n_in, n_out), "u_init": normal(n_out, n_out), **options}
    return LIFCell(n_in, n_out, tau=tau, **options)


def readout():
    return LeakyRateReadout(N, 2, tau=7 * u.ms, w_init=normal(N, 2))


def outputs(layers, xs):
    """The outputs of layers in a row, along time."""
    for layer in layers:
        brainstate.nn.init_all_states(layer, batch_size=xs.shape[1])

    def step(x):
        for layer in layers:
            x = layer(x)
        return x

    return computed(lambda: brainstate.transform.for_loop(step, xs))


def copied(graph, path):
    nir.write(path, graph)
    return nir.read(path)


def conv_layers():
    first = Conv1d(
        (2, 8), 3, 3, padding=1, channel_first=True, w_init=normal(3, 2, 3), b_init=normal(3)
    )
    flat = brainstate.nn.Flatten(in_size=first.out_size)
    return [first, flat, cell(24, N, recurrent=False, reset="hard")]


def image_layers():
    kernel = {"stride": 2, "padding": "VALID", "w_init": normal(3, 3, 2, 4)}
    first = Conv2d((2, 6, 6), 4, 3, channel_first=True, **kernel)
    flat = brainstate.nn.Flatten(in_size=first.out_size)
    masked = Linear(16, N, normal(16, N), w_mask=normal(16, N) > 0)
    spikes = LeakySpikeReadout(N, 2, reset="hard", V_th=0.3, w_init=normal(N, 2))
    return [first, flat, masked, spikes]


MODELS = {
    "hard": lambda: [cell(reset="hard")],
    "soft": lambda: [cell(reset="soft", b_init=None)],
    "trained tau": lambda: [cell(reset="hard", train_tau=True)],
    "units": lambda: [cell(reset="hard", V_th=2.0 * u.mV, w_init=normal(I, N) * u.mV, b_init=None)],
    "read-out": lambda: [cell(recurrent=False), readout()],
    "two layers": lambda: [Linear(I, N, normal(I, N)), cell(N, N), cell(N, 2, b_init=normal(2))],
    "convolution": conv_layers,
    "image": image_layers,
}


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, 64) for name in MODELS), ("soft", 32), ("read-out", 32)]
)
def test_file_keeps_every_spike(name, precision, tmp_path):
    with brainstate.environ.context(precision=precision):
        layers = MODELS[name]()
        xs = jnp.asarray(normal(T, 2, *layers[0].in_size, scale=2.0), f"float{precision}")
        graph = copied(to_nir(brainstate.nn.Sequential(*layers), soft_reset=True), tmp_path / "a")
        network = from_nir(graph)
        ours, expected = outputs([network], xs), outputs(layers, xs)
    assert ours.dtype == expected.dtype
    assert 0.05 < np.mean(expected != 0)
    tolerance = 1e-13 if (name, precision) == ("read-out", 64) else 0
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance)
    assert_same(to_nir(network, soft_reset=True), graph)


def assert_same(a, b):
    assert set(a.edges) == set(b.edges) and set(a.nodes) == set(b.nodes)
    for name in a.nodes:
        ours, theirs = a.nodes[name].to_dict(), b.nodes[name].to_dict()
        for key in ours.keys() | theirs.keys():
            np.testing.assert_array_equal(ours[key], theirs[key], f"{name} {key}")


def neurons(kind, n=N, **other):
    ones = np.ones(n)
    tau = np.linspace(4.0, 12.0, n) * DT
    base = {"r": tau / DT, "v_leak": 0 * ones}
    if "Cuba" in kind:
        base |= {"tau_mem": tau, "tau_syn": tau[::-1].copy(), "w_in": tau[::-1] / DT}
    else:
        base |= {"tau": tau}
    if "LIF" in kind:
        base |= {"v_threshold": ones}
    return getattr(nir, kind)(**{**base, **other})


def recurrent(kind, **other):
    """One layer that hears itself."""
    nodes = {
        "input": nir.Input(np.array([I])),
        "w": nir.Linear(normal(N, I)),
        "cells": neurons(kind, **other),
        "u": nir.Linear(normal(N, N, scale=0.7, seed=1)),
        "output": nir.Output(np.array([N])),
    }
    edges = [("input", "w"), ("w", "cells"), ("cells", "u"), ("u", "cells"), ("cells", "output")]
    return nir.NIRGraph(nodes, edges)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.skipif(version("spyx").startswith("0."), reason="its NIR is of another library")
@pytest.mark.parametrize(
    ("kind", "loop", "reset"),
    [
        ("CubaLIF", False, "soft"),
        ("CubaLIF", True, "soft"),
        ("LIF", False, "soft_after_leak"),
        ("LIF", True, "soft_after_leak"),
    ],
)
def test_another_simulator_spikes_the_same(kind, loop, reset, tmp_path):
    import spyx.nir

    if loop:
        graph = recurrent(kind)
    else:
        second = nir.Linear(normal(2, N, seed=2))
        graph = nir.NIRGraph.from_list(
            nir.Linear(normal(N, I)), neurons(kind), second, neurons(kind, 2)
        )
    nir.write(tmp_path / "a", graph)
    xs = jnp.asarray(normal(T, 2, I, scale=0.7, seed=5))
    theirs = spyx.nir.from_nir(nir.read(tmp_path / "a"), xs, dt=DT)[1]
    ours = outputs([from_nir(nir.read(tmp_path / "a"), DT, reset=reset)], xs)
    late = 1 if loop else 2  # their neurons return the spikes of the step before
    assert 0.05 < np.mean(ours) < 0.95
    np.testing.assert_array_equal(theirs[late:], ours[:-late])
    assert not np.any(theirs[:late])
    other = outputs([from_nir(nir.read(tmp_path / "a"), DT)], xs)
    assert np.any(other != ours)  # NIR's own reset is another one


@pytest.mark.parametrize("kind", ["LIF", "CubaLIF", "LI", "CubaLI"])
def test_neurons_follow_the_equations_of_nir(kind):
    """Forward Euler of the node's equations in absolute voltages, written out with numpy."""
    leak, ones = np.linspace(-0.4, 0.2, N), np.ones(N)
    more = {"v_leak": leak, "r": normal(N) ** 2 + 3}
    if "LIF" in kind:
        more |= {"v_threshold": 0.5 * ones, "v_reset": leak - 0.3}
    node = neurons(kind, **more)
    xs = normal(T, 1, N, scale=3.0)
    graph = nir.NIRGraph.from_list(node)
    ours = outputs([from_nir(graph, 1.0 * u.ms)], jnp.asarray(xs))
    v, i, expected = leak.copy(), 0 * ones, []
    tau = node.tau_mem if "Cuba" in kind else node.tau
    for x in xs[:, 0]:
        if "Cuba" in kind:
            i = i + DT / node.tau_syn * (-i + node.w_in * x)
        else:
            i = x
        v = v + DT / tau * (leak - v + node.r * i)
        if "LIF" in kind:
            z = v > node.v_threshold
            v = np.where(z, node.v_reset, v)
            expected.append(z)
        else:
            expected.append(v)
    expected = np.asarray(expected, float)
    assert 0 < np.mean(expected != 0)
    np.testing.assert_allclose(ours[:, 0], expected, rtol=1e-9, atol=1e-9 * ("LIF" not in kind))


def test_one_number_may_stand_for_all_neurons():
    scalar = {k: np.array([v]) for k, v in {"tau": 4 * DT, "r": 4.0, "v_leak": 0.0}.items()}
    few = nir.LIF(**scalar, v_threshold=np.array(1.0).reshape(1))
    many = nir.LIF(**{k: np.repeat(v, N) for k, v in scalar.items()}, v_threshold=np.ones(N))
    weight, xs = nir.Linear(normal(N, I)), jnp.asarray(normal(T, 2, I))
    edges = [("input", "w"), ("w", "lif"), ("lif", "output")]
    ends = {"input": nir.Input(np.array([I])), "output": nir.Output(np.array([N]))}
    graphs = [
        nir.NIRGraph({**ends, "w": weight, "lif": lif}, edges, type_check=False)
        for lif in (few, many)
    ]
    first, second = (outputs([from_nir(graph, DT)], xs) for graph in graphs)
    assert 0.05 < np.mean(first) < 0.95
    np.testing.assert_array_equal(first, second)


def test_loop_between_layers_and_graphs_inside():
    """Feedback comes a step later, other edges at once; a graph inside is its nodes."""
    inside = nir.NIRGraph.from_list(nir.Linear(normal(N, I)), neurons("LIF"))
    nodes = {
        "input": nir.Input(np.array([I])),
        "a": inside,
        "forth": nir.Linear(normal(2, N, seed=1)),
        "b": neurons("LIF", 2),
        "back": nir.Linear(normal(I, 2, seed=2)),
        "output": nir.Output(np.array([2])),
    }
    edges = [("input", "a"), ("a", "forth"), ("forth", "b"), ("b", "back"), ("back", "a")]
    network = from_nir(nir.NIRGraph(nodes, [*edges, ("b", "output")]), DT)
    sources = dict(network.order)
    assert sources["back"] == (("b", True),)
    assert sources["forth"] == (("a.lif", False),)
    assert {s for s, _ in sources["a.linear"]} == {"input", "back"}
    xs = jnp.asarray(normal(T, 2, I, scale=2.0))
    again = from_nir(to_nir(network), DT)
    spikes = outputs([network], xs)
    assert 0.05 < np.mean(spikes) < 0.95
    np.testing.assert_array_equal(outputs([again], xs), spikes)


@pytest.mark.parametrize("kind", ["LIF", "CubaLIF", "LI", "CubaLI"])
def test_recurrent_graph_comes_back_from_a_file(kind, tmp_path):
    network = from_nir(recurrent(kind), DT)
    again = from_nir(copied(to_nir(network), tmp_path / "a"), DT)
    xs = jnp.asarray(normal(T, 2, I, scale=0.7, seed=5))
    expected = outputs([network], xs)
    assert 0.05 < np.mean(expected != 0)
    np.testing.assert_array_equal(outputs([again], xs), expected)


def test_network_learns_as_the_cell_it_is_from():
    """Also backwards: the gradient of a rule is that of the original cell."""
    layers = [cell(reset="hard"), readout()]
    network = from_nir(to_nir(layers))
    xs = jnp.asarray(normal(8, I, scale=2.0))

    def grads(model):
        learner = braintrace.compile(model, "d_rtrl", xs[0])
        loss = lambda x: jnp.sum(learner(x) ** 2)
        gradient = lambda: learner.etrace_grad(xs, step_fn=loss, block_size=2)
        leaves = jax.tree.leaves(computed(gradient))
        return sorted(leaves, key=lambda a: (a.shape, float(a.sum())))

    ours, theirs = grads(brainstate.nn.Sequential(*layers)), grads(network)
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert np.any(a)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def scaled_graph():
    return nir.NIRGraph.from_list(neurons("LIF"), nir.Scale(np.ones(N)), nir.Scale(np.ones(N)))


def loop_without_neurons():
    graph = recurrent("LIF")
    return nir.NIRGraph(graph.nodes, [e for e in graph.edges if e[1] != "u"] + [("u", "u")])


def two_shapes():
    graph = nir.NIRGraph.from_list(nir.Linear(normal(N, I)), neurons("LIF"))
    graph.nodes["linear"].weight = normal(N, 2)
    return graph


REFUSED = {
    "a path": (lambda: from_nir("net.nir", DT), "takes a graph, not str"),
    "unknown nodes": (lambda: from_nir(scaled_graph(), DT), r"'scale' \(Scale\), 'sc"),
    "dt too long": (lambda: from_nir(recurrent("LIF"), 1.0), "node 'cells', LIF"),
    "no dt": (lambda: from_nir(recurrent("LIF"), 0.0), "time step dt is 0.0"),
    "dt of a length": (lambda: from_nir(recurrent("LIF"), 1.0 * u.mV), "time step dt is 1"),
    "reset": (
        lambda: from_nir(recurrent("LIF"), DT, reset="no"),
        "reset for node 'cells', LIF: 'no'",
    ),
    "metadata": (lambda: from_nir(recurrent("LIF", metadata={"reset": "up"}), DT), "LIF: 'up'"),
    "loop": (lambda: from_nir(loop_without_neurons(), DT), "loop u -> u is entered at 'u'"),
    "two shapes": (lambda: from_nir(two_shapes(), DT), r"node 'linear' \(Linear\) has a weight"),
    "not a number": (
        lambda: from_nir(recurrent("LIF", r=np.full(N, np.nan)), DT),
        "r is .*nan",
    ),
    "two outputs": (
        lambda: from_nir(
            nir.NIRGraph(
                {**(g := recurrent("LIF")).nodes, "more": nir.Output(np.array([N]))},
                [*g.edges, ("w", "more")],
            ),
            DT,
        ),
        "2 Output nodes: output, more",
    ),
    "adaptive cell": (
        lambda: to_nir([braintrace.nn.AdLIFCell(I, N, w_init=1.0, u_init=1.0), jnp.tanh]),
        r"layer 0 \(AdLIFCell\), layer 1",
    ),
    "order": (lambda: to_nir([Linear(N, 2), Linear(I, N)]), r"output \(2,\), layer 1 \(Linear\)"),
    "soft reset": (lambda: to_nir(cell()), "lifcell_0: its reset is 'soft'"),
    "channels last": (lambda: to_nir(Conv1d((8, 2), 3, 3)), "conv1d_0: channel_first=False"),
    "strided same": (
        lambda: to_nir(Conv1d((2, 8), 3, 3, stride=2, channel_first=True)),
        r"conv1d_0: it maps \(2, 8\) to \(3, 4\), its node \(2, 8\) to \(3, 8\)",
    ),
    "groups": (
        lambda: to_nir(Conv1d((2, 8), 4, 3, groups=2, channel_first=True)),
        r"its node \(1, 8\) to",
    ),
    "several axes": (lambda: to_nir(Linear((2, I), (2, N))), r"linear_0: its size is \(2, 3\)"),
    "units": (lambda: to_nir(Linear(I, N, normal(I, N) * u.mV)), "linear_0: it has the unit mV"),
    "another dt": (lambda: to_nir(from_nir(recurrent("LIF"), DT), 2 * DT), "network_0: its dt is"),
    "flatten": (lambda: to_nir([brainstate.nn.Flatten(), Linear(I, N)]), "flatten_0: it has no in"),
    "no leak": (lambda: to_nir(LIFCell(I, N, tau=1e30, reset="hard")), "decay of a step is 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_represented_is_refused(name):
    call, text = REFUSED[name]
    kinds = (ValueError, TypeError, braintrace.NotSupportedError)
    with pytest.raises(kinds, match=text) as refusal:
        call()
    assert "  why: " in str(refusal.value) and "  do: " in str(refusal.value)


def test_without_nir_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nir", None)
    with pytest.raises(ImportError, match=r"pip install 'braintrace-online\[nir\]'"):
        to_nir(cell())


def test_network_of_a_file_trains_sequence_after_sequence():
    """From reading to a trained file: reset between sequences, weights that changed are written."""
    network = from_nir(recurrent("LIF"), DT)
    learner = braintrace.compile(network, "d_rtrl", jnp.zeros((2, I)), batch_size=2)
    xs = jnp.asarray(normal(8, 2, I, scale=2.0))
    loss = lambda x: jnp.mean((learner(x) - 1) ** 2)
    options = {"step_fn": loss, "optimizer": optax.adam(0.05), "update_every": 4}
    losses = []
    for _ in range(5):
        learner.reset()
        assert not np.any(network.layers["cells"].V.value)
        losses.append(float(learner.etrace_train(xs, **options).mean()))
    assert losses[-1] < losses[0]
    written = to_nir(network).nodes["w"].weight
    assert np.any(written != recurrent("LIF").nodes["w"].weight)
    again = outputs([from_nir(to_nir(network), DT)], xs)
    np.testing.assert_array_equal(again, outputs([network], xs))
