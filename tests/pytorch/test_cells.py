"""Cells of PyTorch learn: RTRL is BPTT, the certificate is true, D-RTRL is that of JAX."""

import importlib.util
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import jax_twins as twins  # noqa: E402
import torch_cells as cells  # noqa: E402

import braintrace  # noqa: E402
import braintrace.torch as bt  # noqa: E402

T = 8
LIBRARIES = {
    "snntorch": (
        *("leaky", "leaky_inside", "synaptic", "alpha", "r_leaky", "r_synaptic", "slstm"),
    ),
    "spikingjelly": ("lif_node", "parametric_lif_node"),
    "norse": ("LIFCell", "LIFRecurrentCell", "LSNNCell", "LIFAdExCell"),
}
NAMES = [(None, name) for name in cells.CELLS]
NAMES += [(library, name) for library, names in LIBRARIES.items() for name in names]


@cache
def cells_of(library):
    if library is None:
        return cells.CELLS
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return getattr(cells, f"{library}_cells")()


def loss(out, y):
    return ((out - y) ** 2).mean()


def by_bptt(case, state, xs, ys):
    """Gradients through the unrolled module, of a new one: it may keep states inside."""
    net = cells.module_of(case)
    total = 0.0
    for x, y in zip(xs, ys, strict=True):
        if state is None:
            out = net(x)
        else:
            state, out = net(state, x)
        total = total + loss(out, y)
    total.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def learned(case, rule, state, xs, ys):
    """Gradients of a learner, and its report."""
    net = cells.module_of(case)
    learner = bt.online(net, rule, state, xs[0])
    losses = learner.grad(loss)(xs, ys)
    assert losses.shape == (len(xs),)
    return {name: p.grad for name, p in net.named_parameters()}, learner.report


def distance(one, other):
    scale = max(float(other.norm()), 1e-3)
    return float((one - other).norm()) / scale


@pytest.mark.parametrize(
    ("library", "name", "batch"),
    [(*case, batch) for batch in (4, 1) for case in NAMES],
)
def test_rtrl_is_bptt_and_the_certificate_is_true(library, name, batch):
    case = cells_of(library)[name]
    state = cells.converted(case.state(batch), case.dtype)
    xs = cells.sequences(case, T, batch)
    first = cells.module_of(case)
    with torch.no_grad():
        out = first(xs[0]) if state is None else first(state, xs[0])[1]
    ys = torch.randn(T, *out.shape, dtype=out.dtype)
    expected = by_bptt(case, state, xs, ys)
    tight = 1e-9 if case.dtype == torch.float64 else 1e-5
    grads, _ = learned(case, "rtrl", state, xs, ys)
    assert [n for n, g in expected.items() if distance(grads[n], g) >= tight] == []
    grads, report = learned(case, "d_rtrl", state, xs, ys)
    exact = {str(p.path[-1]): p.exact for p in report.parameters.values()}
    close = {n: distance(grads[n], g) < max(tight, 1e-7) for n, g in expected.items()}
    assert exact == close
    assert all(exact.values()) == case.exact


@pytest.mark.parametrize(("library", "name"), NAMES)
def test_d_rtrl_is_that_of_the_same_cell_in_jax(library, name):
    case = cells_of(library)[name]
    state = cells.converted(case.state(4), case.dtype)
    xs = cells.sequences(case, T, 4)
    ys = torch.randn(T, 4, cells.OUT if library is None else cells.H, dtype=case.dtype)
    grads, _ = learned(case, "d_rtrl", state, xs, ys)
    named = cells.module_of(case).named_parameters()
    params = {n: jnp.asarray(p.detach().numpy()) for n, p in named}
    arrays = lambda tree: jax.tree.map(lambda a: jnp.asarray(a.detach().numpy()), tree)
    state = twins.started(name, 4, xs.numpy().dtype) if state is None else arrays(state)
    net = braintrace.online(twins.TWINS[name], "d_rtrl")
    carry = net.init(params, state, arrays(xs)[0])
    expected, _ = net.grad(loss)(params, carry, arrays(xs), arrays(ys))
    tight = 1e-9 if case.dtype == torch.float64 else 1e-5
    for n, g in expected.items():
        assert distance(grads[n], torch.tensor(np.asarray(g))) < tight, n


def test_every_cell_has_a_twin():
    assert sorted(name for _, name in NAMES) == sorted(twins.TWINS) and len(NAMES) >= 20
