"""What the report says of a parameter: exact means BPTT, and what is left out is listed."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from models import EXACT as KEPT
from models import OPERATORS, RECURRENT, Net, step_fn

import braintrace as bt
from braintrace import matmul
from braintrace.verify import compare

X = jnp.asarray([[0.3, -1.2, 0.8], [-0.5, 0.4, 1.1], [0.9, -0.2, 0.6], [1.3, 0.7, -0.4]])


def draw(*shape):
    return jnp.asarray(np.sin(1.0 + 1.7 * np.arange(np.prod(shape))).reshape(shape))


def learner_of(update, params, states, rule=bt.D_RTRL, **options):
    model = Net(update, params, states)
    learner = rule(model, **options)
    learner.compile_graph(X[0])
    return learner


def truly_exact(learner):
    """Per parameter, whether the summed gradient is BPTT's."""
    found = compare(learner, step_fn, X, jnp.zeros((len(X), 1)))
    return {path: error <= 1e-9 for path, error in found.errors.items()}


def claimed(learner):
    return {path: p.exact for path, p in learner.report.parameters.items()}


@pytest.mark.parametrize("name", [*RECURRENT, *list(KEPT)[::4], *list(OPERATORS)[::4]])
def test_claim_is_the_truth(name):
    brainstate.random.seed(1)
    case = {**KEPT, **RECURRENT, **OPERATORS}[name]()
    learner = bt.D_RTRL(case.model)
    learner.compile_graph(case.x0)
    found = compare(learner, step_fn, *case.sequences)
    report = learner.report.parameters
    assert set(report) == set(found.errors)
    for path, error in found.errors.items():
        assert report[path].exact == (error <= 1e-9), f"{path}: {error}\n{report[path]}"
        assert report[path].exact == (not report[path].dropped)


# --------------------------------------------------------------- ways to be wrong about a weight


def frozen_part(m, x):
    w = jnp.where(jnp.arange(4) < 2, m.w.value, lax.stop_gradient(m.w.value))
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
    return m.h.value


def loop_over_the_weight(m, x):
    w = lax.scan(lambda c, _: (jnp.tanh(c), None), m.w.value, None, 3)[0]
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
    return m.h.value


def search_over_the_weight(m, x):
    w = lax.while_loop(lambda c: jnp.abs(c).max() > 0.5, lambda c: 0.9 * jnp.sin(c), m.w.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
    return m.h.value


def subtracted(m, x):
    m.h.value = 0.8 * m.h.value.at[1].subtract(matmul(x, m.w.value)[0])
    return m.h.value


EXACT = [frozen_part, loop_over_the_weight, search_over_the_weight, subtracted]


@pytest.mark.parametrize("update", EXACT)
@pytest.mark.parametrize("rule, options", [(bt.D_RTRL, {}), (bt.SnAp, {"n": 2})])
def test_exact_in_spite_of_appearances(update, rule, options):
    learner = learner_of(update, {"w": draw(3, 4)}, {"h": draw(4)}, rule, **options)
    assert claimed(learner) == truly_exact(learner) == {("w",): True}


def feeds_itself(m, x):
    c = lax.scan(lambda c, _: (jnp.tanh(matmul(c, m.w.value)), None), x, None, 3)[0]
    m.h.value = 0.8 * m.h.value + c
    return m.h.value


def feeds_the_next_turn(m, x):
    c = lax.scan(lambda c, w: (jnp.tanh(matmul(c, w)), None), x, m.w.value[None] * draw(2, 1, 1))[0]
    m.h.value = 0.8 * m.h.value + c
    return m.h.value


@pytest.mark.parametrize("update", [feeds_itself, feeds_the_next_turn])
def test_an_operator_that_feeds_itself_within_a_step_is_not_exact(update):
    learner = learner_of(update, {"w": draw(3, 3)}, {"h": draw(3)})
    assert claimed(learner) == truly_exact(learner) == {("w",): False}
    (dropped,) = learner.report.parameters["w",].dropped
    assert dropped.text == "w -> w -> h across steps" and "test_certificate.py:" in dropped.line


@pytest.mark.parametrize("of", [lambda m, x: x[0] > 0, lambda m, x: m.h.value[0] > 0])
def test_a_weight_that_is_frozen_now_and_then_has_a_trace(of):
    def update(m, x):
        w = jnp.where(of(m, x), m.w.value, lax.stop_gradient(m.w.value))
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w) + matmul(x, m.v.value))
        return m.h.value

    learner = learner_of(update, {"w": draw(3, 4), "v": 0.5 * draw(3, 4)}, {"h": draw(4)})
    report = learner.report.parameters
    assert claimed(learner) == truly_exact(learner) == {("w",): True, ("v",): True}
    assert report["w",].how == "trace"


def test_a_weight_frozen_by_the_predicate_of_its_unit_has_a_trace():
    def update(m, x):
        p = x > 0
        w = jnp.where(p[:, None], m.w.value, lax.stop_gradient(m.w.value))
        on = jnp.tanh(0.8 * m.h.value + matmul(x, w))
        m.h.value = jnp.where(p, on, 0.5 * m.h.value + matmul(x, m.v.value))
        return m.h.value

    learner = learner_of(update, {"w": draw(3, 3), "v": 0.3 * draw(3, 3)}, {"h": draw(3)})
    assert claimed(learner) == truly_exact(learner) == {("w",): True, ("v",): True}


# ------------------------------------------------------------------ ring buffers and their index


def ring(m, x):
    i = m.i.value % 3
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) + 0.3 * m.buf.value[i])
    m.buf.value = m.buf.value.at[i].set(m.h.value)
    m.i.value = m.i.value + 1
    return m.h.value


def ring_of_units(m, x):
    i = m.i.value
    h = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) + 0.3 * m.buf.value.T[:, i])
    m.buf.value = lax.dynamic_update_index_in_dim(m.buf.value, m.h.value + h, i, 0)
    m.h.value, m.i.value = h, (i + 1) % 3
    return m.h.value


def written_at_the_next_place(m, x):
    i, j = m.i.value, (m.i.value + 1) % 3
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) + 0.3 * m.buf.value[i])
    m.buf.value = m.buf.value.at[j].set(m.h.value)
    m.i.value = j
    return m.h.value


@pytest.mark.parametrize(
    "update, exact",
    [(ring, True), (ring_of_units, True), (written_at_the_next_place, False)],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_what_is_read_and_written_at_one_index_is_no_neighbour(update, exact):
    model = Net(update, {"w": draw(3, 4)}, {"h": draw(4), "buf": draw(3, 4)})
    model.i = brainstate.ShortTermState(jnp.asarray(0))
    learner = bt.D_RTRL(model)
    learner.compile_graph(X[0])
    xs = jnp.concatenate([X, -X])  # round the ring and again
    found = compare(learner, step_fn, xs, jnp.zeros((len(xs), 1)))
    assert claimed(learner) == {("w",): exact}
    assert (found.errors["w",] <= 1e-9) == exact


# -------------------------------------------------- exact, and not to be called anything else


def online_and_bptt(step, params, state, rule):
    learner = bt.online(step, rule)
    carry = learner.init(params, state, X[0])

    def loss(p):
        return jnp.sum(jnp.sin(learner.scan(p, carry, X)[1]))

    def unrolled(p):
        total, s = 0.0, state
        for x in X:
            s, out = step(p, s, x)
            total += jnp.sum(jnp.sin(out))
        return total

    errors = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max(), *(jax.grad(f)(params) for f in (loss, unrolled))
    )
    reports = {path[-1]: p for path, p in learner.report.parameters.items()}
    return errors, reports, learner


@pytest.mark.parametrize("rule", [bt.rules.d_rtrl(), bt.rules.snap(2)], ids=lambda r: r.name)
def test_a_weight_made_by_an_operator_carries_its_gradient_on(rule):
    def update(m, x):
        w = matmul(m.a.value, m.b.value)
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
        return m.h.value

    params = {"a": draw(3, 2), "b": draw(2, 4)}
    learner = learner_of(update, params, {"h": draw(4)})
    assert claimed(learner) == truly_exact(learner) == {("a",): True, ("b",): True}


def test_a_read_out_that_no_random_operator_follows_is_exact():
    def step(p, s, x):
        h = jnp.tanh(0.8 * s["h"] + x @ p["w"])
        r = 0.9 * s["r"] + h @ p["o"]
        return {"h": h, "r": r}, r @ p["q"] if "q" in p else r

    params = {"w": draw(3, 4), "o": draw(4, 2)}
    state = {"h": draw(4), "r": jnp.zeros(2)}
    rule = bt.rules.eprop(feedback="random", random_feedback_key=0)
    for more in ({}, {"q": draw(2, 2)}):
        errors, reports, _ = online_and_bptt(step, params | more, state, rule)
        assert {k: p.exact for k, p in reports.items()} == {k: e < 1e-9 for k, e in errors.items()}
        assert reports["o"].exact == (not more) and not reports["w"].exact


def test_without_any_operator_after_the_states_the_signal_is_random():
    def step(p, s, x):
        h = jnp.tanh(0.8 * s["h"] + x @ p["w"])
        return {"h": h}, h

    rule = bt.rules.eprop(feedback="random", random_feedback_key=0)
    errors, reports, _ = online_and_bptt(step, {"w": draw(3, 4)}, {"h": draw(4)}, rule)
    assert errors["w"] > 0.1 and not reports["w"].exact


RESETS = {
    "captured": lambda p, h: lax.cond(h[0] > 0, lambda h: p, lambda h: h, h),
    "passed": lambda p, h: lax.cond(h[0] > 0, lambda h, p: jnp.tanh(p), lambda h, p: h, h, p),
    "where": lambda p, h: jnp.where(h[0] > 0, p, h),
}


@pytest.mark.parametrize("name", RESETS)
def test_a_reset_value_is_learned(name):
    def step(p, s, x):
        h = RESETS[name](p["r"], 0.8 * s["h"] + x @ p["w"])
        return {"h": h}, h

    params = {"w": draw(3, 4), "r": draw(4)}
    errors, reports, _ = online_and_bptt(step, params, {"h": draw(4)}, bt.rules.d_rtrl())
    assert all(p.exact for p in reports.values()) and max(errors.values()) < 1e-9


# ------------------------------------------------------------------------- derivatives of zero


def spikes(p, s, x):
    v = 0.9 * s["v"] + x @ p["w"]
    return {"v": v}, (v > 0.3).astype(float)


def spikes_read_out(p, s, x):
    v = 0.9 * s["v"] + x @ p["w"]
    return {"v": v}, jnp.sign(s["v"] - 0.3) @ p["o"]


@pytest.mark.parametrize("step", [spikes, spikes_read_out])
def test_a_spike_without_surrogate_gradient_is_warned_of(step):
    params = {"w": draw(3, 4)} | ({"o": draw(4, 2)} if step is spikes_read_out else {})
    with pytest.warns(UserWarning, match=r"\bw\b.*zero") as warned:
        _, reports, learner = online_and_bptt(step, params, {"v": draw(4)}, bt.rules.d_rtrl())
    text = str(warned[0].message)
    assert all(part in text for part in ("where:", "test_certificate.py:", "why:", "do:"))
    silent = reports["w"].silent
    assert silent.flat.startswith("sign" if "o" in params else "gt")
    assert silent.unless and "surrogate" in str(silent)
    assert "o" not in reports or reports["o"].silent is None
    assert "w gets no gradient" in learner.report.summary


def test_a_surrogate_gradient_is_not_warned_of(recwarn):
    @jax.custom_jvp
    def spike(v):
        return (v > 0.3).astype(float)

    spike.defjvp(lambda v, t: (spike(*v), t[0] / (1 + v[0] ** 2)))

    def step(p, s, x):
        v = 0.9 * s["v"] + x @ p["w"]
        return {"v": v}, spike(v)

    _, reports, _ = online_and_bptt(step, {"w": draw(3, 4)}, {"v": draw(4)}, bt.rules.d_rtrl())
    assert reports["w"].silent is None and not recwarn.list


def test_a_derivative_of_zero_mixes_nothing():
    def step(p, s, x):
        h = 0.9 * s["h"] + jnp.sign(s["h"] @ p["u"] + x @ p["w"]) + x @ p["v"]
        return {"h": h}, h

    params = {"u": draw(4, 4), "w": draw(3, 4), "v": draw(3, 4)}
    errors, reports, _ = online_and_bptt(step, params, {"h": draw(4)}, bt.rules.d_rtrl())
    assert all(p.exact for p in reports.values()) and max(errors.values()) < 1e-9
    assert [k for k, p in reports.items() if p.silent] == ["u", "w"]


# ------------------------------------------------------------------------------------- the data


def test_fields_of_a_report():
    def update(m, x):
        m.h.value = jnp.tanh(matmul(x, m.w.value) + matmul(m.h.value, m.r.value))
        return m.h.value @ m.o.value

    params = {"w": draw(3, 4), "r": draw(4, 4), "o": draw(4, 2), "unused": draw(1)}
    learner = learner_of(update, params, {"h": draw(4)})
    w, r, o, unused = (learner.report.parameters[k,] for k in ("w", "r", "o", "unused"))
    assert (w.how, r.how, o.how, unused.how) == ("trace", "trace", "within-step", "none")
    assert (w.exact, r.exact, o.exact, unused.exact) == (False, False, True, True)
    assert w.states == (("h",),) and o.states == ()
    assert w.trace_shapes == ((3, 4, 1),) and w.trace_bytes == 3 * 4 * w_itemsize(learner)
    assert w.dropped == r.dropped and w.dropped[0].text == "h -> r -> h across steps"
    assert "etp_mv at " in w.operators[0] and "test_certificate.py:" in w.operators[0]
    text = learner.report.to_str()
    assert "o: within-step; exact" in text and "  - h -> r -> h across steps (" in text
    assert learner.report.counts["inexact"] == 2
    assert [d.weight_path for d in learner.graph.explain(kind=bt.DiagnosticKind.PARAMETER)] == [
        ("w",),
        ("r",),
        ("o",),
        ("unused",),
    ]


def w_itemsize(learner):
    (trace,) = learner.get_etrace_of("w").values()
    return jax.tree.leaves(trace)[0].dtype.itemsize


@pytest.mark.parametrize("limit, kind", [("1GB", TypeError), (True, TypeError), (-1, ValueError)])
def test_memory_limit_is_a_number_of_bytes(limit, kind):
    with pytest.raises(kind, match="memory_limit"):
        bt.RTRL(bt.nn.GRUCell(2, 3), memory_limit=limit)


def test_a_wide_layer_norm_keeps_its_trace():
    class Normed(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((2, 512)))
            self.h = brainstate.HiddenState(jnp.zeros((64, 512)))

        def update(self, x):
            y = matmul(x, self.w.value)
            y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1)
            self.h.value = 0.9 * self.h.value + y

    graph = bt.compile_etrace_graph(Normed(), jnp.zeros((64, 2)))
    (relation,) = graph.hidden_param_op_relations
    assert relation.slots.width == 1
    assert all("reduce_sum" in d.text for d in graph.report.parameters["w",].dropped)


class Switched(brainstate.nn.Module):
    """A step that can be switched from a leak to a mixture of units."""

    def __init__(self):
        super().__init__()
        self.w, self.mixes = brainstate.ParamState(draw(3, 4)), False

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(draw(4))

    def update(self, x):
        past = jnp.cumsum(self.h.value) if self.mixes else self.h.value
        self.h.value = 0.5 * self.h.value + jnp.tanh(past) + matmul(x, self.w.value)
        return self.h.value


def test_the_report_is_about_the_latest_step():
    model = Switched()
    learner = bt.compile(model, "d_rtrl", X[0])
    assert learner.report.parameters["w",].exact
    model.mixes = True
    learner(X[0])
    assert not learner.report.parameters["w",].exact


def test_a_strict_learner_refuses_a_step_that_is_no_longer_exact():
    model = Switched()
    learner = bt.compile(model, "d_rtrl", X[0], strict=True)
    learner(X[0])
    model.mixes = True
    with pytest.raises(bt.CompilationError, match="1 parameter"):
        learner(X[0])
