"""Spiking cells against their equations in numpy, and their gradients against BPTT."""

from functools import partial

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.nn import AdLIFCell, ALIFCell, GIFCell, LeakySpikeReadout, LIFCell, SpikingCell

T, B, I, N = 12, 2, 3, 4
CELLS = [LIFCell, ALIFCell, AdLIFCell, GIFCell]
RNG = np.random.default_rng(0)
XS = jnp.asarray(0.6 * RNG.normal(size=(T, B, I)))
TARGETS = jnp.asarray(RNG.normal(size=(T, B, N)))
NORMAL = brainstate.nn.init.Normal(0.0, 1.0)
MS = partial(brainstate.environ.context, dt=1.0 * u.ms)
UNITS = jnp.linspace(0.5, 1.5, N)


def keep(tau):
    return np.exp(-1.0 / np.asarray(tau))


def reset(cell, V, z):
    return V - np.asarray(cell.V_th) * z if cell.soft else V * (1 - z)


def drive(cell, x, z):
    p = cell.W.weight.value
    into = np.asarray(x) @ p["weight"] + p["bias"]
    return into if cell.U is None else into + z @ np.asarray(cell.U.weight.value["weight"])


def lif(cell, x, s):
    z = (s["V"] > cell.V_th) * 1.0
    V = keep(20.0) * reset(cell, s["V"], z) + drive(cell, x, z)
    return {"V": V}, V > cell.V_th


def alif(cell, x, s):
    z = (s["V"] > cell.V_th + 0.5 * s["a"]) * 1.0
    V = keep(20.0) * reset(cell, s["V"], z) + drive(cell, x, z)
    a = keep(200.0) * s["a"] + z
    return {"V": V, "a": a}, V > cell.V_th + 0.5 * a


def adlif(cell, x, s):
    z = (s["V"] > cell.V_th) * 1.0
    A, R = keep(20.0), keep(100.0)
    V = A * reset(cell, s["V"], z) + drive(cell, x, z) - (1 - A) * s["w"]
    z = V > cell.V_th
    w = R * s["w"] + (1 - R) * (1.0 * reset(cell, V, z * 1.0) + 1.0 * z)
    return {"V": V, "w": w}, z


def gif(cell, x, s):
    z = (s["V"] > cell.V_th) * 1.0
    I1 = keep(10.0) * s["I1"] + 0.05 * z
    I2 = keep(500.0) * s["I2"] - 0.01 * z
    V = keep(20.0) * reset(cell, s["V"], z) + drive(cell, x, z) + I1 + I2
    return {"V": V, "I1": I1, "I2": I2}, V > cell.V_th


EQUATIONS = dict(zip(CELLS, (lif, alif, adlif, gif), strict=True))


def made(kind, batch_size=B, **options):
    brainstate.random.seed(1)
    with MS():
        cell = kind(I, N, **{"w_init": NORMAL, "u_init": NORMAL, **options})
    cell.init_state(batch_size)
    return cell


def loss(net, x, target):
    return jnp.sum((net(x) - target) ** 2)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "options",
    [{"reset": "hard", "V_th": UNITS}, {"recurrent": False, "b_init": 0.1}],
)
def test_cell_follows_its_equations(kind, options):
    cell = made(kind, **options)
    cell.soft = options.get("reset", "soft") == "soft"
    hidden = cell.states(brainstate.HiddenState)
    s = {key: np.zeros((B, N)) for (key,) in hidden}
    count = 0
    for x in XS:
        s, z = EQUATIONS[kind](cell, x, s)
        np.testing.assert_array_equal(cell(x), z)
        for key, value in s.items():
            np.testing.assert_allclose(hidden[(key,)].value, value, rtol=1e-9, atol=1e-12)
        count += z.sum()
    assert 0.05 < count / (T * B * N) < 0.9
    cell.reset_state(batch_size=5)
    for path, state in cell.states(brainstate.HiddenState).items():
        assert state is hidden[path] and state.value.shape == (5, N) and not state.value.any()


@pytest.mark.parametrize("kind", CELLS)
def test_rtrl_is_bptt_and_d_rtrl_without_recurrence(kind):
    tau = jnp.linspace(5.0, 30.0, N) * u.ms
    options = {"tau": tau, "train_tau": True, "surrogate": "fast_sigmoid", "V_th": UNITS}
    for rule, recurrent in (("rtrl", True), ("d_rtrl", False)):
        cell = made(kind, recurrent=recurrent, **options)
        learner = braintrace.compile(cell, rule, XS[0], batch_size=B, strict=True)
        found = braintrace.verify.compare(learner, loss, XS[:6], TARGETS[:6])
        assert found.max_error < 1e-9
        rates = sum(path[-1] == "rate" for path in learner.report.parameters)
        assert rates == {LIFCell: 1, GIFCell: 3}.get(kind, 2)
        grads = braintrace.verify.bptt_grad(cell, loss, XS[:6], TARGETS[:6])
        assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", CELLS)
def test_both_weights_of_a_recurrent_cell_are_traced(kind):
    learner = braintrace.compile(made(kind), "d_rtrl", XS[0], batch_size=B)
    report = learner.report.parameters
    assert {path: p.how for path, p in report.items()} == {
        ("W", "weight"): "trace",
        ("U", "weight"): "trace",
    }
    assert not any(p.exact for p in report.values())


@pytest.mark.parametrize("kind", CELLS)
def test_physical_units_change_nothing_but_the_unit(kind):
    plain = made(kind)
    own = {"beta": 0.5, "b": 1.0, "A_1": 0.05, "A_2": -0.01}
    own = {k: v * u.mV for k, v in own.items() if hasattr(plain, k)}
    weight = plain.W.weight.value["weight"]
    cell = made(kind, V_th=0.001 * u.volt, w_init=weight * u.mV, b_init=None, **own)
    cell.U.weight.value = {"weight": 1e-3 * plain.U.weight.value["weight"]}  # counts in volt
    for x in XS:
        np.testing.assert_array_equal(cell(x), plain(x))
        np.testing.assert_allclose(cell.V.value.to_decimal(u.mV), plain.V.value, atol=1e-12)
    learner = braintrace.compile(cell, "rtrl", XS[0], batch_size=B)
    assert braintrace.verify.compare(learner, loss, XS[:4], TARGETS[:4]).max_error < 1e-9


def test_time_constants_count_in_the_unit_of_dt():
    with brainstate.environ.context(dt=0.5):
        plain = LIFCell(I, N, tau=10.0)
    with brainstate.environ.context(dt=0.5 * u.ms):
        cells = [LIFCell(I, N, tau=tau) for tau in (10.0, 10.0 * u.ms, 0.01 * u.second)]
    for cell in (plain, *cells):
        np.testing.assert_allclose(cell.alpha(), np.full(N, np.exp(-0.05)), rtol=1e-12)
    with MS():
        trained = LIFCell(I, N, tau=brainstate.nn.init.Uniform(5.0, 9.0, unit=u.ms), train_tau=True)
    assert trained.alpha.rate.value.shape == (N,)
    np.testing.assert_allclose(trained.alpha(), np.exp(-np.exp(trained.alpha.rate.value)))


def test_readout_spikes_and_is_exact():
    brainstate.random.seed(0)
    with MS():
        readout = LeakySpikeReadout(I, N, w_init=NORMAL)
        same = LIFCell(I, N, tau=5.0, recurrent=False, b_init=None, w_init=NORMAL)
    assert list(readout.states(brainstate.ParamState)) == [("W", "weight")]
    same.W.weight.value = readout.W.weight.value
    learner = braintrace.compile(readout, "d_rtrl", XS[0], batch_size=B, strict=True)
    assert braintrace.verify.compare(learner, loss, XS[:6], TARGETS[:6]).max_error < 1e-9
    same.init_state(B)
    spikes = jnp.stack([readout(x) for x in XS])
    np.testing.assert_array_equal(spikes, jnp.stack([same(x) for x in XS]))
    assert spikes.any() and not spikes.all()


def test_symplectic_membrane_shrinks_where_forward_euler_grows():
    with MS():
        cell = AdLIFCell(1, 1, recurrent=False, V_th=1e6, a=200.0, w_init=1.0)
    cell.init_state()
    cell(jnp.ones(1))
    A, R = keep(20.0), keep(100.0)
    assert A * R + (1 - A) * (1 - R) * 200.0 > 1  # the determinant of forward Euler
    for _ in range(400):
        cell(jnp.zeros(1))
    size = max(abs(cell.V.value[0]), abs(cell.w.value[0]) / 200)
    assert 0 < size < (A * R) ** 190


def test_a_function_is_a_surrogate():
    cell = made(LIFCell, surrogate=braintools.surrogate.ReluGrad())
    learner = braintrace.compile(cell, "rtrl", XS[0], batch_size=B)
    assert braintrace.verify.compare(learner, loss, XS[:4], TARGETS[:4]).max_error < 1e-9


def test_cell_can_be_made_inside_of_jit():
    with MS():
        alpha = brainstate.transform.jit(lambda tau: AdLIFCell(I, N, tau=tau * u.ms).alpha())(20.0)
    np.testing.assert_allclose(alpha, np.full(N, keep(20.0)))


def test_a_cell_of_your_own_needs_two_methods():
    class Integrator(SpikingCell):
        def init_state(self, batch_size=None, **kwargs):
            self.V = brainstate.HiddenState(0.5 + self.rest(batch_size))
            self.age = brainstate.ShortTermState(jnp.zeros((), int))

        def update(self, x):
            self.age.value += 1
            z = self.spikes(self.V.value)
            self.V.value = self.after_reset(self.V.value, z) + self.current(x, z)
            return self.spikes(self.V.value)

    cell = Integrator((I,), (N,), name="own")
    assert cell.name == "own" and cell.in_size == (I,) and cell.out_size == (N,)
    learner = braintrace.compile(cell, "rtrl", XS[0], batch_size=B, strict=True)
    assert braintrace.verify.compare(learner, loss, XS[:4], TARGETS[:4]).max_error < 1e-9
    cell(XS[0])
    brainstate.transform.jit(learner.reset)()  # the states stay what they are: no tracer in them
    np.testing.assert_array_equal(cell.V.value, np.full((B, N), 0.5))
    assert cell.age.value == 0


ERRORS = [
    (dict(reset="mild"), "no reset 'mild'(.|\n)*soft, hard"),
    (dict(surrogate="step"), "no surrogate 'step'(.|\n)*triangle"),
    (dict(V_th=0.0), "V_th is 0.0(.|\n)*positive"),
    (dict(tau=-1.0 * u.ms), "tau is \\[-1\\..*(.|\n)*positive"),
    (dict(tau=jnp.ones(N + 1)), "Cell: tau has the shape"),
    (dict(V_th=jnp.ones(N + 1)), "Cell: V_th has the shape"),
    (dict(tau=5.0 * u.mV), "dt is 1.*tau is .*(.|\n)*plain number"),
]


@pytest.mark.parametrize("kind", CELLS)
def test_bad_arguments_are_refused(kind):
    for options, text in ERRORS:
        with pytest.raises(ValueError, match=text):
            made(kind, **options)
    with pytest.raises(ValueError, match=rf"{kind.__name__}.*\bdt\b"):
        kind(I, N)
    with brainstate.environ.context(dt=1.0), pytest.raises(ValueError, match="plain number"):
        kind(I, N)
    with pytest.raises(ValueError, match=r"W.*mV.*V_th"):
        made(kind, w_init=NORMAL((I, N)) * u.mV, b_init=None)(XS[0])


@pytest.mark.parametrize(
    "kind, options",
    [(ALIFCell, {"beta": 1 * u.ms}), (AdLIFCell, {"b": 1 * u.mA}), (GIFCell, {"A_2": 1 * u.mV})],
)
def test_voltages_of_another_kind_are_refused(kind, options):
    with pytest.raises(ValueError, match="membrane"):
        made(kind, **options)


@pytest.mark.parametrize("a", [-1.0, 1e6])
def test_unstable_adaptation_is_refused(a):
    with pytest.raises(ValueError, match="between -1 and 8"):
        made(AdLIFCell, a=a)
