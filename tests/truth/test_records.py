"""The jaxprs in the compiler's records, on models of every kind, against the engine's numbers."""

import jax
import numpy as np
import pytest
from jax.core import eval_jaxpr
from models import EXACT, RECURRENT

import braintrace as bt

CASES = {**EXACT, **RECURRENT}
NAMES = ["adaptive_spikes_custom_vjp", "complex_group_state", "plain_recurrent_weight",
         "neighbours", "layer_norm", "loop_inside"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_transition_and_tails_compute_the_step_and_its_kept_jacobian(name):
    case = CASES[name]()
    executor = bt.ETraceVjpGraphExecutor(case.model)
    executor.compile_graph(case.x0)
    graph, info = executor.graph, executor.graph.module_info
    temps = info.jaxpr_call(case.x0)[-1]
    kept = executor.solve_h2w_h2h_jacobian(case.x0)[-1]
    for group, D in zip(graph.hidden_groups, kept, strict=True):
        old = [jax.tree.leaves(s.value)[0] for s in group.hidden_states]
        np.testing.assert_allclose(group.diagonal_jacobian(old, temps), D, rtol=0, atol=1e-12)
        jaxpr = group.transition_jaxpr
        check(group, jaxpr, old, temps)
    for relation in graph.hidden_param_op_relations:
        jaxprs = relation.y_to_hidden_group_jaxprs
        for group, jaxpr in zip(relation.hidden_groups, jaxprs, strict=True):
            check(group, jaxpr, [temps[relation.y_var]], temps)


def check(group, jaxpr, inputs, temps):
    new = eval_jaxpr(jaxpr, [temps[v] for v in jaxpr.constvars], *inputs)
    for var, value in zip(group.hidden_outvars, new, strict=True):
        np.testing.assert_allclose(value, temps[var], rtol=0, atol=1e-12)
