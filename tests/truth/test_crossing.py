"""SnAp and RTRL, which follow traces through operators, and the certificate of every rule."""

import itertools
import re
from functools import cache

import brainstate
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import scipy.sparse
from jax import lax
from models import (
    EXACT,
    OPERATORS,
    RECURRENT,
    TIGHT,
    Draw,
    Net,
    assert_equal,
    bptt,
    compiled,
    different,
    living,
    matmul,
    net,
    seen,
    small,
    step_fn,
)

import braintrace as bt
from braintrace._online import _blocks
from braintrace.verify import compare
from braintrace.verify._compare import comparison
from gradients import bptt_grad, online_grad
from interpret import program
from oracle import compare_to_rule, dense, rule_on

CONTROL: dict = {}
ALL = {**EXACT, **RECURRENT, **OPERATORS}


# ------------------------------------------------------------- further models, plain and looping


@models.case(CONTROL)
@small({"w": (3, 4), "r": (4, 4), "o": (4, 2)}, {"h": 4}, x=(3,))
def plain_everywhere(m, x):
    m.h.value = jnp.tanh(0.5 * m.h.value + x @ m.w.value + m.h.value @ m.r.value)
    return m.h.value @ m.o.value


@models.case(CONTROL)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4}, x=(3,))
def recurrent_scan(m, x):
    turn = lambda h, _: (0.7 * h + 0.3 * jnp.tanh(h @ m.r.value + matmul(x, m.w.value)), None)
    m.h.value = lax.scan(turn, m.h.value, None, 3)[0]
    return m.h.value


@models.case(CONTROL)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4}, x=(3,))
def recurrent_choice(m, x):
    back = lambda h: matmul(h, m.r.value)
    y = matmul(x, m.w.value) + lax.cond(x[0] > 0, back, lambda h: h - h.mean(), m.h.value)
    m.h.value = jnp.tanh(0.5 * m.h.value + y)
    return m.h.value


@models.case(CONTROL)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4}, x=(3,))
def recurrent_while(m, x):
    y = matmul(x, m.w.value) + matmul(m.h.value, m.r.value)
    turn = lambda c: (c[0] - 0.7, 0.7 * c[1] + 0.3 * jnp.tanh(y - c[1]))
    m.h.value = lax.while_loop(lambda c: c[0] > 0, turn, (jnp.abs(x[0]), m.h.value))[1]
    return m.h.value + y


@models.case(CONTROL)
@small({"w": (3, 4), "b": 4}, {"h": 4}, x=(3,))
def varying_operand_alone(m, x):
    m.h.value = jnp.tanh(0.6 * m.h.value + matmul(x, m.w.value * m.h.value, m.b.value * x[0]))
    return m.h.value


BUILD = {**ALL, **CONTROL}


@cache
def snap(name, n):
    c = living(name)
    return compiled(bt.SnAp, c.model, c.x0, n=n)


@cache
def snapped(name, n):
    """The gradient of SnAp(n)."""
    fewer = n > 2 and snap(name, 2)
    if fewer and places(fewer) == places(snap(name, n)):
        return snapped(name, 2)  # nothing lies further
    return gradient(snap(name, n), living(name).sequences)


def places(learner):
    return [r.slots.destination.tolist() for r in learner.graph.hidden_param_op_relations]


def gradient(learner, sequences, chunk_size=None):
    # One step at a time: a single block needs no trace, and RTRL would be plain reverse mode.
    sizes = {"chunk_size": chunk_size, "block_size": chunk_size or 1}
    return online_grad(learner, step_fn, *sequences, **sizes)


def learn(name, algorithm, chunk_size=None, **options):
    c = living(name)
    learner = compiled(algorithm, c.model, c.x0, **options)
    brainstate.random.seed(1)
    return gradient(learner, c.sequences, chunk_size)


def assert_designed(error, *parts):
    text = str(error.value)
    for part in ("why:", "do:", *parts):
        assert part in text, f"{part!r} is missing in:\n{text}"


# -------------------------------------------------------------------------------------- RTRL


@pytest.mark.parametrize("name", BUILD)
def test_rtrl_is_bptt(name):
    assert_equal(learn(name, bt.RTRL), bptt(name))


@pytest.mark.parametrize("name", ["gru", "complex_state", "plain_recurrent_weight", "conv"])
def test_rtrl_in_windows_is_bptt(name):
    assert_equal(learn(name, bt.RTRL, 2, vjp_method="multi-step"), bptt(name))


@pytest.mark.parametrize("at_once", [1, 5])
def test_rtrl_pushes_few_directions_at_a_time(at_once):
    assert_equal(learn("gru", bt.RTRL, at_once=at_once), bptt("gru"))


def test_rtrl_is_its_definition():
    assert_equal(rule_on(seen("gru"), "rtrl"), bptt("gru"))


@pytest.mark.parametrize("name", ["gru", "plain_everywhere", "operand_that_varies", "leaky"])
def test_everything_is_exact_under_rtrl(name):
    c = living(name)
    report = compiled(bt.RTRL, c.model, c.x0).report
    assert report.counts["inexact"] == 0
    for path, p in report.parameters.items():
        assert p.exact and not p.dropped and p.path == path, p
        assert p.how == ("within-step" if path in [("o",)] else "trace"), p


def test_traces_under_rtrl_are_derivatives_of_states():
    def update(m, x):
        m.h.value = 0.5 * m.h.value + x @ m.w.value
        return m.h.value @ m.o.value

    model = Net(update, {"w": jnp.ones((2, 3)), "o": jnp.ones((3, 1))}, {"h": jnp.zeros(3)})
    learner = compiled(bt.RTRL, model, jnp.zeros(2))
    for x in ([1.0, 2.0], [3.0, 5.0]):
        learner(jnp.asarray(x))
    want = jnp.einsum("i,jk->ijk", jnp.asarray([3.5, 6.0]), jnp.eye(3))
    for weight in (model.w, ("w",), "w"):
        (trace,) = learner.get_etrace_of(weight).values()
        np.testing.assert_allclose(jnp.concatenate(list(trace.values())), want[None])
    with pytest.raises(ValueError, match="no eligibility trace") as error:
        learner.get_etrace_of("o")
    assert_designed(error, "w")


# -------------------------------------------------------------------------------------- SnAp


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", [*RECURRENT, *list(EXACT)[::6], "recurrent_choice"])
def test_snap_is_its_definition(name, n):
    assert_equal(snapped(name, n), rule_on(seen(name), "snap", n=n))


@pytest.mark.parametrize("name", ["gru", "excitation_inhibition", "operators_inside_bodies"])
def test_snap_in_windows_is_its_definition(name):
    found = learn(name, bt.SnAp, 2, n=1, vjp_method="multi-step")
    assert_equal(found, rule_on(seen(name), "snap", 2, n=1))


# A weight that is used plainly, or follows a state, has no trace of its own.
INCOMPLETE = {
    "plain_input_weight",
    "plain_recurrent_weight",
    "weight_that_follows_a_state",
}
COMPLETE = [n for n in RECURRENT if n not in INCOMPLETE]


@pytest.mark.parametrize("name", COMPLETE)
def test_snap_of_high_order_is_bptt(name):
    assert_equal(snapped(name, 8), bptt(name))


@pytest.mark.parametrize("name", sorted(INCOMPLETE))
def test_snap_of_high_order_is_not_bptt_where_a_weight_has_no_trace(name):
    assert different(snapped(name, 8), bptt(name))
    assert snap(name, 8).report.counts["inexact"]


def test_order_matters():
    one, two = snapped("vanilla", 1), snapped("vanilla", 2)
    assert different(one, two) and different(one, bptt("vanilla"))


def test_a_weight_that_another_operator_computes_counts_once():
    @net({"g": jnp.linspace(-0.5, 0.7, 9).reshape(3, 3)}, {"h": jnp.array([0.3, -0.2, 0.1])})
    def model(m, x):
        gain = bt.element_wise(matmul(jnp.arange(1.0, 4), m.g.value))
        m.h.value = jnp.tanh(0.5 * m.h.value + gain * x)
        return m.h.value

    xs = jnp.linspace(-1, 1, 12).reshape(4, 3)
    learner = compiled(bt.SnAp, model, xs[0], n=2)
    found = online_grad(learner, lambda net, x: (net(x) ** 2).sum(), xs)
    truth = bptt_grad(model, lambda net, x: (net(x) ** 2).sum(), xs)
    np.testing.assert_allclose(found["g",], truth["g",], rtol=1e-12)
    assert learner.report.parameters["g",].exact


@pytest.mark.parametrize("name", ["leaky", "fused_gates", "complex_state", "substeps"])
def test_snap_1_is_d_rtrl_where_nothing_is_dropped(name):
    assert_equal(snapped(name, 1), learn(name, bt.D_RTRL))


RING = scipy.sparse.csr_array(np.roll(np.eye(6), 1, axis=1))


def ring():
    draw = Draw("ring")

    @net({"w": draw(2, 6), "r": draw(6)}, {"h": draw(6)})
    def model(m, x):
        back = bt.sparse_matmul(m.h.value, m.r.value, sparse_mat=RING)
        m.h.value = jnp.tanh(0.5 * m.h.value + matmul(x, m.w.value) + back)
        return m.h.value

    return model, (draw(12, 2), draw(12, 6))


def test_traces_on_a_ring_grow_until_they_reach_everyone():
    model, sequences = ring()
    truth = bptt_grad(model, step_fn, *sequences)
    recorded = dense(model, step_fn, *sequences)
    errors = []
    for n in range(1, 8):
        learner = compiled(bt.SnAp, model, sequences[0][0], n=n)
        widths = {r.slots.width for r in learner.graph.hidden_param_op_relations}
        assert widths == {min(n, 6)}
        shapes = [s for p in learner.report.parameters.values() for s in p.trace_shapes]
        assert all(s[-1] == min(n, 6) for s in shapes)
        found = gradient(learner, sequences)
        if n in (1, 3, 5):
            assert_equal(found, rule_on(recorded, "snap", n=n))
        errors.append(comparison(found, truth).max_error)
        assert (learner.report.counts["inexact"] == 0) == (n >= 6)
    assert max(errors[5:]) <= TIGHT < 1e-7 < min(errors[:5])
    assert errors[0] > 1e-2 and errors[4] < errors[0]


def shift_register():
    draw = Draw("register")

    @net({"w": draw(2, 3), "r": draw(3, 3)}, {"line": draw(3, 3), "h": draw(3)})
    def model(m, x):
        back = matmul(m.line.value[-1], m.r.value)
        m.line.value = jnp.concatenate([m.h.value[None], m.line.value[:-1]])
        m.h.value = jnp.tanh(0.5 * m.h.value + matmul(x, m.w.value) + back)
        return m.h.value

    return model, (draw(10, 2), draw(10, 3))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_delays(n):
    model, sequences = shift_register()
    learner = compiled(bt.SnAp, model, sequences[0][0], n=n)
    found = gradient(learner, sequences)
    assert_equal(found, rule_on(dense(model, step_fn, *sequences), "snap", n=n))
    widths = {r.slots.width for r in learner.graph.hidden_param_op_relations}
    assert widths == {4 if n == 1 else 12}
    truth = bptt_grad(model, step_fn, *sequences)
    assert different(found, truth) if n == 1 else comparison(found, truth).max_error <= TIGHT


def test_reset_gate_has_a_trace_once_crossings_are_followed():
    c = living("gru")
    traced = {
        rule: compiled(rule, c.model, c.x0, **options).report.parameters
        for rule, options in [(bt.D_RTRL, {}), (bt.SnAp, {"n": 2})]
    }
    (gate,) = [p for p in traced[bt.D_RTRL] if p[0] == "Wr"]
    before, after = traced[bt.D_RTRL][gate], traced[bt.SnAp][gate]
    assert before.how == "within-step" and not before.exact and not before.trace_shapes
    assert after.how == "trace" and after.trace_shapes and after.trace_bytes
    learner = compiled(bt.SnAp, c.model, c.x0, n=2)
    assert learner.get_etrace_of(gate)
    with pytest.raises(ValueError, match="no eligibility trace"):
        compiled(bt.D_RTRL, c.model, c.x0).get_etrace_of(gate)


# ---------------------------------------------------------------------------------- limits


def big(kind, **options):
    model = bt.nn.ValinaRNNCell(2, 64)
    return bt.compile(model, kind, jnp.zeros((3, 2)), batch_size=3, **options)


def test_memory_limit_of_rtrl():
    size = 8 * 3 * 64 * (66 * 64 + 64)
    with pytest.raises(bt.NotSupportedError) as error:
        big("rtrl", memory_limit=size - 1)
    assert_designed(error, f"{size:,}", f"{size - 1:,}", "RTRL", "memory_limit", "192")
    assert big("rtrl", memory_limit=size).is_compiled


def test_memory_limit_of_snap():
    size = 8 * 3 * 64 * (66 * 64 + 64)
    with pytest.raises(bt.NotSupportedError) as error:
        big("snap", n=2, memory_limit=size - 1)
    assert_designed(error, f"{size:,}", f"{size - 1:,}", "SnAp", "memory_limit")
    assert big("snap", n=1, memory_limit=size - 1).is_compiled


def test_default_memory_limit_is_refused_before_allocation():
    model = bt.nn.ValinaRNNCell(8, 1024)  # 1032 x 1024 weights, 1024 states
    with pytest.raises(bt.NotSupportedError) as error:
        bt.compile(model, "rtrl", jnp.zeros(8))
    assert_designed(error, f"{8 * 1024 * (1032 * 1024 + 1024):,} bytes", f"{4 << 30:,}")


def test_size_of_the_jacobian():
    # 64 outputs x 64 x 64 entries, the same for all samples
    with pytest.raises(bt.NotSupportedError) as error:
        big("snap", n=2, snap_max_jacobian_elements=3 * 64 * 64 - 1)
    assert_designed(error, f"{3 * 64 * 64 - 1:,}", "snap_max_jacobian_elements", "smaller n")


def test_size_of_the_jacobian_with_few_slots():
    model, sequences = ring()
    with pytest.raises(bt.NotSupportedError) as error:
        compiled(bt.SnAp, model, sequences[0][0], n=2, snap_max_jacobian_elements=6)
    assert_designed(error, "snap_max_jacobian_elements")


def test_a_refused_learner_can_be_given_more():
    model = living("vanilla").model
    learner = bt.RTRL(model, memory_limit=8)
    with pytest.raises(bt.NotSupportedError):
        learner.compile_graph(living("vanilla").x0)
    assert not learner.is_compiled
    learner.memory_limit = 1 << 20
    learner.compile_graph(living("vanilla").x0)
    assert learner.is_compiled


@pytest.mark.parametrize(
    "n, kind",
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)],
)
def test_bad_order(n, kind):
    with pytest.raises(kind, match="positive integer") as error:
        bt.SnAp(living("vanilla").model, n=n)
    assert_designed(error, "n")


def test_names():
    cell = lambda: bt.nn.ValinaRNNCell(2, 3)
    for name, kind, options in [
        ("snap", bt.SnAp, {}),
        ("SnAp", bt.SnAp, {"n": np.int64(3)}),
        ("rtrl", bt.RTRL, {}),
        (" RTRL ", bt.RTRL, {}),
    ]:
        learner = bt.compile(cell(), name, jnp.zeros(2), **options)
        assert type(learner) is kind
        result = compare(learner, step_fn, jnp.ones((4, 2)), jnp.ones((4, 3)))
        assert result.max_error < TIGHT
        own = compare_to_rule(learner, step_fn, jnp.ones((4, 2)), jnp.ones((4, 3)))
        assert own.max_error < TIGHT
    with pytest.raises(TypeError, match="n"):
        bt.compile(cell(), "rtrl", jnp.zeros(2), n=2)


# ----------------------------------------------------------------------------- the certificate


def check_certificate(report, definition, truth):
    """A parameter is called exact where the rule's definition gives BPTT's gradient."""
    for path, error in comparison(definition, truth).errors.items():
        assert report.parameters[path].exact == (error <= TIGHT), report.to_str()


@pytest.mark.parametrize("name", EXACT)
def test_d_rtrl_is_called_exact_where_nothing_is_dropped(name):
    c = living(name)
    report = compiled(bt.D_RTRL, c.model, c.x0).report
    assert report.counts["inexact"] == 0, report.to_str()


@pytest.mark.parametrize("name", [*RECURRENT, "recurrent_choice", "recurrent_scan"])
def test_d_rtrl_is_called_exact_where_it_is(name):
    c = living(name)
    report = compiled(bt.D_RTRL, c.model, c.x0).report
    check_certificate(report, rule_on(seen(name), "d_rtrl"), bptt(name))


@pytest.mark.parametrize(
    ("name", "n"), itertools.product([*RECURRENT, *list(EXACT)[::6]], [1, 2, 8])
)
def test_snap_is_called_exact_where_it_is(name, n):
    check_certificate(snap(name, n).report, rule_on(seen(name), "snap", n=n), bptt(name))


@pytest.mark.parametrize("name", ["leaky", "gru", "plain_readout", "operator_readout"])
def test_pp_prop_is_never_called_exact_for_a_traced_weight(name):
    c = living(name)
    report = compiled(bt.pp_prop, c.model, c.x0, decay_or_rank=0.9).report
    traced = [p for p in report.parameters.values() if p.how == "trace"]
    assert traced and not any(p.exact for p in traced)
    assert all("factors" in str(p.dropped[0]) for p in traced)
    # A read-out is exact under any rule, and so is what is not used.
    assert {p[0] for p, r in report.parameters.items() if r.exact} <= {"out", "b", "unused"}


def test_strict_lists_all_inexact_parameters_with_their_lines():
    model = RECURRENT["stacked_layers"]().model
    with pytest.raises(bt.CompilationError) as error:
        bt.compile(model, "d_rtrl", jnp.zeros(2), strict=True)
    assert_designed(error, "strict=True", "4 parameter(s)", "where:", "models.py:")
    why = str(error.value).split("why:")[1].split("do:")[0]
    assert re.findall(r"(\w+): trace through etp_mv at \S+models.py:\d+", why) == [
        "w1",
        "r1",
        "w2",
        "r2",
    ]
    lines = re.findall(r"across steps \(\S+models.py:\d+", why)
    assert len(lines) == why.count("across steps") >= 4


@pytest.mark.parametrize("rule, options", [("snap", {"n": 1}), ("pp_prop", {"decay_or_rank": 0.9})])
def test_strict_refuses_other_rules_too(rule, options):
    with pytest.raises(bt.CompilationError, match="strict=True"):
        bt.compile(RECURRENT["gru"]().model, rule, jnp.zeros(2), strict=True, **options)


@pytest.mark.parametrize("name, rule", [("leaky", "d_rtrl"), ("gru", "rtrl"), ("vanilla", "snap")])
def test_strict_passes_what_is_exact(name, rule):
    c = BUILD[name]()
    learner = bt.compile(c.model, rule, c.x0, strict=True)
    assert learner.report.counts["inexact"] == 0


def test_strict_passes_a_readout_and_a_parameter_that_is_not_read():
    c = EXACT["operator_readout"]()
    learner = bt.compile(c.model, "d_rtrl", c.x0, strict=True)
    hows = {p[0]: r.how for p, r in learner.report.parameters.items()}
    assert hows == {"w": "trace", "out": "within-step", "unused": "none"}


# ------------------------------------------------------------------------- batches and life cycle

RULES = [("rtrl", {}), ("snap", {"n": 1}), ("snap", {"n": 2})]
rules = pytest.mark.parametrize("rule, options", RULES)
XS = Draw("samples")(4, 3, 2, scale=1.0)


def cell():
    brainstate.random.seed(3)
    return bt.nn.GRUCell(2, 3)


def summed(learner, xs):
    loss = lambda x: 0.5 * jnp.sum(learner(x) ** 2)
    run = lambda xs: dict(learner.etrace_grad(xs, step_fn=loss, reduction="sum"))
    return program(run)(xs)


@rules
def test_batch_is_the_sum_of_its_samples_however_it_is_made(rule, options):
    each = []
    for i in range(3):
        one = bt.compile(cell(), rule, XS[0, 0], **options)
        each.append(summed(one, XS[:, i]))
    want = jax.tree.map(lambda *g: sum(g), *each)
    explicit = bt.compile(cell(), rule, XS[0], batch_size=3, **options)
    assert_equal(summed(explicit, XS), want)
    mapped = bt.compile(cell(), rule, XS[0], batch_size=3, vmap=True, **options)
    assert_equal(summed(mapped, XS), want)


@rules
def test_reset_starts_again(rule, options):
    learner = bt.compile(cell(), rule, XS[0], batch_size=3, **options)
    first = summed(learner, XS)
    again = summed(learner, XS)
    assert different(again, first)
    learner.reset()
    assert not any(a.any() for t in learner.etraces.values() for a in jax.tree.leaves(t.value))
    assert_equal(summed(learner, XS), first)
    learner.reset(batch_size=2)
    one = bt.compile(cell(), rule, XS[0, :2], batch_size=2, **options)
    assert_equal(summed(learner, XS[:, :2]), summed(one, XS[:, :2]))


@rules
def test_jit_and_scan_over_steps(rule, options):
    learner = bt.compile(cell(), rule, XS[0], batch_size=3, **options)
    want = summed(learner, XS)
    learner.reset()
    step = brainstate.transform.jit(
        brainstate.transform.grad(lambda x: 0.5 * jnp.sum(learner(x) ** 2), learner.param_states)
    )
    each = [step(x) for x in XS]
    assert_equal(jax.tree.map(lambda *g: sum(g), *each), want)


@pytest.mark.parametrize("n", [1, 2])
def test_low_precision_traces_of_snap(n, monkeypatch):
    monkeypatch.setattr(_blocks, "MOST_STEPS", 2)  # so that stored traces are read again
    c = living("gru")
    learner = compiled(bt.SnAp, c.model, c.x0, n=n, trace_dtype=jnp.bfloat16)
    stored = [a for t in learner.etraces.values() for a in jax.tree.leaves(t.value)]
    assert all(a.dtype == jnp.bfloat16 for a in stored)
    error = comparison(gradient(learner, c.sequences), snapped("gru", n)).max_error
    assert 1e-6 < error < 3e-2
    sizes = lambda learner: [p.trace_bytes for p in learner.report.parameters.values()]
    assert [4 * b for b in sizes(learner)] == sizes(snap("gru", n))


def test_complex_weights_under_rtrl():
    draw = Draw("complex")

    @net({"w": draw.complex(3, 4), "r": draw.complex(4, 4), "a": draw(4)}, {"h": draw.complex(4)})
    def model(m, x):
        back = jnp.tanh(m.h.value.real) @ m.r.value + jnp.abs(m.h.value) ** 2 * m.a.value
        m.h.value = 0.5 * jnp.conj(m.h.value) + x @ m.w.value + 0.3 * back
        return m.h.value.real * m.h.value.imag

    sequences = (draw(6, 3), draw(6, 4))
    truth = bptt_grad(model, step_fn, *sequences)
    learner = compiled(bt.RTRL, model, sequences[0][0])
    assert_equal(gradient(learner, sequences), truth)
    shapes = {p[0]: r.trace_shapes for p, r in learner.report.parameters.items()}
    assert shapes == {"w": ((2, 3, 4, 4),), "r": ((2, 4, 4, 4),), "a": ((1, 4, 4),)}


def test_complex_weights_under_snap():
    draw = Draw("complex")

    @net({"w": draw.complex(3, 4), "r": draw.complex(4, 4)}, {"h": draw.complex(4)})
    def model(m, x):
        back = matmul(jnp.tanh(m.h.value.real).astype(complex), m.r.value)
        m.h.value = 0.5 * jnp.conj(m.h.value) + matmul(x.astype(complex), m.w.value) + 0.3 * back
        return m.h.value.real * m.h.value.imag

    sequences = (draw(6, 3), draw(6, 4))
    recorded = dense(model, step_fn, *sequences)
    for n in (1, 2, 3):
        learner = compiled(bt.SnAp, model, sequences[0][0], n=n)
        assert_equal(gradient(learner, sequences), rule_on(recorded, "snap", n=n))
    assert_equal(gradient(learner, sequences), bptt_grad(model, step_fn, *sequences))
