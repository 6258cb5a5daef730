"""The brainstate front end: how a module's states are sorted, and what is refused."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import matmul


class Model(brainstate.nn.Module):
    """An update function on states given by name."""

    def __init__(self, update, **states):
        super().__init__()
        self.rule = update
        for name, state in states.items():
            setattr(self, name, state)

    def update(self, *args, **kwargs):
        return self.rule(self, *args, **kwargs)


def weight(*shape):
    return brainstate.ParamState(jnp.ones(shape or (2, 3)))


def sorted_paths(info):
    return {
        kind: [leaf.path[0] for leaf in getattr(info.step, kind)]
        for kind in ("params", "hidden", "others")
    }


def zeros(n=3):
    return jnp.zeros(n)


def integrate(m, x):
    m.h.value = 0.5 * m.h.value + matmul(x, m.w.value)
    return m.h.value


# --------------------------------------------------------------------------------- classification


def classify(update, **states):
    model = Model(update, w=weight(), **states)
    return sorted_paths(braintrace.extract_module_info(model, jnp.zeros(2)))


def test_hidden_state_that_is_read_and_written_is_hidden():
    found = classify(integrate, h=brainstate.HiddenState(zeros()))
    assert found == {"params": ["w"], "hidden": ["h"], "others": []}


def test_short_term_state_that_is_read_and_written_is_hidden():
    found = classify(integrate, h=brainstate.ShortTermState(zeros()))
    assert found["hidden"] == ["h"]


def test_long_term_state_that_is_read_and_written_is_hidden():
    found = classify(integrate, h=brainstate.LongTermState(zeros()))
    assert found["hidden"] == ["h"]


def write_only(m, x):
    m.s.value = matmul(x, m.w.value)
    return m.s.value


def test_state_that_is_only_written_is_hidden_by_class_only():
    assert classify(write_only, s=brainstate.HiddenState(zeros()))["hidden"] == ["s"]
    assert classify(write_only, s=brainstate.ShortTermState(zeros()))["others"] == ["s"]


def read_only(m, x):
    return matmul(x, m.w.value) + m.s.value


@pytest.mark.parametrize("kind", [brainstate.HiddenState, brainstate.ShortTermState])
def test_state_that_is_only_read_is_no_hidden_state(kind):
    assert classify(read_only, s=kind(zeros())) == {"params": ["w"], "hidden": [], "others": ["s"]}


def test_integer_state_is_no_hidden_state():
    def count(m, x):
        m.s.value = m.s.value + 1
        return matmul(x, m.w.value)

    found = classify(count, s=brainstate.ShortTermState(jnp.zeros((), jnp.int32)))
    assert found["others"] == ["s"]


def test_state_returned_but_not_used_in_an_equation_counts_as_read():
    def passed_on(m, x):
        old = m.s.value
        m.s.value = matmul(x, m.w.value)
        return old

    assert classify(passed_on, s=brainstate.ShortTermState(zeros()))["hidden"] == ["s"]


def test_mixed_leaves_of_one_state_are_sorted_one_by_one():
    def both(m, x):
        s = m.s.value
        m.s.value = {"count": s["count"] + 1, "trace": 0.5 * s["trace"] + matmul(x, m.w.value)}

    state = brainstate.ShortTermState({"count": jnp.zeros((), int), "trace": zeros()})
    found = classify(both, s=state)
    assert (found["hidden"], found["others"]) == (["s"], ["s"])


def test_random_state_is_another_state_with_a_diagnostic():
    def noisy(m, x):
        return integrate(m, x) + brainstate.random.normal(size=3)

    model = Model(noisy, w=weight(), h=brainstate.HiddenState(zeros()))
    info = braintrace.extract_module_info(model, jnp.zeros(2))
    assert sorted_paths(info)["hidden"] == ["h"]
    assert len(info.step.others) == 1
    mismatch = [r for r in info.records if r.kind == braintrace.DiagnosticKind.STATE_MISMATCH]
    assert any("not an attribute of the model" in r.message for r in mismatch)


def test_untouched_states_and_parameters_are_recorded():
    model = Model(
        integrate,
        w=weight(),
        spare=weight(4),
        h=brainstate.HiddenState(zeros()),
        idle=brainstate.HiddenState(zeros()),
    )
    info = braintrace.extract_module_info(model, jnp.zeros(2))
    texts = {r.kind: r.message for r in info.records}
    assert "spare" in texts[braintrace.DiagnosticKind.PARAMETER_UNUSED]
    assert "idle" in texts[braintrace.DiagnosticKind.STATE_MISMATCH]


def test_written_parameter_is_refused_at_the_users_line():
    def writing(m, x):
        m.w.value = m.w.value * 0.9
        return integrate(m, x)

    with pytest.raises(braintrace.NotSupportedError) as error:
        classify(writing, h=brainstate.HiddenState(zeros()))
    assert "writes the parameter w" in str(error.value)
    assert "test_brainstate.py:" in str(error.value) and "writing" in str(error.value)


def test_states_with_units_are_split_off_at_the_door():
    model = Model(integrate, w=weight(), h=brainstate.HiddenState(zeros() * u.mV))
    info = braintrace.extract_module_info(model, jnp.zeros(2) * u.mV)
    assert sorted_paths(info) == {"params": ["w"], "hidden": ["h"], "others": []}
    assert info.hidden_path_to_invar[("h",)].aval.shape == (3,)
    info.write({"hidden": [jnp.ones(3)]})
    assert u.get_unit(model.h.value) == u.mV
    assert np.array_equal(u.get_mantissa(model.h.value), np.ones(3))


def test_tracing_changes_no_state():
    model = Model(integrate, w=weight(), h=brainstate.HiddenState(jnp.ones(3)))
    braintrace.extract_module_info(model, jnp.zeros(2))
    assert np.array_equal(model.h.value, np.ones(3))


# -------------------------------------------------------------------------------------- ModuleInfo


def sample():
    states = {"w": brainstate.ParamState({"a": jnp.ones((2, 3)), "b": jnp.ones(3)})}

    def update(m, x, *, gain):
        w = m.w.value
        m.h.value = 0.5 * m.h.value + gain * matmul(x, w["a"], w["b"])
        return {"out": m.h.value, "sum": m.h.value.sum()}

    model = Model(update, h=brainstate.HiddenState(zeros()), **states)
    return model, braintrace.extract_module_info(model, jnp.zeros(2), gain=jnp.ones(()))


def test_module_info_names_the_variables_of_states_and_weights():
    model, info = sample()
    assert info.model is model
    assert set(info.states) == {("h",), ("w",)}
    assert [v.aval.shape for v in info.weight_path_to_invars[("w",)]] == [(2, 3), (3,)]
    assert set(info.invar_to_weight_path.values()) == {("w",)}
    (leaf,) = info.step.hidden
    assert info.hidden_path_to_invar[("h",)] is info.jaxpr.invars[leaf.position]
    assert info.hidden_path_to_invar[("h",)].aval.shape == (3,)
    assert info.hidden_path_to_outvar[("h",)].aval.shape == (3,)
    assert info.step.n_args == 2 and info.step.n_outs == 2
    assert len(info.jaxpr.eqns) > 0


def test_module_info_reads_and_writes_states_by_slot():
    model, info = sample()
    assert [a.shape for a in info.read().params] == [(2, 3), (3,)]
    (h,) = info.read().hidden
    info.write({"hidden": [h + 2]})
    assert np.array_equal(model.h.value, 2 * np.ones(3))


def test_module_info_output_tree_is_that_of_update():
    _, info = sample()
    assert jax.tree.unflatten(info.out_tree, [0, 1]) == {"out": 0, "sum": 1}


# ------------------------------------------------------------------------------------------ graph


def test_compile_etrace_graph_returns_all_parts():
    model = Model(integrate, w=weight(), h=brainstate.HiddenState(zeros()))
    graph = braintrace.compile_etrace_graph(model, jnp.zeros(2))
    assert isinstance(graph, braintrace.ETraceGraph)
    assert isinstance(graph.module_info, braintrace.ModuleInfo)
    assert graph.hid_path_to_group[("h",)] is graph.hidden_groups[0]
    assert graph.hidden_groups[0].hidden_states[0] is model.h
    (relation,) = graph.hidden_param_op_relations
    assert isinstance(relation, braintrace.HiddenParamOpRelation)
    assert relation.trainable_param_states["weight"] is model.w
    assert relation.x_var is relation.x and relation.x.aval.shape == (2,)
    assert relation.y_var is relation.y and relation.y.aval.shape == (3,)
    assert relation.trainable_vars["weight"].aval.shape == (2, 3)
    assert {*graph.dict()} == {*graph._fields, "hidden_perturb"}
    assert isinstance(graph.report, braintrace.CompilationReport)


def test_perturbed_step_is_made_when_it_is_read():
    model = Model(integrate, w=weight(), h=brainstate.HiddenState(zeros()))
    graph = braintrace.compile_etrace_graph(model, jnp.zeros(2), include_hidden_perturb=False)
    made = graph.hidden_perturb
    assert isinstance(made, braintrace.HiddenPerturbation) and made.perturb_hidden_paths == (
        ("h",),
    )
    inputs = [jnp.zeros(2), *jax.tree.leaves([s.value for s in graph.module_info.states.values()])]
    plain = graph.call_hidden_perturb(inputs, made.init_perturb_data())
    moved = graph.call_hidden_perturb(inputs, [jnp.ones(3)])
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(plain, moved, strict=True)) == 1


def test_compile_etrace_graph_takes_keyword_arguments():
    model, _ = sample()
    graph = braintrace.compile_etrace_graph(model, jnp.zeros(2), gain=jnp.ones(()))
    assert len(graph.hidden_param_op_relations) == 1


def test_compile_etrace_graph_of_a_model_without_state_or_operator_is_empty():
    graph = braintrace.compile_etrace_graph(braintrace.nn.Linear(2, 3), jnp.zeros(2))
    assert graph.hidden_groups == () and graph.hidden_param_op_relations == ()
    assert graph.explain(kind=braintrace.DiagnosticKind.RELATION_EXCLUDED_NON_TEMPORAL)


def lstm():
    brainstate.random.seed(0)
    cell = braintrace.nn.LSTMCell(2, 3)
    brainstate.nn.init_all_states(cell, batch_size=2)
    return cell


def test_finders_agree_with_the_graph():
    cell, x = lstm(), jnp.zeros((2, 2))
    graph = braintrace.compile_etrace_graph(cell, x)
    minfo = braintrace.extract_module_info(cell, x)
    for groups, by_path in (
        braintrace.find_hidden_groups_from_minfo(minfo),
        braintrace.find_hidden_groups_from_module(cell, x),
    ):
        assert [g.hidden_paths for g in groups] == [g.hidden_paths for g in graph.hidden_groups]
        assert set(by_path) == {("c",), ("h",)}
        assert by_path[("c",)] is groups[0] and groups[0].num_state == 2
    want = [r.weight_path for r in graph.hidden_param_op_relations]
    assert len(want) == 4
    for relations in (
        braintrace.find_hidden_param_op_relations_from_minfo(minfo),
        braintrace.find_hidden_param_op_relations_from_minfo(minfo, by_path),
        braintrace.find_hidden_param_op_relations_from_module(cell, x),
    ):
        assert [r.weight_path for r in relations] == want
    assert braintrace.find_hidden_param_op_relations_from_minfo(minfo, {}) == ()


def test_executors_and_finders_take_the_limits_of_the_graph():
    cell, x = lstm(), jnp.zeros((2, 2))
    mixing = {"include_recurrent_mixing": True, "sparse_n": 2}
    groups, _ = braintrace.find_hidden_groups_from_module(cell, x, **mixing)
    assert [g.num_state for g in groups] == [2]
    for kind in (braintrace.ETraceGraphExecutor, braintrace.ETraceVjpGraphExecutor):
        executor = kind(cell, **mixing)
        executor.compile_graph(x)
        assert executor.graph.analysis.crossings == 1
        with pytest.raises(braintrace.NotSupportedError, match="sparse_n=2 without"):
            kind(cell, sparse_n=2)


def test_variables_and_states_are_found_in_both_directions():
    cell, x = lstm(), jnp.zeros((2, 2))
    info = braintrace.extract_module_info(cell, x)
    for path in (("c",), ("h",)):
        entry, leaves = info.hidden_path_to_invar[path], info.hidden_path_to_outvar[path]
        assert info.invar_to_hidden_path[entry] == path
        assert info.outvar_to_hidden_path[leaves] == path
        assert info.hidden_outvar_to_invar[leaves] is entry
        assert info.state_id_to_path[id(info.states[path])] == path


# ----------------------------------------------------------------------------------- perturbation


class Coupled(brainstate.nn.Module):
    """The voltage reads the new current, the output reads both and the old voltage."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.w = brainstate.ParamState(jnp.asarray(rng.normal(size=(2, 3))))
        self.i = brainstate.HiddenState(jnp.asarray(rng.normal(size=3)))
        self.v = brainstate.HiddenState(jnp.asarray(rng.normal(size=3)))

    def update(self, x):
        old = self.v.value
        self.i.value = 0.5 * self.i.value + matmul(x, self.w.value)
        self.v.value = jnp.tanh(0.9 * old + self.i.value)
        return self.v.value**2 + self.i.value * old


def test_perturbation_derivative_is_the_derivative_by_the_new_states():
    model, x = Coupled(), jnp.asarray([0.3, -0.7])
    minfo = braintrace.extract_module_info(model, x)
    for perturb in (
        braintrace.add_hidden_perturbation_from_minfo(minfo),
        braintrace.add_hidden_perturbation_in_module(model, x),
        braintrace.compile_etrace_graph(model, x).hidden_perturb,
    ):
        assert perturb.perturb_hidden_paths == (("v",), ("i",))  # in the order of first touch
        assert perturb.perturb_hidden_states == (model.v, model.i)
        by_path = {leaf.path: leaf for leaf in minfo.step.hidden + minfo.step.params}
        inputs = [x] + [None] * 3
        for path, leaf in by_path.items():
            inputs[leaf.position] = model.states()[path].value
        zeros = perturb.init_perturb_data()
        got = jax.grad(lambda p: perturb.eval_jaxpr(inputs, p)[0].sum())(zeros)  # noqa: B023
        old = model.v.value
        i = 0.5 * model.i.value + x @ model.w.value

        def loss(v, i):
            v = jnp.tanh(0.9 * old + i) + v  # noqa: B023
            return (v**2 + i * old).sum()  # noqa: B023

        want = jax.grad(loss, argnums=(0, 1))(jnp.zeros(3), i)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
        groups = braintrace.find_hidden_groups_from_minfo(minfo)[0]
        (stacked,) = perturb.perturb_data_to_hidden_group_data(got, groups)
        assert stacked.shape == (3, 2)


def test_perturbation_of_one_state_leaves_another_with_the_same_value():
    def update(m, x):
        m.h.value = 0.5 * m.h.value + matmul(x, m.w.value)
        m.g.value = m.h.value

    states = {k: brainstate.HiddenState(zeros()) for k in "hg"}
    model = Model(update, w=weight(), **states)
    graph = braintrace.compile_etrace_graph(model, jnp.zeros(2))
    info, perturb = graph.module_info, graph.hidden_perturb
    inputs = [jnp.zeros(2)] + [None] * 3
    for leaf in info.step.hidden + info.step.params + info.step.others:
        inputs[leaf.position] = info.states[leaf.path].value
    data = perturb.init_perturb_data()
    data[0] = data[0] + 1
    outs = perturb.eval_jaxpr(inputs, data)
    exits = [outs[leaf.output] for leaf in info.step.hidden]
    assert np.array_equal(exits[0], np.ones(3)) and not np.asarray(exits[1]).any()


def test_perturbation_of_zero_changes_nothing():
    model, x = Coupled(), jnp.asarray([0.3, -0.7])
    graph = braintrace.compile_etrace_graph(model, x)
    info = graph.module_info
    inputs = [x] + [None] * 3
    for leaf in info.step.hidden + info.step.params:
        inputs[leaf.position] = info.states[leaf.path].value
    outs = graph.call_hidden_perturb(inputs, graph.hidden_perturb.init_perturb_data())
    np.testing.assert_allclose(outs[0], model(x), rtol=1e-12)


def test_perturbation_data_of_the_wrong_length_is_refused():
    perturb = braintrace.add_hidden_perturbation_in_module(Coupled(), jnp.zeros(2))
    with pytest.raises(ValueError, match="2 perturbations"):
        perturb.eval_jaxpr([], [jnp.zeros(3)])
    with pytest.raises(ValueError, match=r"2 arrays.*1"):
        perturb.perturb_data_to_hidden_group_data([jnp.zeros(3)], ())
