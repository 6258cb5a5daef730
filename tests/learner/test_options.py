"""What a learner says of itself, and the options and arguments it takes."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

from .reference import (
    XS,
    Leaky,
    assert_close,
    leaky,
    learner_of,
    normal,
    online,
    squares,
    traces_of,
)


def test_get_etrace_of_finds_a_weight_by_state_path_and_name():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    by_state = algo.get_etrace_of(algo.model4compile.w)
    (trace,) = by_state.values()
    assert trace["weight"].shape == (2, 3, 1)
    assert trace["bias"].shape == (3, 1)
    assert_close(trace["weight"][..., 0], jnp.broadcast_to(XS[0][:, None], (2, 3)))
    assert_close(by_state, algo.get_etrace_of(("w",)))
    assert_close(by_state, algo.get_etrace_of("w"))
    assert_close(by_state, algo.get_etrace_of("b"))


def test_get_etrace_of_an_untraced_weight_names_the_traced_ones():
    algo = learner_of(leaky(), XS[0])
    with pytest.raises(ValueError, match=r"v.*no eligibility trace") as error:
        algo.get_etrace_of(algo.model4compile.v)
    assert "w" in str(error.value) and "do:" in str(error.value)


def test_report_and_show_graph_name_groups_weights_and_reasons(capsys):
    brainstate.random.seed(0)
    algo = braintrace.compile(
        braintrace.nn.GRUCell(2, 3), "d_rtrl", jnp.zeros((2, 2)), batch_size=2, verbose=1
    )
    printed = capsys.readouterr().out
    assert printed == algo.report.to_str(level=1) + "\n"
    assert printed.startswith("=" * 120)
    for part in ("0: h", "Wz.weight", "Wh.weight", "Wr.weight", "weight_to_weight", "etp_mm"):
        assert part in printed
    assert algo.show_graph(return_msg=True) == algo.graph.report.to_str(level=2)
    assert capsys.readouterr().out == ""
    algo.show_graph()
    assert "only through Wh.weight" in capsys.readouterr().out
    assert algo.report.counts == {
        "hidden_groups": 1,
        "etrace_weights": 4,
        "excluded_weights": 1,
        "inexact": 3,
        "silent": 0,
        "warnings": 1,
        "errors": 0,
    }
    assert "hidden_groups=1" in repr(algo.report)
    assert repr(algo).splitlines() == [
        "D_RTRL of GRUCell: trace_factorization=per_param, vjp_method=single-step, batch_size=2",
        "  3 parameters: 2 trace, not exact; 1 within-step, not exact",
        "  576 bytes of traces",
    ]
    assert repr(braintrace.D_RTRL(braintrace.nn.GRUCell(2, 3))).endswith("not compiled")


def test_groups_and_relations_come_in_the_same_order_every_time():
    def names():
        brainstate.random.seed(0)
        cells = [braintrace.nn.LSTMCell(2, 3), braintrace.nn.GRUCell(3, 3)]
        model = brainstate.nn.Sequential(*cells)
        brainstate.nn.init_all_states(model, batch_size=2)
        graph = braintrace.compile_etrace_graph(model, jnp.zeros((2, 2)))
        return (
            [g.hidden_paths for g in graph.hidden_groups],
            [r.weight_path for r in graph.hidden_param_op_relations],
            [(d.kind, d.message) for d in graph.diagnostics],
        )

    first = names()
    assert len(first[0]) == 2 and len(first[1]) == 6
    assert all(names() == first for _ in range(3))


def test_learner_exposes_states_by_path():
    algo = learner_of(leaky(), XS[0])
    assert set(algo.param_states) == {("w",), ("b",), ("v",)}
    assert set(algo.hidden_states) == {("h",)}
    assert algo.other_states == {}
    assert algo.path_to_states[("h",)] is algo.model4compile.h
    assert algo.state_id_to_path[id(algo.model4compile.w)] == ("w",)
    assert algo.graph_executor.graph is algo.executor.graph is algo.graph


# ---------------------------------------------------------------- options, arguments, environment


def test_trace_dtype_bf16_is_stored_small_and_close_to_full():
    xs = normal(3, 8, 2)
    full = online(learner_of(leaky(), xs[0]), xs)
    algo = learner_of(leaky(), xs[0], trace_dtype=jnp.bfloat16)
    got = online(algo, xs)
    assert {a.dtype for a in jax.tree.leaves(traces_of(algo))} == {jnp.dtype(jnp.bfloat16)}
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(float)}
    assert_close(got, full, 2e-2)
    assert np.abs(got[("w",)] - full[("w",)]).max() > 0  # it is not the full trace


def test_unused_parameter_has_a_zero_gradient_and_a_diagnostic():
    class Extra(Leaky):
        def __init__(self):
            super().__init__()
            self.unused = brainstate.ParamState({"k": normal(0, 2, 2)})

    model = Extra()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    for grads in (online(algo, XS), algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)))):
        assert_close(grads[("unused",)], {"k": jnp.zeros((2, 2))}, 0)
        assert set(grads) == set(algo.param_states)
    (record,) = algo.graph.explain(kind=braintrace.DiagnosticKind.PARAMETER_UNUSED)
    assert record.weight_path == ("unused",)
    assert "unused" in algo.report.to_str(level=2)


class Keyed(Leaky):
    def update(self, x, *, gain=1.0, shift=None):
        return super().update(gain * x + (0.0 if shift is None else shift))


def test_update_takes_keyword_arguments():
    model, twin = Keyed(), Keyed()
    for m in (model, twin):
        brainstate.nn.init_all_states(m)
    algo = braintrace.D_RTRL(model)
    algo.compile_graph(XS[0], gain=jnp.ones(()), shift=jnp.zeros(2))
    gain, shift = jnp.asarray(2.0), jnp.asarray([0.5, -0.5])
    step = brainstate.transform.grad(
        lambda x: squares(algo(x, gain=gain, shift=shift)), algo.param_states
    )
    got = jax.tree.map(lambda *g: sum(g), *[step(x) for x in XS])
    want = brainstate.transform.grad(
        lambda: sum(squares(twin(x, gain=gain, shift=shift)) for x in XS),
        twin.states(brainstate.ParamState),
    )()
    assert_close(got, want)
    window = algo(braintrace.MultiStepData(XS), gain=gain, shift=braintrace.MultiStepData(XS))
    assert window.shape == (5, 2)
