"""The traces of a learner by relation and group, against the recursion they obey."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 3)))  # steps, batch, inputs


class Neuron(brainstate.nn.Module):
    """A voltage and its slow copy; a state of another shape that the weight never reaches."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(np.random.default_rng(1).normal(size=(3, 4))))

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, 4)))
        self.s = brainstate.HiddenState(jnp.zeros((batch_size, 4)))
        self.count = brainstate.HiddenState(jnp.zeros(()))

    def update(self, x):
        self.count.value = 0.5 * self.count.value + 1.0
        v = jnp.tanh(0.8 * self.v.value + bt.matmul(x, self.w.value) - 0.1 * self.s.value)
        self.s.value = 0.9 * self.s.value + v**2
        self.v.value = v
        return v


def observed(learner, x):
    """The relation, its group, x, D and f of the step that comes, from the compiler's records."""
    graph = learner.graph
    (relation,) = graph.hidden_param_op_relations
    (group,) = relation.hidden_groups
    old = [s.value for s in group.hidden_states]
    temps = graph.module_info.jaxpr_call(x)[-1]
    D = group.diagonal_jacobian(old, temps)
    tail = lambda y: relation.y_to_hidden_groups(y, temps)[0]
    y = temps[relation.y_var]
    f = jax.jvp(tail, (y,), (jnp.ones_like(y),))[1]
    return relation, group, temps[relation.x_var], D, f


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_traces_of_weights_follow_their_recursion():
    learner = bt.compile(Neuron(), "d_rtrl", X[0], batch_size=2)
    eps = jnp.zeros((2, 3, 4, 2))
    for x in X:
        relation, group, seen, D, f = observed(learner, x)
        moved = jnp.einsum("bjkl,bijl->bijk", D, eps)
        eps = moved + seen[:, :, None, None] * f[:, None]
        learner(x)
        (key,) = learner.etrace_bwg
        assert key == (id(relation.y_var), group.index)
        close(learner.etrace_bwg[key].value["weight"], eps)
    with pytest.raises(TypeError):
        learner.etrace_bwg[key] = 0
    with pytest.raises(AttributeError):
        learner.etrace_bwg[key].value = 0


def test_factors_follow_their_recursion():
    learner = bt.compile(Neuron(), "pp_prop", X[0], batch_size=2, decay_or_rank=(0.7, 0.6))
    xs, dfs = 0.0, jnp.zeros((2, 4, 2))
    for x in X:
        relation, group, seen, D, f = observed(learner, x)
        xs = 0.7 * xs + seen
        dfs = 0.6 * jnp.einsum("bjkl,bjl->bjk", D, dfs) + 0.4 * f
        learner(x)
        close(learner.etrace_xs[id(relation.x_var)].value, xs)
        close(learner.etrace_dfs[id(relation.y_var), f"hidden_group_{group.index}"].value, dfs)


def test_filtered_and_wider_traces_show_the_trace_itself():
    cell = bt.nn.ValinaRNNCell(3, 4, activation="tanh")
    plain, filtered, wide = (
        bt.compile(cell, rule, X[0], batch_size=2, **options)
        for rule, options in (("d_rtrl", {}), ("eprop", {"kappa_filter_decay": 0.5}), ("snap", {}))
    )
    for learner in (plain, filtered):
        brainstate.nn.reset_all_states(cell, batch_size=2)
        for x in X:
            learner(x)
    (one,), (other,), (more,) = (m.etrace_bwg.values() for m in (plain, filtered, wide))
    close(other.value["weight"], one.value["weight"])
    assert one.value["weight"].shape == (2, 7, 4, 1) and more.value["bias"].shape == (2, 4, 4)


class Halves(brainstate.nn.Module):
    """One operator whose output falls into two groups; the last state drives the second."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.a, self.b, self.c = (brainstate.HiddenState(jnp.zeros(2)) for _ in range(3))

    def update(self, x):
        y = bt.matmul(x, self.w.value)
        self.a.value = 0.5 * self.a.value + y[:2]
        self.b.value = 0.5 * self.b.value + 2 * y[2:] + self.c.value
        self.c.value = 0.5 * self.c.value


def test_slots_are_told_apart_by_group_and_a_state_without_one_has_zeros():
    learner = bt.compile(Halves(), "d_rtrl", jnp.ones(3))
    learner(jnp.ones(3))
    (relation,) = learner.graph.hidden_param_op_relations
    first, second = (
        learner.etrace_bwg[id(relation.y_var), group.index].value["weight"]
        for group in learner.graph.hidden_groups
    )
    close(first[..., 0], jnp.broadcast_to(jnp.array([1.0, 1, 0, 0]), (3, 4)))
    close(second[..., 0], jnp.broadcast_to(jnp.array([0.0, 0, 2, 2]), (3, 4)))
    assert second.shape == (3, 4, 2) and not second[..., 1].any()


@pytest.mark.parametrize(
    "rule, options, missing",
    [
        ("d_rtrl", {}, ["etrace_xs", "etrace_dfs"]),
        ("pp_prop", {"decay_or_rank": 0.9}, ["etrace_bwg"]),
        ("rtrl", {}, ["etrace_bwg", "etrace_xs", "etrace_dfs"]),
    ],
)
def test_what_a_rule_does_not_keep_is_an_attribute_error(rule, options, missing):
    learner = bt.compile(Neuron(), rule, X[0], batch_size=2, **options)
    for name in missing:
        with pytest.raises(AttributeError, match=f"has no {name}") as error:
            getattr(learner, name)
        assert "why:" in str(error.value) and "do:" in str(error.value)
        assert not hasattr(learner, name)
