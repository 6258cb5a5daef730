"""A policy closes bodies: fewer traces, said aloud, and no other gradient changes."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace
from braintrace import ControlFlowPolicy, DiagnosticKind, matmul

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)))
N = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2, 3)))


class Net(brainstate.nn.Module):
    """One weight in the open, one in a branch, one in a loop of 20 turns."""

    def __init__(self):
        super().__init__()
        self.free, self.branch, self.loop = map(brainstate.ParamState, N[:3])

    def init_state(self, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(3))
        self.g = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x):
        free, branch, loop = self.free.value, self.branch.value, self.loop.value
        drive = lax.cond(x[0] > 0, lambda: matmul(x, branch), lambda: jnp.zeros(3))
        self.h.value = 0.8 * self.h.value + matmul(x, free) + drive
        turn = lambda g, _: (0.95 * g + 0.1 * matmul(x, loop), None)
        self.g.value = lax.scan(turn, self.g.value, None, length=20)[0]
        return self.h.value + self.g.value


class Searching(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(N[3])

    def init_state(self, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x):
        h = 0.5 * self.h.value + matmul(x, self.w.value)
        grows = lambda carry: (carry[0] + 1, 1.5 * carry[1])
        self.h.value = lax.while_loop(lambda carry: carry[0] < 2, grows, (0, h))[1]
        return self.h.value


def gradients(policy, rule="d_rtrl", **options):
    learner = braintrace.compile(Net(), rule, X[0], control_flow=policy, **options)
    step = lambda x: jnp.sum(jnp.sin(learner(x)))
    return learner, learner.etrace_grad(X, step_fn=step, reduction="sum")


@pytest.fixture(scope="module")
def followed():
    return gradients(None)


def test_default_policy_changes_nothing(followed):
    learner, grads = gradients(ControlFlowPolicy())
    assert all(p.exact for p in learner.report.parameters.values())
    for path, grad in followed[1].items():
        np.testing.assert_array_equal(grad, grads[path])
    compared = braintrace.verify.compare(learner, lambda net, x: jnp.sum(jnp.sin(net(x))), X)
    assert compared.max_error < 1e-12


CLOSED = {
    "branch": ControlFlowPolicy(cond="opaque", etp_in_control_flow="exclude"),
    "loop": ControlFlowPolicy(scan_descent="off", etp_in_control_flow="exclude"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_body_keeps_the_gradient_within_the_step_and_says_so(name, followed):
    learner, grads = gradients(CLOSED[name])
    assert learner.report.excluded_weights == [((name,), "primitive_inside_control_flow")]
    (record,) = learner.graph.explain(kind=DiagnosticKind.PRIMITIVE_INSIDE_CONTROL_FLOW)
    assert record.level == "warning" and "test_policy.py:" in record.message
    reports = learner.report.parameters
    assert reports[name,].how == "within-step" and "the policy closes" in str(reports[name,])
    assert [p.path for p in reports.values() if not p.exact] == [(name,)]
    for path, grad in followed[1].items():
        if path != (name,):
            np.testing.assert_allclose(grad, grads[path], atol=1e-12)
    assert jnp.abs(grads[name,] - followed[1][name,]).max() > 1e-3


def test_closed_weight_has_the_gradient_of_the_baseline_without_traces(followed):
    baseline = braintrace.compile(Net(), "no_trace", X[0])
    step = lambda x: jnp.sum(jnp.sin(baseline(x)))
    expected = baseline.etrace_grad(X, step_fn=step, reduction="sum")
    policy = ControlFlowPolicy("opaque", 3, "opaque-fwd", "exclude", "off")
    _, grads = gradients(policy)
    for path in (("branch",), ("loop",)):
        np.testing.assert_allclose(grads[path], expected[path], atol=1e-12)
    np.testing.assert_allclose(grads["free",], followed[1]["free",], atol=1e-12)


def test_loops_up_to_the_limit_are_followed():
    policy = ControlFlowPolicy(scan_descent="off", scan_unroll_limit=20)
    brainstate.nn.init_all_states(model := Net())
    graph = braintrace.compile_etrace_graph(model, X[0], control_flow=policy)
    assert len(graph.hidden_param_op_relations) == 3
    assert graph.module_info.control_flow is policy


def test_closed_bodies_are_errors_unless_excluded():
    policy = ControlFlowPolicy(cond="opaque", scan_descent="off")
    with pytest.raises(braintrace.CompilationError) as caught:
        braintrace.compile(Net(), "pp_prop", X[0], decay_or_rank=0.9, control_flow=policy)
    text = str(caught.value)
    assert "operators of branch, loop are inside closed control flow" in text
    assert text.count("test_policy.py:") == 2 and "etp_in_control_flow='exclude'" in text


def test_while_loop_that_computes_a_state_can_be_refused():
    brainstate.nn.init_all_states(model := Searching())
    braintrace.compile_etrace_graph(model, X[0], control_flow=ControlFlowPolicy())
    refusing = ControlFlowPolicy(while_hidden="error")
    with pytest.raises(braintrace.CompilationError, match="a while_loop computes h"):
        braintrace.find_hidden_groups_from_module(model, X[0], control_flow=refusing)
    brainstate.nn.init_all_states(model := Net())
    braintrace.compile_etrace_graph(model, X[0], control_flow=refusing)


RULES = {
    "D_RTRL": {},
    "pp_prop": {"decay_or_rank": 0.9},
    "EProp": {},
    "SnAp": {},
    "OSTLRecurrent": {},
    "OSTLFeedforward": {},
    "UORO": {},
    "ThreeFactor": {},
    "DNI": {},
    "OTTT": {"leak": 0.9},
    "OTPE": {"leak": 0.9},
    "OSTTP": {"B_list": []},
}


@pytest.mark.parametrize("name", RULES)
def test_rule_takes_a_policy(name):
    policy = ControlFlowPolicy()
    learner = getattr(braintrace, name)(Net(), control_flow=policy, **RULES[name])
    assert learner.executor.control_flow is policy
    with pytest.raises(TypeError, match=r"control_flow.*str"):
        getattr(braintrace, name)(Net(), control_flow="opaque", **RULES[name])


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("cond", "inline", ValueError),
        ("while_hidden", "opaque", ValueError),
        ("etp_in_control_flow", "warn", ValueError),
        ("scan_descent", "on", ValueError),
        ("scan_unroll_limit", -1, ValueError),
        ("scan_unroll_limit", 2.5, TypeError),
        ("fixpoint_iteration_limit", 0, ValueError),
        ("fixpoint_iteration_limit", True, TypeError),
    ],
)
def test_policy_is_checked_when_it_is_made(field, value, error):
    with pytest.raises(error, match=f"ControlFlowPolicy: {field}={value!r}"):
        ControlFlowPolicy(**{field: value})
