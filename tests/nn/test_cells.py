"""Values, initial values and refusals of the cells; docs/cells.md holds their gradients."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
import scipy.linalg
from registry import ENTRIES

from braintrace import nn

RNG = np.random.default_rng(0)
INPUTS = jnp.asarray(RNG.normal(size=(3, 2, 3)))
NORMAL = brainstate.nn.init.Normal(0.5)
BIASED = {"w_init": NORMAL, "b_init": NORMAL, "state_init": NORMAL}


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def value(state):
    return np.asarray(state.value)


def affine(layer, *parts):
    p = layer.weight.value
    y = np.concatenate(parts, -1) @ np.asarray(p["weight"])
    return y + np.asarray(p["bias"]) if "bias" in p else y


def gate(layer, *parts):
    return sigmoid(affine(layer, *parts))


def mgu(cell, x, h):
    f = gate(cell.Wf, x, h)
    return (1 - f) * h + f * np.tanh(affine(cell.Wh, x, f * h))


def cfn(cell, x, h):
    return gate(cell.Wf, x, h) * np.tanh(h) + gate(cell.Wi, x, h) * np.tanh(affine(cell.Wh, x))


def reset_after(cell, x, h):
    z, r = gate(cell.Wz, x, h), gate(cell.Wr, x, h)
    return (1 - z) * h + z * np.tanh(affine(cell.Wx, x) + r * affine(cell.Wh, h))


def minimal_rnn(cell, x, h):
    z = affine(cell.phi, x)
    f = gate(cell.W_u, z, h)
    return f * h + (1 - f) * z


def mini_gru(cell, x, h):
    z = gate(cell.W_z, x, h)
    return (1 - z) * h + z * affine(cell.W_x, x)


def mini_lstm(cell, x, h):
    return gate(cell.W_f, x, h) * h + gate(cell.W_i, x, h) * affine(cell.W_x, x)


def min_gru(cell, x, h):
    z = gate(cell.Wz, x)
    return (1 - z) * h + z * affine(cell.Wh, x)


def min_lstm(cell, x, h):
    f, i, y = gate(cell.Wf, x), gate(cell.Wi, x), affine(cell.Wh, x)
    return (f * h + i * np.where(y >= 0, y + 0.5, sigmoid(y))) / (f + i)


def rg_lru(cell, x, h):
    a = np.exp(-8 * np.log1p(np.exp(value(cell.Lambda))) * gate(cell.Wr, x))
    u = x if cell.Wu is None else affine(cell.Wu, x)
    return a * h + np.sqrt(1 - a**2) * gate(cell.Wi, x) * u


ONE_STATE = {
    "mgu": (lambda: nn.MGUCell(3, 4, **BIASED), mgu),
    "cfn": (lambda: nn.CFNCell(3, 4, **BIASED), cfn),
    "reset_after": (lambda: nn.GRUResetAfterCell(3, 4, **BIASED), reset_after),
    "minimal_rnn": (lambda: nn.MinimalRNNCell(3, 4, **BIASED), minimal_rnn),
    "mini_gru": (lambda: nn.MiniGRU(3, 4, **BIASED), mini_gru),
    "mini_lstm": (lambda: nn.MiniLSTM(3, 4, **BIASED), mini_lstm),
    "min_gru": (lambda: nn.MinGRUCell(3, 4, **BIASED), min_gru),
    "min_lstm": (lambda: nn.MinLSTMCell(3, 4, activation="positive", **BIASED), min_lstm),
    "rg_lru": (lambda: nn.RGLRUCell(3, 4, **BIASED), rg_lru),
    "rg_lru_plain": (lambda: nn.RGLRUCell(3, 3, r_min=0.1, **BIASED), rg_lru),
}


@pytest.mark.parametrize("name", ONE_STATE)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_cell_follows_its_equation(name, batch_size):
    make, step = ONE_STATE[name]
    cell = make()
    cell.init_state(batch_size)
    h = value(cell.h)
    for x in INPUTS if batch_size else INPUTS[:, 0]:
        out, h = cell(x), step(cell, np.asarray(x), h)
        np.testing.assert_allclose(out, h, rtol=1e-6)
        np.testing.assert_allclose(cell.h.value, h, rtol=1e-6)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_urlstm_follows_its_equations(batch_size):
    cell = nn.URLSTMCell(3, 4, w_init=NORMAL, state_init=NORMAL)
    cell.init_state(batch_size)
    b, c, h = value(cell.bias), value(cell.c), value(cell.h)
    for x in INPUTS if batch_size else INPUTS[:, 0]:
        out = cell(x)
        f, r = sigmoid(affine(cell.Wf, x, h) + b), sigmoid(affine(cell.Wr, x, h) - b)
        g = r * (1 - (1 - f) ** 2) + (1 - r) * f**2  # the refined gate, between f² and 1 - (1 - f)²
        c = g * c + (1 - g) * np.tanh(affine(cell.Wu, x, h))
        h = gate(cell.Wo, x, h) * np.tanh(c)
        np.testing.assert_allclose(out, h, rtol=1e-6)
        np.testing.assert_allclose(cell.c.value, c, rtol=1e-6)


def matrix(re, im):
    return np.asarray(re.weight.value["weight"]) + 1j * np.asarray(im.weight.value["weight"])


def held(rate, step):
    """One step of dh/dt = rate h + 1 from an exponential of the system and its input."""
    both = [scipy.linalg.expm([[a * s, s], [0, 0]]) for a, s in zip(rate, step, strict=True)]
    return np.array([m[0, 0] for m in both]), np.array([m[0, 1] for m in both])


def trapezoid(rate, step):
    """(new - old) / step = rate (new + old) / 2 + 1."""
    return (1 / step + rate / 2) / (1 / step - rate / 2), 1 / (1 / step - rate / 2)


def lru(cell):
    radius, phase = np.exp(-np.exp(value(cell.nu_log))), np.exp(value(cell.theta_log))
    return radius * np.exp(1j * phase), np.exp(value(cell.gamma_log)), 1


def s5(discrete):
    def of(cell):
        rate = -np.exp(value(cell.log_rate)) + 1j * value(cell.frequency)
        return *discrete(rate, np.exp(value(cell.log_step))), 2

    return of


LINEAR = {
    "lru": (lambda: nn.LRUCell(3, 4), lru),
    "s5_zoh": (lambda: nn.S5Cell(3, 4), s5(held)),
    "s5_bilinear": (lambda: nn.S5Cell(3, 4, discretization="bilinear"), s5(trapezoid)),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_linear_recurrence_follows_its_equation(name, batch_size):
    make, terms = LINEAR[name]
    cell = make()
    cell.init_state(batch_size)
    kept, taken, copies = terms(cell)
    h = 0j
    for x in INPUTS if batch_size else INPUTS[:, 0]:
        y = cell(x)
        h = kept * h + taken * (x @ matrix(cell.B_re, cell.B_im))
        np.testing.assert_allclose(cell.h_re.value + 1j * cell.h_im.value, h, rtol=1e-6, atol=1e-9)
        expected = copies * (h @ matrix(cell.C_re, cell.C_im)).real + value(cell.D) * x
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_trace_unit_follows_its_equation(batch_size):
    brainstate.random.seed(0)  # units on both sides of the threshold
    cell = nn.RTUCell(3, 4, activation="relu")
    cell.init_state(batch_size)
    kept = np.exp(-np.exp(value(cell.nu_log)) + 1j * np.exp(value(cell.theta_log)))
    h = 0j
    for x in INPUTS if batch_size else INPUTS[:, 0]:
        y = cell(x)
        h = kept * h + np.sqrt(1 - np.abs(kept) ** 2) * (x @ matrix(cell.B_re, cell.B_im))
        expected = np.maximum(np.concatenate([h.real, h.imag], -1), 0)
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-9)
    assert (y > 0).any() and (y == 0).any()


MAKERS = {
    **{k: v[0] for k, v in {**ONE_STATE, **LINEAR}.items()},
    "rtu": lambda: nn.RTUCell(3, 4),
    "ur": lambda: nn.URLSTMCell(3, 4),
}


@pytest.mark.parametrize("name", MAKERS)
def test_cell_makes_and_resets_hidden_states(name):
    cell = MAKERS[name]()
    cell.state_init = 0.25
    brainstate.nn.init_all_states(cell, batch_size=2)
    assert {k[-1] for k in cell.states(brainstate.HiddenState)} == set(cell.state_names)
    y = cell(INPUTS[0])
    assert y.shape == (2, *cell.out_size)
    cell.reset_state(batch_size=5)
    for state in cell.state_names:
        assert getattr(cell, state).value.shape == (5, *cell.state_size)
        assert (getattr(cell, state).value == 0.25).all()


@pytest.mark.parametrize("name", ["GRUCell", "AdLIFCell", "S5Cell"])
def test_cell_keeps_the_precision_of_the_environment(name):
    with brainstate.environ.context(precision="bf16", dt=1.0 * u.ms):
        cell, x = ENTRIES[name].make()
        brainstate.nn.init_all_states(cell, batch_size=2)
        y = cell(x.astype(jnp.bfloat16))
    found = {path: state.value for path, state in cell.states().items()}
    assert {a.dtype for a in jax.tree.leaves([y, found])} == {jnp.dtype("bfloat16")}


# ------------------------------------------------------------------------------- initial values


def test_eigenvalues_of_an_lru_start_in_their_ring():
    cell = nn.LRUCell(3, 500, r_min=0.8, r_max=0.95, max_phase=0.5)
    kept, scale, _ = lru(cell)
    radius = np.abs(kept)
    assert 0.8 <= radius.min() < 0.81 and 0.94 < radius.max() <= 0.95
    assert 0 < np.angle(kept).min() and 0.45 < np.angle(kept).max() <= 0.5
    np.testing.assert_allclose(scale, np.sqrt(1 - radius**2), rtol=1e-6)
    np.testing.assert_allclose(np.median(radius**2), (0.8**2 + 0.95**2) / 2, atol=0.02)


def test_real_gated_unit_remembers_long_at_the_start():
    cell = nn.RGLRUCell(3, 500)
    a = np.exp(-8 * np.log1p(np.exp(value(cell.Lambda))))
    assert 0.9 <= a.min() < 0.91 and 0.998 < a.max() <= 0.999


def test_state_space_model_starts_at_hippo():
    n = 6
    i, k = np.meshgrid(np.arange(2 * n), np.arange(2 * n), indexing="ij")
    hippo = -np.where(i > k, np.sqrt((2 * i + 1) * (2 * k + 1)), np.where(i == k, i + 1, 0))
    normal = hippo + np.sqrt(np.outer(np.arange(2 * n) + 0.5, np.arange(2 * n) + 0.5))
    eigenvalues = np.linalg.eigvals(normal)
    cell = nn.S5Cell(3, n, dt_min=0.01, dt_max=0.02)
    found = -np.exp(value(cell.log_rate)) + 1j * value(cell.frequency)
    expected = eigenvalues[eigenvalues.imag > 0]
    np.testing.assert_allclose(found, expected[np.argsort(expected.imag)], rtol=1e-6)
    step = np.exp(value(cell.log_step))
    assert 0.01 <= step.min() and step.max() <= 0.02


def test_forget_times_of_a_urlstm_start_uniform():
    cell = nn.URLSTMCell(3, 400)
    forget = sigmoid(value(cell.bias))
    assert 1 / 400 <= forget.min() and forget.max() <= 1 - 1 / 400
    np.testing.assert_allclose(np.quantile(forget, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.1)
    assert np.isfinite(value(nn.URLSTMCell(3, 1).bias)).all()


EXTREMES = {
    "lru": lambda: nn.LRUCell(3, 400),
    "rtu": lambda: nn.RTUCell(3, 400),
    "s5": lambda: nn.S5Cell(3, 16, dt_min=1e-6, dt_max=1e-5),
    "min_lstm": lambda: nn.MinLSTMCell(3, 4, b_init=-120.0),
    "rg_lru_shut": lambda: nn.RGLRUCell(3, 4, b_init=-200.0),
    "rg_lru_edge": lambda: nn.RGLRUCell(3, 400, r_min=0.0, r_max=1.0),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_are_finite_at_the_edges_in_float32(name):
    with brainstate.environ.context(precision=32):
        cell = EXTREMES[name]()
        params = cell.states(brainstate.ParamState)
        for state in params.values():
            state.value = jax.tree.map(lambda a: a.astype(jnp.float32), state.value)
        cell.init_state()
        for state in cell.state_names:
            getattr(cell, state).value = jnp.full(cell.state_size, 0.5, jnp.float32)
        x = INPUTS[0, 0].astype(jnp.float32)
        grads = brainstate.transform.grad(lambda: jnp.sum(cell(x) ** 2), params)()
    for path, grad in grads.items():
        for leaf in jax.tree.leaves(grad):
            assert leaf.dtype == jnp.float32 and jnp.isfinite(leaf).all(), path


# ---------------------------------------------------------------------------- choices, refusals


def test_map_of_a_minimal_network_may_be_any_function():
    cell = nn.MinimalRNNCell(3, 3, phi=jnp.tanh)
    cell.init_state()
    z = np.tanh(INPUTS[0, 0])
    expected = (1 - gate(cell.W_u, z, np.zeros(3))) * z
    np.testing.assert_allclose(cell(INPUTS[0, 0]), expected, rtol=1e-6)
    assert set(cell.states(brainstate.ParamState)) == {("W_u", "weight")}


def test_projection_of_a_real_gated_unit_is_a_choice():
    assert nn.RGLRUCell(3, 3).Wu is None
    assert nn.RGLRUCell(3, 3, project=True).Wu is not None
    with pytest.raises(ValueError, match=r"in_size.*\(3,\).*out_size.*\(4,\)(.|\n)*project"):
        nn.RGLRUCell(3, 4, project=False)


REFUSED = [
    (lambda: nn.GRUCell(3.0, 4), r"GRUCell: in_size is 3.0\.\n  why: (.|\n)*do: "),
    (lambda: nn.MinGRUCell(3, -4), r"MinGRUCell: out_size is -4"),
    (lambda: nn.LRUCell(3, 4.0), r"LRUCell: d_hidden is 4.0"),
    (lambda: nn.S5Cell(3, None), r"S5Cell: d_state is None"),
    (lambda: nn.Embedding(2.5, 4), r"Embedding: num_embeddings is 2.5"),
    (lambda: nn.Linear((2, "3"), (2, 4)), r"Linear: in_size is \(2, '3'\)"),
    (lambda: nn.GRUCell(True, 4), "GRUCell: in_size is True"),
    (lambda: nn.GRUCell((), 4), r"GRUCell: in_size is \(\)"),
    (lambda: nn.S5Cell(3, (4,)), r"S5Cell: d_state is \(4,\)(.|\n)*a positive integer"),
    (lambda: nn.S5Cell(3, 0), "S5Cell: d_state is 0"),
    (lambda: nn.LRUCell(3, 4, r_min=0.9, r_max=0.5), r"LRUCell: r_min is 0.9 and r_max is 0.5"),
    (lambda: nn.LRUCell(3, 4, r_max=1.5), r"beyond 1 the states explode"),
    (lambda: nn.LRUCell(3, 4, max_phase=0.0), r"max_phase is 0.0(.|\n)*positive number"),
    (lambda: nn.RTUCell(3, 4, max_phase=-1.0), r"RTUCell: max_phase is -1.0"),
    (lambda: nn.RGLRUCell(3, 4, r_max=2.0), r"RGLRUCell: r_min is 0.9 and r_max is 2.0"),
    (lambda: nn.S5Cell(3, 4, discretization="euler"), r"'euler'(.|\n)*zoh, bilinear"),
    (lambda: nn.S5Cell(3, 4, dt_min=0.2), r"dt_min is 0.2 and dt_max is 0.1"),
    (lambda: nn.MinGRUCell(3, 4, activation="g"), r"no activation 'g'(.|\n)*identity, positive"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_wrong_argument_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
