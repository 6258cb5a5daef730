"""The records' own jaxprs, evaluated: against the model, its Jacobian, and formulas by hand."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.extend.core import jaxpr_as_fun

import braintrace as bt

from ..graph.step_models import Model, normal

A, LEAK = normal(3, 3, 3), 0.8
X = normal(4, 2)


def recurrent(m, x):
    """A voltage with a trained drive and plain recurrence, and a threshold that follows it."""
    joint = jnp.concatenate([x, m.v.value])
    drive = bt.matmul(joint, m.w.value * jnp.array([1.0, 0.0, 2.0]) ** 2)
    v = jnp.tanh(LEAK * m.v.value + drive + m.v.value @ A) * m.a.value
    m.a.value = 0.9 * m.a.value + v**2
    m.v.value = v
    return v


def model():
    params, states = {"w": normal(0, 5, 3)}, {"v": normal(1, 3), "a": normal(2, 3)}
    return Model(recurrent, params, states)


@pytest.fixture(scope="module")
def net():
    return model()


@pytest.fixture(scope="module")
def graph(net):
    return bt.compile_etrace_graph(net, X)


def values(names, temps):
    return [temps[v] for v in names]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------- ModuleInfo


def test_the_jaxpr_of_the_step_evaluates_to_what_the_model_does(net, graph):
    info = graph.module_info
    states = info.compiled_model_states
    flat = jaxpr_as_fun(info.closed_jaxpr)(X, *(s.value for s in states))
    out, hidden, others, temps = info.jaxpr_call(X)
    other = model()
    close(out, other(X))
    close(flat[0], out)
    for path in (("v",), ("a",)):
        close(hidden[path], other.states()[path].value)
        close(temps[info.hidden_path_to_outvar[path]], hidden[path])
    assert others == {} and set(info.retrieved_model_states) == {("w",), ("v",), ("a",)}
    assert info.num_var_out == 1 and info.num_var_state == 3 == len(flat) - 1
    assert "tanh" in str(info.jaxpr) and info.stateful_model.get_jaxpr(X) is not None


def test_the_step_runs_at_other_states_and_refuses_other_structures(graph):
    info = graph.module_info
    zeros = [jnp.zeros_like(s.value) for s in info.compiled_model_states]
    assert not info.jaxpr_call(X, old_state_vals=zeros)[0].any()
    for args, states in (((), None), ((X,), zeros[:2])):
        with pytest.raises(ValueError, match="another structure"):
            info.jaxpr_call(*args, old_state_vals=states)


def test_variables_are_those_of_the_jaxpr_and_stay_the_same(graph):
    info, jaxpr = graph.module_info, graph.module_info.jaxpr
    assert [*info.state_tree_invars] == jaxpr.invars[1:]
    assert [*info.state_tree_outvars] == jaxpr.outvars[1:]
    assert {*info.hidden_invars, *info.weight_invars} == {*jaxpr.invars[1:]}
    assert {*info.hidden_outvars} < {*jaxpr.outvars}
    (relation,), (group,) = graph.hidden_param_op_relations, graph.hidden_groups
    (operator,) = [e for e in jaxpr.eqns if e.primitive is relation.primitive]
    assert operator.outvars == [relation.y_var] and operator.invars[0] is relation.x_var
    assert relation.trainable_vars == {"weight": operator.invars[1]}
    assert group.hidden_invars == info.hidden_invars
    assert group.hidden_outvars == info.hidden_outvars


def test_trees_of_variables_have_the_structure_of_the_states():
    def update(m, x):
        m.h.value = {"a": m.h.value["b"], "b": m.h.value["a"] + bt.matmul(x, m.w.value)}

    tree = {"a": jnp.zeros(3), "b": jnp.ones(3)}
    net = Model(update, {"w": normal(0, 2, 3)}, {})
    net.h = brainstate.ShortTermState(tree)
    info = bt.extract_module_info(net, X)
    at = [*info.states].index(("h",))
    before, after = info.state_tree_invars[at], info.state_tree_outvars[at]
    assert after["a"] is before["b"] and set(before) == {"a", "b"}
    assert list(info.jaxpr_call(X)[1]) == [("h",)]


# ------------------------------------------------------------------------------------------ groups


def test_transition_keeps_what_neither_mixes_nor_is_trained(net, graph):
    (group,) = graph.hidden_groups
    _, hidden, _, temps = graph.module_info.jaxpr_call(X)
    jaxpr, old = group.transition_jaxpr, [s.value for s in group.hidden_states]
    assert jaxpr.constvars == group.transition_jaxpr_constvars
    assert not {"dot_general", "etp_mv"} & {e.primitive.name for e in jaxpr.eqns}
    new = eval_jaxpr(jaxpr, values(jaxpr.constvars, temps), *old)
    for path, value, same in zip(
        group.hidden_paths, new, group.state_transition(old, temps), strict=True
    ):
        close(value, hidden[path])
        close(same, value)
    v, a = net.v.value, net.a.value
    s = hidden[("v",)] / a
    slope = a * (1 - s**2) * LEAK
    expected = {"vv": slope, "va": s, "av": 2 * s * a * slope, "aa": 0.9 + 2 * s * a * s}
    order = [p[0] for p in group.hidden_paths]
    D = group.diagonal_jacobian(old, values(group.transition_jaxpr_constvars, temps))
    for i, to in enumerate(order):
        for k, source in enumerate(order):
            close(D[:, i, k], expected[to + source])
    assert group.is_diagonal_recurrence and v.shape == group.varshape
    assert group.dict()["transition_jaxpr_constvars"] == group.transition_jaxpr_constvars


def test_full_jacobian_is_that_of_the_step_when_crossings_are_followed(net):
    graph = bt.compile_etrace_graph(net, X, include_recurrent_mixing=True)
    (group,), info = graph.hidden_groups, graph.module_info
    old = [s.value for s in group.hidden_states]

    def step(stacked):
        at = dict(zip(group.hidden_paths, group.split_hidden(stacked), strict=True))
        given = [at.get(path, s.value) for path, s in info.states.items()]
        new = info.jaxpr_call(X, old_state_vals=given)[1]
        return group.concat_hidden([new[path] for path in group.hidden_paths])

    truth = jax.jit(jax.jacobian(step))(group.concat_hidden(old))
    temps = info.jaxpr_call(X)[-1]
    consts = [temps[v] for v in group.transition_jaxpr_constvars]
    close(jax.jit(group.full_jacobian)(old, consts), truth)
    assert not group.is_diagonal_recurrence
    close(jax.jit(group.diagonal_jacobian)(old, consts)[1], truth[1, :, 1])


# --------------------------------------------------------------------------------------- relations


def test_tail_is_the_way_from_the_operator_to_the_states(net, graph):
    (relation,), (group,) = graph.hidden_param_op_relations, graph.hidden_groups
    _, hidden, _, temps = graph.module_info.jaxpr_call(X)
    (jaxpr,) = relation.y_to_hidden_group_jaxprs
    assert jaxpr.invars == [relation.y_var] and jaxpr.outvars == group.hidden_outvars
    y = temps[relation.y_var]
    consts = values(jaxpr.constvars, temps)
    for path, value in zip(group.hidden_paths, eval_jaxpr(jaxpr, consts, y), strict=True):
        close(value, hidden[path])
    (stacked,) = relation.y_to_hidden_groups(y, temps)
    ((first, _),) = relation.y_to_hidden_groups(y, temps, concat_hidden_vals=False)
    close(stacked[:, 0], first)
    f = jax.jacobian(lambda y: relation.y_to_hidden_groups(y, temps)[0])(y)
    a, at = net.a.value, group.hidden_paths.index(("v",))
    close(f[:, at], jnp.diag(a * (1 - (hidden[("v",)] / a) ** 2)))


def test_chain_is_the_primitives_that_compute_the_operand(graph):
    (relation,) = graph.hidden_param_op_relations
    (chain,) = relation.trainable_processing_chains.values()
    assert all(isinstance(p, jax.extend.core.Primitive) for p in chain)
    assert [p.name for p in chain][-1] == "mul"


def test_paths_that_end_inside_control_flow_are_refused():
    def update(m, x):
        def turn(h, _):
            return jnp.tanh(0.5 * h + bt.matmul(x, m.w.value)), None

        m.h.value = jax.lax.scan(turn, m.h.value, length=2)[0]

    graph = bt.compile_etrace_graph(Model(update, {"w": normal(0, 2, 3)}, {"h": jnp.ones(3)}), X)
    (relation,), (group,) = graph.hidden_param_op_relations, graph.hidden_groups
    for view in (
        lambda: group.transition_jaxpr,
        lambda: relation.y_to_hidden_group_jaxprs,
    ):
        with pytest.raises(bt.NotSupportedError, match="no jaxpr of their own") as error:
            view()
        assert all(part in str(error.value) for part in ("where:", "why:", "do:", "test_views"))
    (chain,) = relation.trainable_processing_chains.values()
    assert chain == ()


def test_paths_are_classified():
    def update(m, x):
        y = bt.matmul(x, m.w.value)
        a, b = m.a.value, m.b.value
        m.a.value = 0.5 * a + 0.1 * b + y
        m.b.value = 0.5 * b + 0.1 * a + bt.matmul(y, m.u.value)
        m.c.value = 0.5 * m.c.value + jnp.tanh(y) * bt.matmul(y, m.u.value)

    params = {"w": normal(0, 2, 3), "u": normal(1, 3, 3)}
    graph = bt.compile_etrace_graph(Model(update, params, {k: jnp.ones(3) for k in "abc"}), X)
    found = {r.weight_path: r.path_classification for r in graph.hidden_param_op_relations}
    kinds = bt.PathClassification
    assert found[("w",)] == {
        ("a",): kinds.ALL_DIRECT,
        ("b",): kinds.ALL_THROUGH_OTHER_ETP,
        ("c",): kinds.MIXED,
    }
    assert [str(k) for k in kinds] == ["all_direct", "all_through_other_etp", "mixed"]
    partial = bt.DiagnosticKind.RELATION_PARTIAL_PATH
    assert [d.weight_path for d in graph.explain(kind=partial)] == [("w",)]
