"""Models of `brainpy.state`, as they are: neurons, synapses and projections with physical units.

Every network spikes and rests during its run, and its surrogate derivatives are not zero. `DRIVEN`
are neurons behind a trained input layer: element-wise, so D-RTRL is BPTT. `NETWORKS` hold
synapses, projections and recurrent layers: the learners are their definitions.
"""

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import brainpy.state as bp
import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from models import Draw, assert_equal

import braintrace as bt
from braintrace._errors import dotted
from braintrace.frontend._names import named_states
from gradients import bptt_grad, online_grad
from oracle import dense, rule_on

T, N = 8, 3
constant = braintools.init.Constant


class Net(brainstate.nn.Module):
    """A population and what feeds it: `feed(self, x)` runs projections or returns a current."""

    def __init__(self, neuron: Any, feed: Callable, **parts: Any):
        super().__init__()
        self.neuron, self._feed = neuron, feed
        for name, part in parts.items():
            setattr(self, name, part)

    def update(self, i: Any, x: Any) -> Any:
        with brainstate.environ.context(i=i, t=i * brainstate.environ.get_dt()):
            current = self._feed(self, x)
            spikes = self.neuron() if current is None else self.neuron(current)
        return spikes, u.get_mantissa(self.neuron.V.value)


def step_fn(net: Any, i: Any, x: Any, a: Any, b: Any) -> Any:
    """The loss of one step reads the spikes and the voltages."""
    spikes, v = net(i, x)
    return jnp.sum(a * spikes + b * v + 0.01 * v**2)


def linear(draw: Draw, n_in: int, n_out: int, scale: Any, *, signed: bool = False) -> Any:
    """A layer with the unit of `scale`; a signed one is recurrent and has no bias."""
    if signed:
        return bt.nn.Linear(n_in, n_out, w_init=draw(n_in, n_out, scale=1.0) * scale, b_init=None)
    weight, bias = draw.rng.random((n_in, n_out)), draw.rng.random(n_out)
    return bt.nn.Linear(n_in, n_out, w_init=(0.3 + 0.5 * weight) * scale, b_init=0.2 * bias * scale)


class Case:
    """A model at its start, the inputs of its run, the weights of its losses."""

    def __init__(self, name: str, build: Callable, dt: float, batch: int | None = None):
        draw = Draw(name)
        lead = () if batch is None else (batch,)
        self.dt = dt * u.ms
        with self.time():
            self.model = build(draw)
            brainstate.random.seed(0)
            brainstate.nn.init_all_states(self.model, batch_size=batch)
        xs = (draw.rng.random((T, *lead, 2)) < 0.7) * (0.5 + draw.rng.random((T, *lead, 2)))
        n = self.model.neuron.varshape
        self.inputs = jnp.arange(T), jnp.asarray(xs)
        self.sequences = (*self.inputs, *(draw(T, *lead, *n, scale=1.0) for _ in range(2)))

    def time(self) -> Any:
        return brainstate.environ.context(dt=self.dt)

    @property
    def x0(self) -> Any:
        return jax.tree.map(lambda a: a[0], self.inputs)

    @cache  # noqa: B019
    def seen(self) -> Any:
        with self.time():
            return dense(self.model, step_fn, *self.sequences)

    @cache  # noqa: B019
    def bptt(self) -> Any:
        with self.time():
            return bptt_grad(self.model, step_fn, *self.sequences)

    def learn(self, algorithm: type, chunk_size: int | None = None, **options: Any) -> Any:
        with self.time():
            learner = algorithm(self.model, **options)
            learner.compile_graph(*self.x0)
            return online_grad(learner, step_fn, *self.sequences, chunk_size=chunk_size)

    def run(self) -> Any:
        """Spikes and slopes of the spike function, step by step; the states are put back."""
        neuron = self.model.neuron
        states = self.model.states().values()
        before = [s.value for s in states]

        def step(i, x):
            spikes, _ = self.model(i, x)
            v = u.get_mantissa(neuron.V.value)
            fire = lambda v: neuron.get_spike(v * u.get_unit(neuron.V.value))
            return spikes, jax.jvp(fire, (v,), (jnp.ones_like(v),))[1]

        with self.time():
            out = brainstate.transform.for_loop(step, *self.inputs)
        for state, value in zip(states, before, strict=True):
            state.value = value
        return jax.tree.map(np.asarray, out)


def assert_alive(case: Case) -> None:
    spikes, slopes = case.run()
    assert set(np.unique(spikes)) == {0.0, 1.0}
    assert np.all(np.isfinite(slopes)) and np.any(slopes != 0)


def assert_trained(grads: Any, untouched: tuple[str, ...] = ()) -> None:
    for path, grad in grads.items():
        alive = [np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grad)]
        assert not any(alive) if path[0] in untouched else all(alive), path


# ---------------------------------------------------------------------------------- neurons

adapts = {"a": 0.005 / u.ms, "A1": 0.5 * u.mA, "A2": -0.5 * u.mA}
izhikevich_current = u.mV / u.ms
hard = {"spk_reset": "hard"}
wide = {"spk_fun": braintools.surrogate.InvSquareGrad(alpha=2.0)}  # these overshoot a narrow one

# A population, the size of the current that makes it spike, the step in ms.
NEURONS: dict[str, tuple[Callable, Any, float]] = {
    "IF": (lambda: bp.IF(N), 4 * u.mA, 1.0),
    "LIF": (lambda: bp.LIF(N), 4 * u.mA, 1.0),
    "LIF_hard_reset": (lambda: bp.LIF(N, **hard), 4 * u.mA, 1.0),
    "LIFRef": (lambda: bp.LIFRef(N, tau_ref=2 * u.ms), 4 * u.mA, 1.0),
    "ALIF": (lambda: bp.ALIF(N, tau_a=10 * u.ms), 4 * u.mA, 1.0),
    "ExpIF": (lambda: bp.ExpIF(N, V_th=-50 * u.mV), 70 * u.mA, 0.5),
    "ExpIFRef": (lambda: bp.ExpIFRef(N, V_th=-50 * u.mV, ref_var=True), 70 * u.mA, 0.5),
    "AdExIF": (lambda: bp.AdExIF(N), 60 * u.mA, 0.5),
    "AdExIFRef": (lambda: bp.AdExIFRef(N, ref_var=True), 60 * u.mA, 0.5),
    "QuaIF": (lambda: bp.QuaIF(N), 200 * u.mA, 1.0),
    "AdQuaIF": (lambda: bp.AdQuaIF(N), 200 * u.mA, 1.0),
    "AdQuaIFRef": (lambda: bp.AdQuaIFRef(N, ref_var=True), 200 * u.mA, 1.0),
    "Gif": (lambda: bp.Gif(N, **adapts), 15 * u.mA, 1.0),
    "GifRef": (lambda: bp.GifRef(N, ref_var=True, **adapts), 15 * u.mA, 1.0),
    "Izhikevich": (lambda: bp.Izhikevich(N, **wide), 20 * izhikevich_current, 1.0),
    "IzhikevichRef": (
        lambda: bp.IzhikevichRef(N, tau_ref=2 * u.ms, ref_var=True, **wide),
        20 * izhikevich_current,
        1.0,
    ),
    "HH": (lambda: bp.HH(N), 150 * u.uA, 0.2),
    "MorrisLecar": (lambda: bp.MorrisLecar(N, **wide), 1500 * u.uA, 1.0),
    "WangBuzsakiHH": (lambda: bp.WangBuzsakiHH(N), 150 * u.uA, 0.2),
    "FitzHughNagumo": (lambda: bp.FitzHughNagumo(N), 3.0 * u.UNITLESS, 0.5),
    "HindmarshRose": (lambda: bp.HindmarshRose(N), 30.0 * u.UNITLESS, 0.2),
}
RECURRENT = ["ALIF", "Izhikevich"]


def driven(name: str) -> Callable:
    neuron, scale, _ = NEURONS[name]
    return lambda draw: Net(neuron(), lambda m, x: m.drive(x), drive=linear(draw, 2, N, scale))


def recurrent(name: str) -> Callable:
    neuron, scale, _ = NEURONS[name]
    return lambda draw: Net(
        neuron(),
        lambda m, x: m.drive(x) + m.back(m.neuron.get_spike()),
        drive=linear(draw, 2, N, scale),
        back=linear(draw, N, N, 0.3 * scale, signed=True),
    )


# --------------------------------------------------------------------- synapses, projections

NETWORKS: dict[str, Callable] = {}
UNTOUCHED = {name: ("first",) for name in ("ampa", "gaba", "nmda")}  # they read whether, not how


def network(build: Callable) -> Callable:
    NETWORKS[build.__name__] = build
    return build


def cortical(n: int = N) -> Any:
    """A leaky neuron with the numbers of a cortical cell: currents are pA, conductances nS."""
    rest = {"V_rest": -65 * u.mV, "V_reset": -65 * u.mV, "V_initializer": constant(-65 * u.mV)}
    return bp.LIF(n, R=100 * u.Mohm, tau=10 * u.ms, V_th=-50 * u.mV, **rest)


@network
def expon_cuba(draw):
    neuron = bp.LIF(N)
    syn = bp.Expon(N, tau=5 * u.ms)
    comm = linear(draw, 2, N, 2 * u.mS)
    proj = bp.AlignPostProj(comm=comm, syn=syn, out=bp.CUBA(), post=neuron)
    return Net(neuron, lambda m, x: m.proj(x), proj=proj)


@network
def dual_expon_coba(draw):
    neuron = cortical()
    syn = bp.DualExpon(N, tau_decay=5 * u.ms, g_initializer=constant(0 * u.nS))
    comm = linear(draw, 2, N, 12 * u.nS)
    proj = bp.AlignPostProj(comm=comm, syn=syn, out=bp.COBA(E=0 * u.mV), post=neuron)
    return Net(neuron, lambda m, x: m.proj(x), proj=proj)


@network
def alpha_mg_block(draw):
    neuron, block = cortical(), bp.MgBlock(0 * u.mV, alpha=0.062 / u.mV, V_offset=0 * u.mV)
    neuron.add_current_input("nmda", block)
    syn = bp.Alpha(N, tau=3 * u.ms, g_initializer=constant(0 * u.nS))
    feed = lambda m, x: m.block.bind_cond(m.syn(m.comm(x)))
    return Net(neuron, feed, syn=syn, block=block, comm=linear(draw, 2, N, 90 * u.nS))


@network
def delta_into_cuba_lif(draw):
    neuron = bp.CubaLIF(N)
    proj = bp.DeltaProj(comm=linear(draw, 2, N, 1.5 * u.mA), post=neuron)
    return Net(neuron, lambda m, x: m.proj(x), proj=proj)


@network
def delta_into_coba_lif(draw):
    neuron = bp.CobaLIF(N, E=4 * u.mV)
    proj = bp.DeltaProj(comm=linear(draw, 2, N, 0.5 * u.siemens), post=neuron)
    return Net(neuron, lambda m, x: m.proj(x), proj=proj)


@network
def merged_projections(draw):
    """Two projections share one synapse: brainpy merges equal descriptions."""
    neuron = bp.LIF(N)

    def proj():
        syn, comm = bp.Expon.desc(N, tau=5 * u.ms), linear(draw, 2, N, 0.8 * u.mS)
        return bp.AlignPostProj(comm=comm, syn=syn, out=bp.CUBA.desc(), post=neuron)

    def feed(m, x):
        m.one(x)
        m.two(x**2)

    return Net(neuron, feed, one=proj(), two=proj())


def two_layers(name: str, syn: Callable, unit: Any, scale: float) -> None:
    """Trained input, neurons, a presynaptic model, trained weights, neurons."""

    def build(draw):
        neuron = bp.LIF(N)
        weight = (0.3 + draw.rng.random((N, N))) * scale * u.mS / unit
        comm = bt.nn.Linear(N, N, w_init=weight, b_init=None)
        proj = bp.CurrentProj(comm=comm, out=bp.CUBA(), post=neuron)
        feed = lambda m, x: m.proj(m.syn(m.pre(m.first(x))))
        first = linear(draw, 2, N, 4 * u.mA)
        return Net(neuron, feed, first=first, pre=bp.LIF(N), syn=syn(), proj=proj)

    NETWORKS[name] = build


def one_to_one(name: str, syn: Callable, gain: Any) -> None:
    """Trained input, neurons, a presynaptic model, one neuron behind each of them."""

    def build(draw):
        feed = lambda m, x: gain * m.syn(m.pre(m.first(x)))
        return Net(bp.LIF(N), feed, first=linear(draw, 2, N, 4 * u.mA), pre=bp.LIF(N), syn=syn())

    NETWORKS[name] = build


facilitating = lambda: bp.STP(N, U=0.5, tau_f=20 * u.ms, tau_d=10 * u.ms)
two_layers("ampa", lambda: bp.AMPA(N, T_dur=1.5 * u.ms), u.mS, 5)
two_layers("gaba", lambda: bp.GABAa(N, T_dur=1.5 * u.ms), u.mS, 4)
two_layers("nmda", lambda: bp.BioNMDA(N, T_dur=1.5 * u.ms), u.mS, 2)
two_layers("stp_between_layers", facilitating, u.UNITLESS, 8)
one_to_one("stp", facilitating, 15 * u.mA)
one_to_one("std", lambda: bp.STD(N, U=0.5, tau=10 * u.ms), 10 * u.mA)
one_to_one("expon_pre", lambda: bp.Expon(N, g_initializer=constant(0.0)), 3 * u.mA)


@network
def recurrent_align_post(draw):
    neuron = bp.LIFRef(N, tau_ref=1.5 * u.ms)
    comm, syn = linear(draw, N, N, u.mS, signed=True), bp.Expon.desc(N, tau=5 * u.ms)
    back = bp.AlignPostProj(comm=comm, syn=syn, out=bp.CUBA.desc(), post=neuron)

    def feed(m, x):
        m.back(m.neuron.get_spike())
        return m.drive(x)

    return Net(neuron, feed, drive=linear(draw, 2, N, 4 * u.mA), back=back)


@network
def excitation_and_inhibition(draw):
    """A population of three excitatory neurons and an inhibitory one, as in a COBA network."""
    neuron = cortical(4)

    def proj(n_in, potential, scale):
        syn = bp.Expon.desc(4, tau=5 * u.ms, g_initializer=constant(0 * u.nS))
        comm, out = linear(draw, n_in, 4, scale), bp.COBA.desc(E=potential)
        return bp.AlignPostProj(comm=comm, syn=syn, out=out, post=neuron)

    def feed(m, x):
        spikes = m.neuron.get_spike()
        m.e(spikes[:3])
        m.i(spikes[3:])
        return m.drive(x)

    e, i = proj(3, 0 * u.mV, 3 * u.nS), proj(1, -80 * u.mV, 20 * u.nS)
    return Net(neuron, feed, drive=linear(draw, 2, 4, 600 * u.pA), e=e, i=i)


def fetching(*fetch: Callable, **options: Any) -> Callable:
    """A recurrent projection that takes the voltage of its neurons by itself."""

    def build(draw):
        neuron = bp.LIF(N)
        comm, syn = linear(draw, N, N, u.mS, signed=True), bp.Expon.desc(N, tau=5 * u.ms)
        modules = [f(neuron) for f in fetch]
        out = bp.CUBA.desc()
        back = bp.AlignPostProj(*modules, comm=comm, syn=syn, out=out, post=neuron, **options)

        def feed(m, x):
            m.back(*(() if modules else (m.neuron.get_spike(),)))
            return m.drive(x)

        return Net(neuron, feed, drive=linear(draw, 2, N, 4 * u.mA), back=back)

    return build


spikes_of = lambda neuron: neuron.get_spike
NETWORKS["prefetch"] = fetching(lambda n: n.prefetch("V"), spikes_of)
NETWORKS["prefetch_delay"] = fetching(lambda n: n.prefetch("V").delay.at(2 * u.ms), spikes_of)
NETWORKS["projection_delay"] = fetching(delay=2 * u.ms)


@network
def align_pre_current(draw):
    neuron, syn = bp.LIF(N), bp.Expon(N, tau=5 * u.ms, g_initializer=constant(0.0))
    neuron.align_pre(syn)
    comm = linear(draw, N, N, u.mS, signed=True)
    back = bp.CurrentProj(syn.prefetch("g"), comm=comm, out=bp.CUBA(), post=neuron)

    def feed(m, x):
        m.back()
        return m.drive(x)

    return Net(neuron, feed, drive=linear(draw, 2, N, 4 * u.mA), back=back)


@network
def align_post_projection(draw):
    """This projection hands its spikes over as a `brainevent.BinaryArray`."""
    neuron = bp.LIF(N)
    comm, syn = linear(draw, 2, N, 2 * u.mS), bp.Expon.desc(N, tau=5 * u.ms)
    fire = lambda x: (x > 0).astype(float)
    proj = bp.align_post_projection(fire, comm=comm, syn=syn, out=bp.CUBA.desc(), post=neuron)
    return Net(neuron, lambda m, x: m.proj(x), proj=proj)


def chain(n_in: Any, n_out: Any) -> Any:
    return np.arange(N - 1), np.arange(1, N)


@network
def gap_junction(draw):
    neuron = bp.LIF(N)
    back = bp.SymmetryGapJunction(neuron, "V", chain, jnp.array([0.2, 0.3]) * u.siemens)

    def feed(m, x):
        m.back()
        return m.drive(x)

    return Net(neuron, feed, drive=linear(draw, 2, N, 4 * u.mA), back=back)


@network
def poisson_input(draw):
    feed = lambda m, x: m.drive(m.encode(600 * u.Hz * x))
    drive = linear(draw, 2, N, 4 * u.mA)
    return Net(bp.LIF(N), feed, encode=bp.PoissonEncoder(2), drive=drive)


class Readout(Net):
    """The loss reads a leaky layer of brainpy instead of the voltage."""

    def update(self, i, x):
        spikes, _ = super().update(i, x)
        return spikes, self.readout(spikes)


@network
def leaky_readout(draw):
    readout = bp.LeakyRateReadout(N, N, tau=5 * u.ms, w_init=draw(N, N))
    drive = linear(draw, 2, N, 4 * u.mA)
    return Readout(bp.LIF(N), lambda m, x: m.drive(x), drive=drive, readout=readout)


for _name in RECURRENT:
    NETWORKS[f"recurrent_{_name}"] = recurrent(_name)
# Nothing in them mixes units or feeds a state into an operator that leads to another weight.
KEPT = """
    expon_cuba dual_expon_coba alpha_mg_block delta_into_cuba_lif delta_into_coba_lif
    merged_projections ampa gaba nmda stp std expon_pre align_post_projection poisson_input
""".split()
FACTORED = """
    stp_between_layers recurrent_align_post excitation_and_inhibition prefetch_delay
    recurrent_Izhikevich
""".split()
WINDOWED = """
    dual_expon_coba stp_between_layers recurrent_align_post prefetch_delay gap_junction
""".split()


@cache
def driven_case(name: str) -> Case:
    return Case(name, driven(name), NEURONS[name][2])


@cache
def network_case(name: str, batch: int | None = None) -> Case:
    kind = name.removeprefix("recurrent_")
    return Case(name, NETWORKS[name], NEURONS[kind][2] if kind in RECURRENT else 1.0, batch)


# ------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", NEURONS)
def test_d_rtrl_of_a_driven_neuron_is_bptt(name):
    c = driven_case(name)
    assert_alive(c)
    assert_trained(c.bptt())
    assert_equal(c.learn(bt.D_RTRL), c.bptt())


@pytest.mark.parametrize("name", KEPT)
def test_d_rtrl_of_a_feedforward_synapse_is_bptt(name):
    c = network_case(name)
    assert_trained(c.bptt(), UNTOUCHED.get(name, ()))
    assert_equal(c.learn(bt.D_RTRL), c.bptt())


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in (*KEPT, "prefetch")])
def test_d_rtrl_of_a_network_is_its_definition(name):
    c = network_case(name)
    truth = rule_on(c.seen(), "d_rtrl")
    assert_trained(truth)
    assert_equal(c.learn(bt.D_RTRL), truth)


@pytest.mark.parametrize("name", FACTORED)
def test_pp_prop_of_a_network_is_its_definition(name):
    c = network_case(name)
    found = c.learn(bt.pp_prop, decay_or_rank=0.8)
    assert_equal(found, rule_on(c.seen(), "pp_prop", decays=(0.8, 0.8)))


@pytest.mark.parametrize("name", WINDOWED)
def test_one_window_over_a_network_is_bptt(name):
    c = network_case(name)
    assert_equal(c.learn(bt.D_RTRL, T, vjp_method="multi-step"), c.bptt())


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_spike_and_rest(name):
    assert_alive(network_case(name))


@pytest.mark.parametrize("name", ["recurrent_align_post"])
def test_a_batch_is_its_definition_and_the_sum_over_samples(name):
    c = network_case(name, 2)
    found = c.learn(bt.D_RTRL)
    assert_equal(found, rule_on(c.seen(), "d_rtrl"))
    i, xs, a, b = c.sequences
    with c.time():
        learner = bt.compile(c.model, "d_rtrl", jnp.zeros(2, int), xs[0], batch_size=2, vmap=True)
        learner.reset()
        step = lambda *s: step_fn(learner, *s)
        mapped = learner.etrace_grad(jnp.stack([i, i], 1), xs, a, b, step_fn=step, reduction="sum")
    assert_equal(dict(mapped), found)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("excitation_and_inhibition", "pp_prop"),
        ("prefetch", "d_rtrl"),
        ("projection_delay", "pp_prop"),
    ],
)
def test_compile_and_reset_bring_a_network_to_its_start(name, rule):
    c = Case(name, NETWORKS[name], 1.0)
    options = {"decay_or_rank": 0.9} if rule == "pp_prop" else {}
    with c.time():
        learner = bt.compile(c.model, rule, *c.x0, **options)
        step = lambda *s: step_fn(learner, *s)
        first = learner.etrace_grad(*c.sequences, step_fn=step)
        learner.reset()
        again = learner.etrace_grad(*c.sequences, step_fn=step)
    assert_equal(dict(again), dict(first))


class Populations(Net):
    """Excitatory and inhibitory neurons, of which the loss reads the excitatory ones."""

    def update(self, i: Any, x: Any) -> Any:
        with brainstate.environ.context(i=i, t=i * brainstate.environ.get_dt()):
            e, inh = self.neuron.get_spike(), self.I.get_spike()
            self.in2E(x)
            self.E2E(e)
            self.E2I(e)
            self.I2E(inh)
            self.I2I(inh)
            self.I()
            return self.neuron(), u.get_mantissa(self.neuron.V.value)


def populations(draw):
    neuron, inhibitory = bp.LIF(N), bp.LIF(2)

    def proj(n_in, post, scale):
        n, tau = post.varshape[0], 5 * u.ms
        comm = bt.nn.Linear(n_in, n, w_init=draw.rng.random((n_in, n)) * scale, b_init=None)
        return bp.AlignPostProj(
            comm=comm, syn=bp.Expon.desc(n, tau=tau), out=bp.CUBA.desc(), post=post
        )

    parts = {
        "in2E": proj(2, neuron, 2 * u.mS),
        "E2E": proj(N, neuron, 1 * u.mS),
        "E2I": proj(N, inhibitory, 3 * u.mS),
        "I2E": proj(2, neuron, -1 * u.mS),
        "I2I": proj(2, inhibitory, -1 * u.mS),
    }
    return Populations(neuron, None, I=inhibitory, **parts)


def test_a_projection_that_never_learns_is_named_with_rules_under_which_it_does():
    c = Case("populations", populations, 1.0)
    with c.time():
        report = bt.compile(c.model, "d_rtrl", *c.x0).report
    silent = {path[0]: p.silent for path, p in report.parameters.items() if p.silent is not None}
    assert {s.instead for s in silent.values()} == {("snap", "rtrl", "windows")}
    assert set(silent) == {"E2I", "I2I"}
    assert_trained(c.learn(bt.D_RTRL), tuple(silent))
    assert_trained(c.bptt())
    assert_equal(c.learn(bt.RTRL), c.bptt())
    assert_equal(c.learn(bt.D_RTRL, T, vjp_method="multi-step"), c.bptt())
    snap = c.learn(bt.SnAp, n=1)
    assert_trained(snap)
    assert_equal(snap, rule_on(c.seen(), "snap", n=1))

    text = report.to_str()
    assert "E2I.comm.weight: trace" in text and "reads I.V, E2I.syn.g directly" in text
    assert "<class" not in text and "site-packages" not in text
    assert len({use.line for use in report._uses}) == 5  # a line of `update` each


def test_names_of_states_are_short_and_keys_are_those_of_brainstate():
    neuron = bp.LIF(N)
    for tau in (5 * u.ms, 9 * u.ms):  # nothing but the neurons holds on to these projections
        syn = bp.Expon.desc(N, tau=tau)
        comm = bt.nn.Linear(2, N, b_init=None)
        bp.AlignPostProj(comm=comm, syn=syn, out=bp.CUBA.desc(), post=neuron)
    brainstate.nn.init_all_states(neuron)
    named = named_states(neuron)
    assert list(named) == list(neuron.states())
    assert [dotted(p) for p in named] == ["V", "Expon+CUBA.syn.g", "Expon+CUBA.syn.g#2"]
    key = pickle.loads(pickle.dumps(list(named)[1]))
    assert dotted(key) == "Expon+CUBA.syn.g" and neuron.states()[key] is named[key]
