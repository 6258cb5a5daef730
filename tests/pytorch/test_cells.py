"""Cells of PyTorch learn: RTRL is BPTT of the unrolled module, and the certificate is true."""

import importlib.util
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

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


def gru(params, h, x, side="cell"):
    gates = lambda kind, v: jnp.split(
        v @ params[f"{side}.weight_{kind}"].T + params[f"{side}.bias_{kind}"], 3, -1
    )
    (ri, zi, ni), (rh, zh, nh) = gates("ih", x), gates("hh", h)
    r, z = jax.nn.sigmoid(ri + rh), jax.nn.sigmoid(zi + zh)
    return (1 - z) * jnp.tanh(ni + r * nh) + z * h


def gru_step(params, h, x):
    h = gru(params, h, x)
    return h, h @ params["out.weight"].T + params["out.bias"]


def lstm_step(params, state, x):
    h, c = state
    both = x @ params["cell.weight_ih"].T + params["cell.bias_ih"]
    both = both + h @ params["cell.weight_hh"].T + params["cell.bias_hh"]
    i, f, g, o = jnp.split(both, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h @ params["out.weight"].T + params["out.bias"]


def rnn_step(params, h, x):
    both = x @ params["cell.weight_ih"].T + params["cell.bias_ih"]
    h = jnp.tanh(both + h @ params["cell.weight_hh"].T + params["cell.bias_hh"])
    return h, h @ params["out.weight"].T + params["out.bias"]


def min_gru_step(params, h, x):
    z, g = jnp.split(x @ params["gates.weight"].T + params["gates.bias"], 2, -1)
    h = (1 - jax.nn.sigmoid(z)) * h + jax.nn.sigmoid(z) * g
    return h, h @ params["out.weight"].T + params["out.bias"]


def stack_step(params, state, x):
    a, b = state
    a = gru(params, a, x, "first")
    centred = a - a.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    normed = normed * params["norm.weight"] + params["norm.bias"]
    both = normed @ params["second.weight_ih"].T + params["second.bias_ih"]
    b = jax.nn.relu(both + b @ params["second.weight_hh"].T + params["second.bias_hh"])
    return (a, b), jnp.clip(b @ params["out.weight"].T + params["out.bias"], -3, 3)


TWINS = {
    "rnn": rnn_step,
    "gru": gru_step,
    "lstm": lstm_step,
    "min_gru": min_gru_step,
    "stack": stack_step,
}


@pytest.mark.parametrize("name", TWINS)
def test_a_rule_is_that_of_the_same_cell_in_jax(name):
    case = cells.CELLS[name]
    xs, state = cells.sequences(case, T, 4), case.state(4)
    ys = torch.randn(T, 4, cells.OUT, dtype=torch.float64)
    grads, _ = learned(case, "d_rtrl", state, xs, ys)
    params = {
        n: jnp.asarray(p.detach().numpy()) for n, p in cells.module_of(case).named_parameters()
    }
    state, xs, ys = jax.tree.map(lambda a: jnp.asarray(a.numpy()), (state, xs, ys))
    net = braintrace.online(TWINS[name], "d_rtrl")
    carry = net.init(params, state, xs[0])
    expected, _ = net.grad(loss)(params, carry, xs, ys)
    for n, g in expected.items():
        np.testing.assert_allclose(grads[n].numpy(), g, 1e-9, 1e-12)
