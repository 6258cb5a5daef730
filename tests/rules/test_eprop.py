"""e-prop with its filter on the eligibility, against the equations of its paper."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from tests.oracle._eprop import Neurons, Rate, eprop_grad
from tests.rules.spiking import spike

import braintrace
from braintrace.engine._evaluate import back_operands
from braintrace.lab.comparison._rules import parse
from braintrace.rules import eprop, rule_value

T, I, N, O = 60, 5, 8, 3
RNG = np.random.default_rng(0)
XS, YS = jnp.asarray(RNG.normal(size=(T, I))), jnp.asarray(RNG.normal(size=(T, O)))
WEIGHTS = {
    "w_in": jnp.asarray(0.6 * RNG.normal(size=(I, N))),
    "w_rec": jnp.asarray(0.3 * RNG.normal(size=(N, N))),
    "w_out": jnp.asarray(RNG.normal(size=(N, O))),
}
FEED = {k: WEIGHTS[k] for k in ("w_in", "w_out")}
ADAPTING = Neurons(beta=0.6)
constant = jax.lax.stop_gradient


def network(neurons, leaky=True, kappa=None):
    n, kappa = neurons, neurons.kappa if kappa is None else kappa

    def step(params, state, x):
        v, a, y, z = state
        drive = x @ params["w_in"]
        if "w_rec" in params:
            drive = drive + z @ params["w_rec"]
        v, a = n.alpha * v + drive - n.v_th * constant(z), n.rho * a + z
        z = spike(v - n.v_th - n.beta * a)
        out = z @ params["w_out"]
        y = kappa * y + out if leaky else out
        return (v, a, y, z), y

    return step


def start(batch=()):
    return tuple(jnp.zeros((*batch, n)) for n in (N, N, O, N))


def gradient(step, params, rule, xs=XS, ys=YS, state=None, loss=None, **options):
    net = braintrace.online(step, rule)
    state = start() if state is None else state
    loss = loss or (lambda y, target: 0.5 * ((y - target) ** 2).sum())
    return net.grad(loss, **options)(params, net.init(params, state, xs[0]), xs, ys)[0]


def close(got, want):
    for k, g in want.items():
        np.testing.assert_allclose(got[k], g, rtol=1e-11, atol=1e-12 * np.abs(g).max(), err_msg=k)


@pytest.mark.parametrize("kappa", [0.8, "readout"])
@pytest.mark.parametrize("params", [FEED, WEIGHTS], ids=["feedforward", "recurrent"])
@pytest.mark.parametrize("neurons", [Neurons(), ADAPTING], ids=["eprop_iaf", "eprop_iaf_adapt"])
def test_the_filtered_eligibility_is_that_of_the_paper(neurons, params, kappa):
    rule = eprop(filtered="eligibility", kappa_filter_decay=kappa)
    want = eprop_grad(params, XS, YS, neurons)
    assert all(np.abs(g).max() > 0.1 for g in want.values())
    close(gradient(network(neurons), params, rule, block_size=7), want)


def test_without_recurrence_it_is_bptt():
    rule = eprop(filtered="eligibility", kappa_filter_decay="readout")

    def total(params):
        out = jax.lax.scan(lambda s, x: network(ADAPTING)(params, s, x), start(), XS)[1]
        return 0.5 * ((out - YS) ** 2).sum()

    close(gradient(network(ADAPTING), FEED, rule), jax.grad(total)(FEED))


def test_a_chain_of_filters():
    rule = eprop(filtered="eligibility", kappa_filter_decay=(0.8, 0.5))
    close(
        gradient(network(ADAPTING), WEIGHTS, rule),
        eprop_grad(WEIGHTS, XS, YS, ADAPTING, filters=(0.8, 0.5)),
    )


def test_the_filter_of_a_read_out_that_does_not_leak_is_the_given_one():
    instant = Neurons(kappa=0.0)
    rule = eprop(filtered="eligibility", kappa_filter_decay=0.7)
    got = gradient(network(instant, leaky=False), WEIGHTS, rule)
    close(got, eprop_grad(WEIGHTS, XS, YS, instant, filters=(0.7,)))


@pytest.mark.parametrize(
    "feedback, neurons, params",
    [
        ("random", Neurons(), FEED),
        ("random", ADAPTING, WEIGHTS),
        ("adaptive", Neurons(), WEIGHTS),
        ("adaptive", ADAPTING, FEED),
    ],
)
def test_feedback_is_that_of_the_paper(feedback, neurons, params):
    rule = eprop(feedback, 0.8, 3, filtered="eligibility")
    net = braintrace.online(network(neurons), rule)
    net.init(params, start(), XS[0])
    (drawn,) = back_operands(net._compiled().graph, rule.record.feedback).values()
    ((B, _),) = drawn.values()
    assert B.shape == (N, O)
    B = np.asarray(B) + (np.asarray(params["w_out"]) if feedback == "adaptive" else 0)
    close(gradient(network(neurons), params, rule), eprop_grad(params, XS, YS, neurons, feedback=B))


RATE = Rate(c_reg=2.0, f_target=0.1, kappa_reg=0.95)


@pytest.mark.parametrize(
    "neurons, params, kappa",
    [(Neurons(), FEED, 0.8), (Neurons(), WEIGHTS, 0.0), (ADAPTING, WEIGHTS, 0.8)],
)
def test_rates_are_regularised_as_in_nest(neurons, params, kappa):
    rule = eprop("random", kappa, 3, filtered="eligibility", **dataclasses.asdict(RATE))
    net = braintrace.online(network(neurons), rule)
    net.init(params, start(), XS[0])
    (drawn,) = back_operands(net._compiled().graph, rule.record.feedback).values()
    ((B, _),) = drawn.values()
    filters = (kappa,) if kappa else ()
    how = {"filters": filters, "feedback": np.asarray(B)}
    want = eprop_grad(params, XS, YS, neurons, **how, rate=RATE)
    without = eprop_grad(params, XS, YS, neurons, **how)
    assert np.abs(want["w_in"] - without["w_in"]).max() > 1e-2 * np.abs(want["w_in"]).max()
    close(gradient(network(neurons), params, rule, block_size=7), want)


def test_rates_go_on_from_call_to_call():
    rule = eprop(kappa_filter_decay=0.8, filtered="eligibility", **dataclasses.asdict(RATE))
    net = braintrace.online(network(ADAPTING), rule)
    carry, total = net.init(WEIGHTS, start(), XS[0]), None
    grad = net.grad(lambda y, target: 0.5 * ((y - target) ** 2).sum(), keep_traces=True)
    for part in (slice(0, 25), slice(25, T)):
        grads, (carry, *_) = grad(WEIGHTS, carry, XS[part], YS[part])
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    close(total, eprop_grad(WEIGHTS, XS, YS, ADAPTING, rate=RATE))
    one = grad_of_single_steps(net)
    close(one, eprop_grad(WEIGHTS, XS, YS, ADAPTING, rate=RATE))


def grad_of_single_steps(net):
    """The sum of the gradients of single calls."""
    carry, total = net.init(WEIGHTS, start(), XS[0]), None

    def loss(params, carry, x, target):
        carry, y = net(params, carry, x)
        return 0.5 * ((y - target) ** 2).sum(), carry

    for x, target in zip(XS, YS, strict=True):
        grads, carry = jax.grad(loss, has_aux=True)(WEIGHTS, carry, x, target)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return total


def test_samples_and_training_with_rates():
    rule = eprop(kappa_filter_decay=0.8, filtered="eligibility", **dataclasses.asdict(RATE))
    xs, ys = jnp.stack([XS, XS[::-1]], 1), jnp.stack([YS, -YS], 1)
    each = [eprop_grad(WEIGHTS, xs[:, i], ys[:, i], ADAPTING, rate=RATE) for i in range(2)]
    want = {k: each[0][k] + each[1][k] for k in WEIGHTS}
    close(gradient(network(ADAPTING), WEIGHTS, rule, xs, ys, start((2,))), want)
    net, rate = braintrace.online(network(ADAPTING), rule), 1e-9
    train = net.train(lambda y, target: 0.5 * ((y - target) ** 2).sum(), optax.sgd(rate))
    first = net.init(WEIGHTS, start((2,)), xs[0])
    new = train(WEIGHTS, optax.sgd(rate).init(WEIGHTS), first, xs, ys)[0]
    for k, g in want.items():
        scale = np.abs(g).max()
        np.testing.assert_allclose((WEIGHTS[k] - new[k]) / rate, g, atol=1e-4 * scale, err_msg=k)


def test_a_loss_of_rates_is_the_regularisation_of_nest():
    rate = Rate(c_reg=2.0, f_target=0.1, kappa_reg=0.95)
    inner = network(ADAPTING)

    def step(params, state, x):
        state, f = state
        state, y = inner(params, state, x)
        f = rate.kappa_reg * f + (1 - rate.kappa_reg) * state[3]
        return (state, f), (y, f)

    def loss(out, target):
        y, f = out
        missed = 0.5 * rate.c_reg * ((f - rate.f_target) ** 2).sum()
        return 0.5 * ((y - target) ** 2).sum() + missed

    rule = eprop(filtered="eligibility", kappa_filter_decay="readout")
    got = gradient(step, WEIGHTS, rule, state=(start(), jnp.zeros(N)), loss=loss)
    close(got, eprop_grad(WEIGHTS, XS, YS, ADAPTING, rate=rate))


def test_samples_of_a_batch_are_apart_and_masked_steps_do_not_count():
    rule = eprop(filtered="eligibility", kappa_filter_decay="readout")
    xs, ys = jnp.stack([XS, XS[::-1]], 1), jnp.stack([YS, -YS], 1)
    batched = gradient(network(ADAPTING), WEIGHTS, rule, xs, ys, start((2,)))
    one = [eprop_grad(WEIGHTS, xs[:, i], ys[:, i], ADAPTING) for i in range(2)]
    close(batched, {k: one[0][k] + one[1][k] for k in WEIGHTS})


class Net(brainstate.nn.Module):
    def __init__(self, readout):
        super().__init__()
        draw = np.random.default_rng(3).normal
        w, out = jnp.asarray(draw(size=(3, 5))), jnp.asarray(draw(size=(5, 2)))
        self.cell = braintrace.nn.ALIFCell(3, 5, w_init=w, u_init=0.1 * jnp.ones((5, 5)))
        self.readout = readout(5, 2, tau=8.0 * u.ms, w_init=out)

    def update(self, x):
        return self.readout(self.cell(x))


def learned(readout, rule, **options):
    with brainstate.environ.context(dt=1.0 * u.ms):
        learner = braintrace.compile(Net(readout), rule, jnp.zeros((2, 3)), batch_size=2, **options)
        xs = 2 * jnp.asarray(np.random.default_rng(1).normal(size=(20, 2, 3)))
        grads = learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum())
    return learner, grads


def test_layers_learn_as_with_the_filter_before_the_weight(tmp_path):
    layers = braintrace.nn
    options = {"filtered": "eligibility", "kappa_filter_decay": "readout"}
    learner, behind = learned(layers.LeakyRateReadout, "eprop", **options)
    before = learned(layers.FilteredReadout, "d_rtrl")[1]
    assert len(behind) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), behind, before)
    assert "it is filtered" in str(learner.report)
    assert learner.filtered == "eligibility" and len(learner.hidden_states) == 3
    learner.save(tmp_path / "learner")
    other = learned(layers.LeakyRateReadout, "eprop", **options)[0]
    other.reset()
    other.load(tmp_path / "learner")
    assert other.etraces.keys() == learner.etraces.keys()


def test_a_module_learns_with_rates(tmp_path):
    options = {"filtered": "eligibility", "kappa_filter_decay": "readout", "c_reg": 1.0}
    learner, grads = learned(braintrace.nn.LeakyRateReadout, "eprop", **options)
    plain = learned(braintrace.nn.LeakyRateReadout, "eprop", **{**options, "c_reg": 0.0})[1]
    assert "the gradient of a loss of firing rates is added" in str(learner.report)
    inner = [k for k in grads if "readout" not in k]
    for k in inner:
        new, old = (jax.tree.leaves(g[k]) for g in (grads, plain))
        assert any(np.abs(a - b).max() > 1e-6 for a, b in zip(new, old, strict=True))
    learner.save(tmp_path / "learner")
    other = learned(braintrace.nn.LeakyRateReadout, "eprop", **options)[0]
    other.load(tmp_path / "learner")
    assert other.etraces.keys() == learner.etraces.keys()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"c_reg": -1.0, "filtered": "eligibility"}, r"c_reg=-1\.0"),
        ({"c_reg": 1.0}, r"filtered='trace'"),
        ({"c_reg": 1.0, "filtered": "eligibility", "kappa_reg": 1.0}, "kappa_reg"),
    ],
)
def test_a_regularisation_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        eprop(**options)


def test_rates_have_no_windows_and_no_part_in_a_mixture():
    rule = eprop(filtered="eligibility", c_reg=1.0)
    with pytest.raises(ValueError, match="states of single steps"):
        braintrace.online(network(Neurons()), rule, window=4)
    with pytest.raises(ValueError, match="all parameters"):
        braintrace.online(network(Neurons()), {"w_in": rule, "*": "no_trace"})


@pytest.mark.parametrize("leaky", [False, True])
def test_a_step_without_a_decay_for_the_filter_is_refused(leaky):
    kappa = jnp.linspace(0.5, 0.9, O) if leaky else None
    rule = eprop(filtered="eligibility", kappa_filter_decay="readout")
    words = "no single decay(.|\n)*it has 3 values" if leaky else "no read-out of the step leaks"
    with pytest.raises(ValueError, match=words):
        gradient(network(Neurons(), leaky, kappa), WEIGHTS, rule)


def test_a_trained_decay_is_refused():
    rule = eprop(filtered="eligibility", kappa_filter_decay="readout")

    def step(params, state, x):
        return network(Neurons(), kappa=params["kappa"])(params, state, x)

    with pytest.raises(ValueError, match=r"decay(.|\n)*trained"):
        gradient(step, {**WEIGHTS, "kappa": jnp.float64(0.8)}, rule)


def test_a_step_whose_units_nothing_reads_is_refused():
    step = lambda params, h, x: (jnp.tanh(0.9 * h + x @ params["w_in"]),) * 2
    rule = eprop(filtered="eligibility", kappa_filter_decay=0.5)
    with pytest.raises(ValueError, match="read-out"):
        gradient(step, {"w_in": WEIGHTS["w_in"]}, rule, ys=XS[:, :1], state=jnp.zeros(N))


def test_windows_are_refused():
    rule = eprop(filtered="eligibility", kappa_filter_decay=0.5)
    with pytest.raises(ValueError, match="window"):
        braintrace.online(network(Neurons()), rule, window=4)


def test_it_is_a_rule_for_all_parameters():
    rule = eprop(filtered="eligibility", kappa_filter_decay=0.5)
    with pytest.raises(ValueError, match="all parameters"):
        braintrace.online(network(Neurons()), {"w_in": rule, "*": "no_trace"})


def test_a_decay_of_zero_is_d_rtrl():
    assert eprop(filtered="eligibility").config == braintrace.rules.d_rtrl().config


def test_the_name_is_one_algorithm_in_python_and_in_compare():
    (choice,) = parse(["eprop"])
    assert choice.options == {} and choice.window is None
    assert rule_value("eprop", choice.options).config == eprop().config


# ------------------------------------------------------------------------------------- layers


def gated(p, h, x):
    z = jax.nn.sigmoid(x @ p["z"])
    return (1 - z) * h + z * (x @ p["h"])


def two_layers(p, state, x):
    first = gated(p["first"], state[0], x)
    second = gated(p["second"], state[1], first)
    return (first, second), second @ p["out"]


def test_a_filter_between_layers_stands_for_what_the_next_one_remembers():
    """What the rule says, from dense derivatives: q = kappa q + d first/d weights."""
    n, inputs, length, batch, kappa = 3, 2, 6, 2, 0.8
    rng = np.random.default_rng(0)
    drawn = lambda *shape: jnp.asarray(0.7 * rng.normal(size=shape))
    weights = lambda m: {"z": drawn(m, n), "h": drawn(m, n)}
    params = {"first": weights(inputs), "second": weights(n), "out": drawn(n, 1)}
    xs, ys = drawn(length, batch, inputs), drawn(length, batch, 1)
    start, loss = (jnp.zeros((batch, n)),) * 2, lambda out, y: jnp.mean((out - y) ** 2)
    found = {}
    for rule in (
        braintrace.rules.eprop(filtered="layers", kappa_filter_decay=kappa),
        braintrace.rules.d_rtrl(),
    ):
        net = braintrace.online(two_layers, rule)
        carry = net.init(params, start, xs[0])
        found[rule.name] = net.grad(loss, block_size=4)(params, carry, xs, ys)[0]
        if rule.name == "eprop":
            traces = net.report.parameters["first", "z"], net.report.parameters["second", "z"]
    assert traces[0].trace_bytes == 2 * 8 * batch * inputs * n and not traces[0].exact
    assert traces[1].trace_bytes == 8 * batch * n * n

    def firsts(p):
        return jax.lax.scan(lambda h, x: (gated(p, h, x),) * 2, start[0], xs)[1]

    jacobian, first = jax.jacfwd(firsts)(params["first"]), firsts(params["first"])
    _, before = jax.lax.scan(lambda h, x: (gated(params["second"], h, x), h), start[1], first)
    of_step = lambda a, h, y: loss(gated(params["second"], h, a) @ params["out"], y)
    signals = jax.vmap(jax.grad(of_step))(first, before, ys)
    for name, J in jacobian.items():
        q, total = jnp.zeros_like(J[0]), jnp.zeros_like(params["first"][name])
        for t in range(length):
            q = kappa * q + J[t]
            total += jnp.tensordot(signals[t], q, 2)
        np.testing.assert_allclose(found["eprop"]["first"][name], total, rtol=1e-10)
        assert np.abs(found["d_rtrl"]["first"][name] - total).max() > 1e-3
    for name in ("z", "h"):
        one, other = (found[rule]["second"][name] for rule in ("eprop", "d_rtrl"))
        np.testing.assert_allclose(one, other, rtol=1e-10)
    np.testing.assert_allclose(found["eprop"]["out"], found["d_rtrl"]["out"], rtol=1e-10)


def test_a_filter_between_layers_needs_two():
    step = lambda p, h, x: (h := gated(p["first"], h, x), h @ p["out"])
    params = {"first": {"z": jnp.ones((2, 3)), "h": jnp.ones((2, 3))}, "out": jnp.ones((3, 1))}
    net = braintrace.online(step, "eprop", filtered="layers", kappa_filter_decay=0.9)
    with pytest.raises(ValueError, match=r"layer.*units") as error:
        net.init(params, jnp.zeros((1, 3)), jnp.zeros((1, 2)))
    assert "why:" in str(error.value) and "do:" in str(error.value)
