"""Recurrent entries that a single step cuts, and the record of every decision."""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import DiagnosticKind as Kind
from braintrace import matmul

from .step_models import Model, compiled, normal

# ---------------------------------------------------------------------------- recurrent entries


def cuts(graph):
    """Per weight the states that are cut at its operator's input."""
    names = [leaf.name for leaf in graph.module_info.step.hidden]
    found = graph.analysis
    out = {}
    for r in found.relations:
        mask = found.links.cut_entries.get(r.site.equation, 0)
        out[r.weight_path[0]] = {n for k, n in enumerate(names) if mask >> k & 1}
    return out


def net(feedback=False, recurrent=True, old=False):
    def update(m, x):
        a, b = m.a.value, m.b.value
        drive = matmul(x, m.win.value)
        if recurrent:
            drive = drive + matmul(a, m.ra.value)
        if feedback:
            drive = drive + matmul(b, m.back.value)
        m.a.value = jnp.tanh(0.5 * a + drive)
        up = matmul(a if old else m.a.value, m.up.value)
        m.b.value = jnp.tanh(0.5 * b + up + (matmul(b, m.rb.value) if recurrent else 0.0))
        return m.b.value

    names = ("win", "ra", "back", "up", "rb")
    params = {k: 0.4 * normal(i, 3, 3) for i, k in enumerate(names)}
    return compiled(update, params, {"a": jnp.zeros(3), "b": jnp.zeros(3)}, jnp.zeros(3))


def test_stacked_layers_cut_their_own_recurrence_only():
    assert cuts(net()) == {"win": set(), "ra": {"a"}, "up": set(), "rb": {"b"}}


def test_stacked_layers_without_recurrence_cut_nothing():
    assert cuts(net(recurrent=False)) == {"win": set(), "up": set()}


def test_feedback_makes_every_connection_of_the_loop_recurrent():
    found = cuts(net(feedback=True, recurrent=False))
    assert found["win"] == set()
    assert found["back"] == {"b"}
    assert found["up"] == {"a", "b"}  # the new a carries both


def test_feedback_from_the_old_state_cuts_what_enters():
    assert cuts(net(feedback=True, recurrent=False, old=True))["up"] == {"a"}


def test_operator_between_states_of_one_group_is_recurrent():
    def update(m, x):
        m.i.value = 0.5 * m.i.value + matmul(m.v.value, m.w.value) + x
        m.v.value = 0.9 * m.v.value + m.i.value

    states = {"i": jnp.zeros(3), "v": jnp.zeros(3)}
    graph = compiled(update, {"w": normal(0, 3, 3)}, states, jnp.zeros(3))
    assert cuts(graph) == {"w": {"i", "v"}}


def test_readout_operator_is_not_cut():
    def update(m, x):
        m.h.value = 0.5 * m.h.value + matmul(x, m.w.value)
        return matmul(m.h.value, m.out.value)

    params = {"w": normal(0, 2, 3), "out": normal(1, 3, 2)}
    graph = compiled(update, params, {"h": jnp.zeros(3)}, jnp.zeros(2))
    assert cuts(graph) == {"w": set()}
    assert not graph.analysis.links.cut_entries


# ---------------------------------------------------------------------------------- diagnostics


def leak(m, y):
    m.h.value = 0.5 * m.h.value + y
    return m.h.value


def untrained(m, x):
    y = matmul(x, jnp.ones((2, 3)))
    return leak(m, y + matmul(x, m.w.value))


def reads_out(m, x):
    leak(m, matmul(x, m.w.value))
    return matmul(m.h.value, m.v.value)


def mixes(m, x):
    leak(m, jnp.cumsum(matmul(x, m.w.value)))


def behind(m, x):
    leak(m, matmul(jnp.tanh(matmul(x, m.w.value)), m.v.value))


def varies(m, x):
    leak(m, matmul(x, m.w.value * m.h.value))


def both_ways(m, x):
    y = matmul(x, m.w.value)
    leak(m, y + matmul(y, m.v.value))


def constant_bias(m, x):
    leak(m, matmul(x, m.w.value, jnp.ones(3)))


def inside(m, x):
    @jax.custom_jvp
    def drive(h, x, w):
        return h + matmul(x, w)

    drive.defjvp(lambda p, t: (drive(*p), t[0] + t[1] @ p[2] + p[1] @ t[2]))
    m.h.value = drive(m.h.value, x, m.w.value) + matmul(x, m.w.value)


def merges(m, x):
    m.s.value = 0.5 * m.s.value + matmul(x, m.w.value)
    leak(m, m.s.value)


def forgets(m, x):
    leak(m, matmul(x, m.w.value))


def mixing_state(m, x):
    leak(m, matmul(x, m.w.value) + m.h.value.sum())


def plain(m, x):
    m.h.value = 0.5 * m.h.value + matmul(x, m.w.value) + m.h.value @ m.v.value


CASES = {
    Kind.RELATION_EXCLUDED_NO_OPERATOR: (plain, ("v",), "by plain computation"),
    Kind.RELATION_INCLUDED: (forgets, ("w",), "is traced to h"),
    Kind.RELATION_EXCLUDED_NO_PARAMSTATE: (untrained, None, "consumes no parameter"),
    Kind.RELATION_EXCLUDED_NON_TEMPORAL: (reads_out, ("v",), "reaches no hidden state"),
    Kind.RELATION_EXCLUDED_SHAPE_MISMATCH: (mixes, ("w",), "mixes units"),
    Kind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT: (behind, ("w",), "only through v"),
    Kind.RELATION_EXCLUDED_TIME_VARYING_WEIGHT: (varies, ("w",), "changes within a sequence"),
    Kind.RELATION_PARTIAL_PATH: (both_ways, ("w",), "through another operator"),
    Kind.TRAINABLE_INVAR_NOT_PARAMSTATE: (constant_bias, None, "'bias'"),
    Kind.PRIMITIVE_INSIDE_CONTROL_FLOW: (inside, None, "more than one operand"),
    Kind.HIDDEN_GROUP_MERGED: (merges, None, "2 variables per unit"),
    Kind.STATE_MISMATCH: (forgets, None, "never touched"),
    Kind.PARAMETER_UNUSED: (forgets, ("v",), "never read"),
    Kind.PARAMETER: (plain, ("v",), "v -> h by plain computation"),
}
LEVELS = {
    Kind.RELATION_INCLUDED: "info",
    Kind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT: "warning",
    Kind.RELATION_EXCLUDED_SHAPE_MISMATCH: "warning",
    Kind.RELATION_PARTIAL_PATH: "warning",
    Kind.PARAMETER_UNUSED: "warning",
    Kind.PRIMITIVE_INSIDE_CONTROL_FLOW: "warning",
}


def graph_of(update):
    params = {"w": normal(0, 2, 3), "v": normal(1, 3, 3)}
    return compiled(update, params, {"h": jnp.zeros(3), "s": jnp.zeros(3)}, jnp.ones(2))


def test_every_kind_of_diagnostic_has_a_case():
    # On a mesh of several devices: see tests/online/test_mesh.py.
    assert set(CASES) == set(Kind) - {Kind.WEIGHT_REPLICATED}


@pytest.mark.parametrize("kind", list(CASES), ids=str)
def test_diagnostic_names_the_weight_and_the_reason(kind):
    update, path, part = CASES[kind]
    graph = graph_of(update)
    found = [d for d in graph.explain(kind=kind) if part in d.message]
    assert found, [d.message for d in graph.diagnostics]
    assert found[0].weight_path == path
    if kind in LEVELS:
        assert found[0].level == LEVELS[kind]
    if kind.value.startswith("relation_excluded"):
        assert "test_graph.py:" in found[0].message


def test_report_tells_what_the_kept_jacobian_drops():
    report = graph_of(mixing_state).report
    assert "reduce_sum" in report.to_str(level=2)


def test_report_lists_untraced_weights_with_their_reason():
    report = graph_of(behind).report
    assert report.excluded_weights == [(("w",), "relation_excluded_weight_to_weight")]
    assert report.etrace_weights == [(("v",), [0])]
    assert "w  (relation_excluded_weight_to_weight)" in report.to_str()


def test_explain_filters_by_weight_state_and_kind():
    graph = graph_of(reads_out)
    assert {d.weight_path for d in graph.explain(weight_path=("w",))} == {("w",)}
    assert graph.explain(weight_path=["w"]) == graph.explain(weight_path=("w",))
    assert all(("h",) in d.hidden_paths for d in graph.explain(hidden_path=("h",)))
    assert graph.explain(weight_path=("nothing",)) == ()


def test_compiling_warns_about_nothing_by_itself():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph_of(forgets)


# ---------------------------------------------------- weights seen through functions of parameters


def pair(m, x):
    p = m.p.value
    leak(m, matmul(x, p["a"] * jnp.tril(jnp.ones((2, 3))) + p["b"] ** 2, p["c"]))


def test_relation_finds_the_leaves_an_operand_is_made_of():
    values = {"a": normal(0, 2, 3), "b": normal(1, 2, 3), "c": normal(2, 3)}
    graph = compiled(pair, {"p": values}, {"h": jnp.zeros(3)}, jnp.zeros(2))
    (relation,) = graph.hidden_param_op_relations
    assert relation.weight_path == ("p",) == relation.path
    assert dict(relation.trainable_paths) == {"weight": ("p",), "bias": ("p",)}
    assert relation.trainable_leaf_indices["bias"] == 2
    assert relation.site.leaves["weight"] == (0, 1)
    assert relation.connected_hidden_paths == (("h",),)
    assert dict(relation.path_classification) == {("h",): "all_direct"}


def test_weight_used_twice_has_a_relation_per_use_and_gradients_add():
    def twice(m, x):
        leak(m, matmul(x, m.w.value) + matmul(x**2, m.w.value))
        return m.h.value

    def make():
        return Model(twice, {"w": normal(0, 2, 3)}, {"h": jnp.zeros(3)})

    xs = normal(1, 5, 2)
    model, algo = make(), braintrace.D_RTRL(make())
    algo.compile_graph(xs[0])
    assert [r.weight_path for r in algo.graph.hidden_param_op_relations] == [("w",), ("w",)]
    assert len(algo.get_etrace_of("w")) == 2
    want = brainstate.transform.grad(
        lambda: sum((model(x) ** 2).sum() for x in xs), model.states(brainstate.ParamState)
    )()
    got = algo.etrace_grad(xs, step_fn=lambda x: (algo(x) ** 2).sum(), reduction="sum")
    assert np.abs(got[("w",)] - want[("w",)]).max() <= 1e-9 * np.abs(want[("w",)]).max()


def test_plain_matrix_product_of_a_parameter_is_no_relation():
    def plain(m, x):
        leak(m, x @ m.w.value)

    graph = compiled(plain, {"w": normal(0, 2, 3)}, {"h": jnp.zeros(3)}, jnp.zeros(2))
    assert graph.hidden_param_op_relations == ()


def test_record_of_a_long_closure_tells_its_price():
    def rotates(m, x):
        m.h.value = 0.9 * jnp.roll(m.h.value, 1) + matmul(x, m.w.value)

    (found,) = graph_of(rotates).explain(kind=Kind.RELATION_INCLUDED, weight_path=("w",))
    assert "3 state elements per output element" in found.message


def test_loop_over_an_input_that_its_result_does_not_read():
    class Mapped(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.array([0.3, -0.5, 0.2]))
            self.h = brainstate.HiddenState(jnp.array([0.1, 0.4, -0.3]))

        def update(self, x):
            ones = jax.lax.map(lambda row: jnp.ones(()), x)
            self.h.value = jnp.tanh(0.9 * self.h.value + ones * self.w.value)
            return self.h.value * x

    model, xs = Mapped(), jnp.linspace(-1, 1, 12).reshape(4, 3)
    step = lambda net, x: (net(x) ** 2).sum()
    truth = braintrace.verify.bptt_grad(model, step, xs)
    learner = braintrace.compile(model, "d_rtrl", xs[0], unmarked=True)
    found = learner.etrace_grad(xs, step_fn=lambda x: step(learner, x), reduction="sum")
    np.testing.assert_allclose(found["w",], truth["w",], rtol=1e-12)
