"""Nodes of NIR beside layers and leaky neurons, adaptive cells as graphs, and another simulator."""

import brainstate
import jax.numpy as jnp
import nir
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.lab.nir import from_nir, to_nir
from braintrace.nn import ALIFCell, LeakyRateReadout
from interpret import computed

T, I, N = 24, 3, 5
DT = 1e-3
EDGES = [("input", "it"), ("it", "output")]
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def setting():
    brainstate.random.seed(3)
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


def outputs(layers, xs):
    for layer in layers:
        brainstate.nn.init_all_states(layer, batch_size=xs.shape[1])

    def step(x):
        for layer in layers:
            x = layer(x)
        return x

    return computed(lambda: brainstate.transform.for_loop(step, jnp.asarray(xs)))


def through(node, shape, xs, **options):
    """A graph with this node between an input and an output of a shape."""
    nodes = {"input": nir.Input(np.array(shape)), "it": node, "output": nir.Output(np.array(shape))}
    return outputs([from_nir(nir.NIRGraph(nodes, EDGES, type_check=False), DT, **options)], xs)


@pytest.mark.parametrize("kind", [nir.SumPool2d, nir.AvgPool2d])
@pytest.mark.parametrize(
    "window, stride, padding", [((2, 2), (2, 2), (0, 0)), ((3, 2), (1, 2), (1, 0))]
)
def test_pools_are_sums_and_means_of_windows(kind, window, stride, padding):
    xs = RNG.normal(size=(2, 2, 3, 5, 6))
    arrays = map(np.array, (window, stride, padding))
    got = through(kind(*arrays), (3, 5, 6), xs)
    (ph, pw), (h, w), (sh, sw) = padding, window, stride
    padded = np.pad(xs, [(0, 0)] * 3 + [(ph, ph), (pw, pw)])
    rows, columns = (padded.shape[3] - h) // sh + 1, (padded.shape[4] - w) // sw + 1
    want = np.stack([np.stack([
        padded[..., i * sh : i * sh + h, j * sw : j * sw + w].sum((-1, -2))
        for j in range(columns)], -1) for i in range(rows)], -2)  # fmt: skip
    want = want if kind is nir.SumPool2d else want / (h * w)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_delays_hold_each_number_for_its_steps():
    steps, xs = np.array([0, 1, 4]), RNG.normal(size=(T, 2, 3))
    got = through(nir.Delay(steps * DT), (3,), xs)
    for j, k in enumerate(steps):
        np.testing.assert_array_equal(got[k:, :, j], xs[: T - k, :, j])
        assert not np.any(got[:k, :, j])


@pytest.mark.parametrize("reset", ["hard", "soft"])
def test_integrators_without_leak_follow_their_equation(reset):
    r, threshold, xs = RNG.random(N) / DT, np.linspace(0.5, 1.5, N), RNG.random((T, 1, N))
    node = nir.IF(r=r, v_threshold=threshold, v_reset=np.full(N, -0.2))
    got, v = through(node, (N,), xs, reset=reset), np.zeros(N)
    z, want = np.zeros(N), []
    for x in xs[:, 0]:
        v = np.where(z, -0.2, v) if reset == "hard" else v - threshold * z
        v = v + r * DT * x
        z = (v > threshold).astype(float)
        want.append(z)
    assert 0.1 < np.mean(want) < 0.9
    np.testing.assert_array_equal(got[:, 0], want)


@pytest.mark.parametrize("recurrent", [True, False])
def test_adaptive_cell_is_a_graph_of_integrators_with_its_spikes(recurrent, tmp_path):
    options = {"tau": np.linspace(3, 20, N) * u.ms, "tau_a": 30 * u.ms, "recurrent": recurrent}
    weights = {"w_init": RNG.normal(size=(I, N)), "u_init": RNG.normal(size=(N, N))}
    cell = ALIFCell(I, N, beta=np.linspace(0.1, 1, N), V_th=0.7, **options, **weights)
    layers = [cell, LeakyRateReadout(N, 2)]
    xs = 2 * RNG.normal(size=(T, 2, I))
    nir.write(tmp_path / "a", to_nir(layers))
    graph = nir.read(tmp_path / "a")
    network, expected = from_nir(graph), outputs(layers[:1], xs)
    assert 0.05 < expected.mean() < 0.9
    got, want = outputs([network], xs), outputs(layers, xs)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    names = {type(node).__name__ for node in graph.nodes.values()}
    assert {"Threshold", "LI"} <= names and not {"LIF"} & names
    again = to_nir(network)
    assert set(again.edges) == set(graph.edges) and set(again.nodes) == set(graph.nodes)


def test_a_graph_of_an_adaptive_cell_learns_as_the_cell():
    weights = {"w_init": RNG.normal(size=(I, N)), "b_init": None}
    cell = ALIFCell(I, N, recurrent=False, **weights)
    xs = jnp.asarray(2 * RNG.normal(size=(8, I)))

    def gradient(model, path):
        learner = braintrace.compile(model, "rtrl", xs[0])
        grads = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
        return grads[path]["weight"]

    path = ("layers", "alifcell_0_w", "weight")
    got = gradient(from_nir(to_nir(cell)), path)
    np.testing.assert_allclose(got, gradient(cell, ("W", "weight")), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["LIF", "CubaLIF"])
def test_snntorch_spikes_the_same(kind):
    torch, snntorch = (pytest.importorskip(name) for name in ("torch", "snntorch.import_nir"))
    dt = 1e-4  # of its importer
    tau, ones = np.full(N, 8 * dt), np.ones(N)
    own = {"v_leak": 0 * ones, "v_threshold": ones, "r": tau / dt}
    if kind == "CubaLIF":
        own |= {"tau_mem": tau, "tau_syn": tau / 2, "w_in": tau / 2 / dt}
    else:
        own |= {"tau": tau}
    first, second = (
        nir.Affine(RNG.normal(size=(N, I)), RNG.normal(size=N)),
        nir.Linear(RNG.normal(size=(N, N))),
    )
    node = getattr(nir, kind)
    graph = nir.NIRGraph.from_list(first, node(**own), second, node(**own))
    xs = RNG.normal(size=(T, 2, I)).astype(np.float32)
    with brainstate.environ.context(precision=32):
        ours = outputs([from_nir(graph, dt)], xs)
    theirs, state, network = [], None, snntorch.import_from_nir(graph)
    for x in xs:
        spikes, state = network(torch.from_numpy(x), state)
        theirs.append(spikes.detach().numpy())
    assert 0.05 < np.mean(ours) < 0.95
    np.testing.assert_array_equal(ours, theirs)


def loop(*names):
    """Thresholds and linear maps in a circle, with an input."""
    kinds = {
        "t": nir.Threshold(np.ones(N)),
        "w": nir.Linear(np.eye(N)),
        "d": nir.Delay(DT * np.ones(N)),
    }
    nodes = {name: kinds[name] for name in names}
    nodes |= {"input": nir.Input(np.array([N])), "output": nir.Output(np.array([N]))}
    circle = list(zip(names, (*names[1:], names[0]), strict=True))
    return nir.NIRGraph(nodes, [("input", names[0]), *circle, (names[0], "output")])


def node_error(node, shape):
    return lambda: through(node, shape, np.zeros((1, 1, *shape)))


pair = lambda a, b: np.array([a, b])
REFUSED = {
    "a delay between steps": (node_error(nir.Delay(np.full(3, 1.5 * DT)), (3,)), "of 1.5 steps"),
    "a delay before": (node_error(nir.Delay(np.full(3, -DT)), (3,)), "is not negative"),
    "a pool of no image": (
        node_error(nir.SumPool2d(pair(2, 2), pair(1, 1), pair(0, 0)), (3,)), "over the height"),
    "a pool of too little": (
        node_error(nir.SumPool2d(pair(9, 2), pair(1, 1), pair(0, 0)), (1, 3, 3)), "smaller than"),
    "a threshold of another shape": (
        node_error(nir.Threshold(np.ones(2)), (3,)), "finite number for each"),
    "a loop of a threshold alone": (lambda: from_nir(loop("t", "w"), DT), "closes a loop"),
    "a loop through a delay": (lambda: from_nir(loop("t", "d"), DT), r"'d' \(Delay\)|'input'"),
    "a hard reset": (lambda: to_nir(ALIFCell(I, N, reset="hard")), "its reset is 'hard'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_here_is_refused(name):
    call, text = REFUSED[name]
    with pytest.raises((ValueError, braintrace.NotSupportedError), match=text) as refusal:
        call()
    assert "why:" in str(refusal.value) and "do:" in str(refusal.value)
