"""Whether a gradient can arrive at a parameter: what the report says is what a run does."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from models import RECURRENT, Draw, Net, step_fn

import braintrace as bt
from braintrace import matmul
from gradients import online_grad

T, N = 6, 3
MODELS = {}


def model(params, states="ab", **others):
    """Register an update: parameters of shape (N, N), states of shape (N,)."""

    def register(update):
        def build():
            draw = Draw(update.__name__)
            values = {name: draw(N, N) for name in params.split()}
            return Net(update, values, {name: draw(N) for name in states} | others)

        MODELS[update.__name__] = build
        return update

    return register


def mix(m, h, *terms):
    return jnp.tanh(0.6 * h + sum(matmul(x, getattr(m, name).value) for name, x in terms))


@model("xa aa ab ba bb")
def loop_read_on_one_side(m, x):
    """Populations a and b, of which only a is read: the entry of b into `ba` is cut."""
    a, b = m.a.value, m.b.value
    m.a.value = mix(m, a, ("xa", x), ("aa", a), ("ba", b))
    m.b.value = mix(m, b, ("ab", a), ("bb", b))
    return m.a.value


@model("xa aa ab")
def chain(m, x):
    """Nothing of b comes back to a: its entry is not cut."""
    a = m.a.value
    m.a.value = mix(m, a, ("xa", x), ("aa", a))
    m.b.value = mix(m, m.b.value, ("ab", a))
    return m.b.value


@model("xa xb bb")
def side_branch(m, x):
    """Nothing that is returned ever depends on b."""
    m.a.value = mix(m, m.a.value, ("xa", x))
    m.b.value = mix(m, m.b.value, ("xb", x), ("bb", m.b.value))
    return m.a.value


@model("xa aa")
def late(m, x):
    """What is returned is the state before the step."""
    a = m.a.value
    m.a.value = mix(m, a, ("xa", x), ("aa", a))
    return a + m.b.value


@model("xa ab ba", states="abc")
def later_than_one_step(m, x):
    """What is returned reads a after three steps, through b and c."""
    a, b, c = m.a.value, m.b.value, m.c.value
    m.a.value, m.b.value = mix(m, a, ("xa", x)), mix(m, b, ("ab", a))
    m.c.value = 0.5 * c + matmul(b, m.ba.value)
    return c


@model("xa ab ba")
def plain_products(m, x):
    """`ab` and `ba` enter no operator: within-step, and nothing of `ab` is returned within it."""
    a, b = m.a.value, m.b.value
    m.a.value = mix(m, a, ("xa", x)) + b @ m.ba.value
    m.b.value = jnp.tanh(0.5 * b + a @ m.ab.value)
    return m.a.value


@model("xa aa ab ba")
def inside_a_scan(m, x):
    """The operators are in the body of a loop."""

    def body(carry, _):
        a, b = carry
        return (mix(m, a, ("xa", x), ("aa", a), ("ba", m.b.value)), mix(m, b, ("ab", m.a.value))), 0

    (m.a.value, m.b.value), _ = lax.scan(body, (m.a.value, m.b.value), None, length=2)
    return m.a.value


@model("xa ab ba")
def answer_without_derivative(m, x):
    """A loss can only read the states."""
    a, b = m.a.value, m.b.value
    m.a.value, m.b.value = mix(m, a, ("xa", x), ("ba", b)), mix(m, b, ("ab", a))
    return jnp.argmax(m.a.value)


SILENT = {  # under D-RTRL, with what brings a gradient; whatever is not here learns
    "loop_read_on_one_side": {"ab": "snap rtrl windows", "bb": "snap rtrl windows"},
    "side_branch": {"xb": "", "bb": ""},
    "later_than_one_step": {"xa": "rtrl windows", "ab": "rtrl windows"},
    "plain_products": {"ab": "rtrl windows"},
    "inside_a_scan": {"ab": "snap rtrl windows"},
}
XS = jnp.asarray(np.random.default_rng(0).normal(size=(T, N)))
WINDOWS = {"windows": ("d_rtrl", {"vjp_method": "multi-step"})}


def learned(net, rule, states=(), **options):
    """The learner, and whether each parameter has a gradient on a run; the loss may read states."""
    learner = bt.compile(net, rule, XS[0], **options)

    def loss(m, x):
        read = [m(x), *(getattr(net, name).value for name in states)]
        return sum(jnp.sum(jnp.sin(r + 0.1)) for r in read)

    found = online_grad(learner, loss, XS, chunk_size=T if options.get("vjp_method") else None)
    return learner, {path[0]: bool(np.any(np.asarray(g) != 0)) for path, g in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_d_rtrl_says_which_parameters_never_learn(name):
    states = "ab" if name == "answer_without_derivative" else ""
    learner, arrived = learned(MODELS[name](), "d_rtrl", states)
    found = {p[0]: r.silent for p, r in learner.report.parameters.items()}
    want = {k: tuple(v.split()) for k, v in SILENT.get(name, {}).items()}
    assert {k: s.instead for k, s in found.items() if s is not None} == want
    assert arrived == {k: s is None for k, s in found.items()}


@pytest.mark.parametrize("name", ["loop_read_on_one_side", "later_than_one_step"])
def test_what_the_report_recommends_brings_a_gradient(name):
    for rule in SILENT[name]["ab"].split():
        rule, options = WINDOWS.get(rule, (rule, {}))
        learner, arrived = learned(MODELS[name](), rule, **options)
        assert all(arrived.values())
        assert not any(p.silent for p in learner.report.parameters.values())


def test_a_loss_that_reads_the_named_states_brings_a_gradient():
    net = MODELS["loop_read_on_one_side"]()
    report = bt.compile(net, "d_rtrl", XS[0]).report  # of the model's own outputs
    unless = {p[0]: r.silent.unless for p, r in report.parameters.items() if r.silent}
    assert unless == {"ab": (("b",),), "bb": (("b",),)}
    learner, arrived = learned(net, "d_rtrl", "b")
    assert all(arrived.values())
    assert not any(r.silent for r in learner.report.parameters.values())  # of the step function


RULES = {
    "pp_prop": {"decay_or_rank": 0.8},
    "no_trace": {},
    "eprop": {"kappa_filter_decay": 0.5},
    "otpe": {"leak": 0.6},
}


@pytest.mark.parametrize("rule", RULES)
def test_other_rules_say_which_parameters_never_learn(rule):
    learner, arrived = learned(MODELS["loop_read_on_one_side"](), rule, **RULES[rule])
    found = {p[0]: r.silent is None for p, r in learner.report.parameters.items()}
    assert found == arrived and set(found.values()) == {True, False}


@pytest.mark.parametrize("rule", ["three_factor", "uoro"])
def test_a_signal_of_its_own_or_a_random_estimate_needs_no_path(rule):
    report = bt.compile(MODELS["side_branch"](), rule, XS[0]).report
    assert not any(p.silent for p in report.parameters.values())


@pytest.mark.parametrize("name", ["loop_of_three_layers", *RECURRENT])
def test_every_parameter_of_the_zoo_learns_unless_it_is_named(name):
    case = RECURRENT[name]()
    learner = bt.D_RTRL(case.model)
    learner.compile_graph(case.x0)
    found = online_grad(learner, step_fn, *case.sequences)
    for path, p in learner.report.parameters.items():
        zero = all(np.all(np.asarray(a) == 0) for a in jax.tree.leaves(found[path]))
        assert zero == (p.silent is not None or p.how == "none"), p


def test_silence_is_told_everywhere():
    report = bt.compile(MODELS["loop_read_on_one_side"](), "d_rtrl", XS[0]).report
    told = (
        "no gradient can arrive: this rule leaves out every path from it to what the step returns"
    )
    windows = "windows (online(..., window=K) or compile(..., vjp_method='multi-step'))"
    do = f"With snap, rtrl or {windows} one does"
    words = str(report.parameters["ab",])
    assert told in words and "only a loss that reads b directly" in words and do in words
    assert all(line in report.to_str() for line in words.splitlines())
    assert report.counts["silent"] == 2 and "silent=2" in repr(report)
    assert "2 no gradient arrives" in report.picture.summary and told in report.to_html()
    out = io.StringIO()
    report.draw(file=out)
    assert out.getvalue().count("no gradient arrives · ") == 2
    with pytest.raises(bt.CompilationError) as error:
        bt.compile(MODELS["loop_read_on_one_side"](), "d_rtrl", XS[0], strict=True)
    assert str(error.value).count(told) == 2 and do in str(error.value)
    graph = bt.compile_etrace_graph(MODELS["loop_read_on_one_side"](), XS[0])
    (record,) = graph.explain(weight_path=("ab",), kind=bt.DiagnosticKind.PARAMETER)
    assert record.level == bt.DiagnosticLevel.WARNING and told in record.message
