"""Slots and lanes: where the trace of an operator output lives."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.graph import looked_up

from .step_models import Model, compiled, driven, normal


def slots_of(graph):
    (relation,) = graph.hidden_param_op_relations
    return relation.slots


LAYOUTS = {
    "element-wise": (lambda y: jnp.tanh(y), (), 1),
    "sliced": (lambda y: y[:3], (), 1),
    "broadcast": (lambda y: jnp.broadcast_to(y, (4, 6)), (4,), 1),
    "repeated": (lambda y: jnp.tile(y, 2), (2,), 1),
    "neighbours": (lambda y: y + jnp.roll(y, 1), (2,), 1),
}


@pytest.mark.parametrize("tail, lanes, width", LAYOUTS.values(), ids=LAYOUTS)
def test_slots_have_one_lane_per_separate_destination(tail, lanes, width):
    slots = slots_of(driven(tail))
    assert (slots.lanes, slots.width) == (lanes, width)
    assert slots.y_shape == (6,)
    assert slots.shape == (*lanes, 6)


def test_slots_of_unread_outputs_have_no_destination():
    slots = slots_of(driven(lambda y: y[:4]))
    assert slots.destination[0, :, 0].tolist() == [0, 1, 2, 3, -1, -1]


def test_slots_of_a_mixing_tail_do_not_exist():
    graph = driven(jnp.cumsum)
    assert graph.hidden_param_op_relations == ()
    (record,) = graph.explain(kind="relation_excluded_shape_mismatch")
    assert record.weight_path == ("w",)


@pytest.mark.parametrize(
    "index, gathers",
    [
        (np.arange(5, 11).reshape(3, 2).T, 0),
        (np.arange(4).reshape(2, 2)[:, None] + 5, 0),
        (np.broadcast_to(np.arange(6, 9)[:, None], (3, 4)), 0),
        (np.arange(5, 11).reshape(3, 2).T.reshape(6, 1), 0),
        (np.array([4, 4, 0, 1]), 1),
        (np.array([[0, -1], [10, 3]]), 1),
        (np.array([2, 3]), 0),
    ],
)
def test_elements_are_looked_up_in_a_table_only_if_they_must_be(index, gathers):
    first, last = jnp.arange(2.0) + 1, jnp.arange(6.0).reshape(2, 3) + 10
    full = np.r_[first, 0, 0, 0, np.ravel(last), 0]
    read = lambda a, c: looked_up([a, None, c], [2, 3, 6], index, float)
    np.testing.assert_array_equal(read(first, last), full[index])
    names = [e.primitive.name for e in jax.make_jaxpr(read)(first, last).eqns]
    names += [e.primitive.name for e in jax.make_jaxpr(jax.jit(read))(first, last).eqns]
    assert sum(n == "gather" for n in names) == gathers


def delay(m, x):
    """A line of three delays; the output reads its end."""
    y = braintrace.matmul(x, m.w.value)
    m.line.value = jnp.concatenate([y[None], m.line.value[:-1]])
    return m.line.value[-1]


def ring(m, x):
    """The same by rolling the buffer and writing at its head."""
    y = braintrace.matmul(x, m.w.value)
    m.line.value = jnp.roll(m.line.value, 1, axis=0).at[0].set(y)
    return m.line.value[-1]


def multi_tau(m, x):
    y = braintrace.matmul(x, m.w.value)
    m.line.value = jnp.asarray([[0.9], [0.5], [0.1]]) * m.line.value + y
    return m.line.value.sum(0)


@pytest.mark.parametrize("update", [delay, ring], ids=["delay", "ring"])
def test_slots_of_a_delay_line_are_the_closure_of_the_direct_one(update):
    states = {"line": jnp.zeros((3, 2))}
    slots = slots_of(compiled(update, {"w": normal(0, 2, 2)}, states, jnp.zeros(2)))
    assert (slots.lanes, slots.width) == ((), 3)
    assert sorted(slots.destination[0, 0].tolist()) == [0, 2, 4]
    assert sorted(slots.destination[0, 1].tolist()) == [1, 3, 5]


def test_slots_of_states_that_never_meet_are_lanes():
    states = {"line": jnp.zeros((3, 2))}
    slots = slots_of(compiled(multi_tau, {"w": normal(0, 2, 2)}, states, jnp.zeros(2)))
    assert (slots.lanes, slots.width) == ((3,), 1)


@pytest.mark.parametrize("update", [delay, ring, multi_tau], ids=["delay", "ring", "multi_tau"])
def test_slots_of_several_destinations_give_the_exact_gradient(update):
    def make():
        return Model(update, {"w": normal(0, 2, 2)}, {"line": jnp.zeros((3, 2))})

    xs = normal(1, 6, 2)
    model, algo = make(), braintrace.D_RTRL(make())
    algo.compile_graph(xs[0])
    want = brainstate.transform.grad(
        lambda: sum((model(x) ** 2).sum() for x in xs), model.states(brainstate.ParamState)
    )()
    got = algo.etrace_grad(xs, step_fn=lambda x: (algo(x) ** 2).sum(), reduction="sum")
    scale = np.abs(want[("w",)]).max()
    assert scale > 1e-3
    assert np.abs(got[("w",)] - want[("w",)]).max() <= 1e-9 * scale


def test_slots_of_a_batch_are_positions_not_lanes():
    def update(m, x):
        m.h.value = 0.5 * m.h.value + braintrace.matmul(x, m.w.value)

    graph = compiled(update, {"w": normal(0, 2, 3)}, {"h": jnp.zeros((4, 3))}, jnp.zeros((4, 2)))
    slots = slots_of(graph)
    assert (slots.lanes, slots.y_shape, slots.width) == ((), (4, 3), 1)


def test_slots_of_a_shared_elementwise_weight_are_lanes_of_the_batch():
    def update(m, x):
        m.h.value = braintrace.element_wise(m.w.value) * m.h.value + x

    graph = compiled(update, {"w": normal(0, 3)}, {"h": jnp.zeros((4, 3))}, jnp.zeros((4, 3)))
    slots = slots_of(graph)
    assert (slots.lanes, slots.y_shape, slots.width) == ((4,), (3,), 1)


def test_slots_of_two_states_per_unit_are_two():
    def update(m, x):
        m.i.value = 0.5 * m.i.value + braintrace.matmul(x, m.w.value)
        m.v.value = 0.9 * m.v.value + m.i.value

    states = {"i": jnp.zeros(3), "v": jnp.zeros(3)}
    slots = slots_of(compiled(update, {"w": normal(0, 2, 3)}, states, jnp.zeros(2)))
    assert (slots.lanes, slots.width) == ((), 2)
    trace = jax.tree.leaves(slots.destination)[0]
    assert trace.shape == (1, 3, 2)


def test_slots_of_a_group_state_are_its_channels():
    class Neuron(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(normal(0, 2, 3))
            self.h = brainstate.HiddenGroupState(jnp.zeros((3, 2)))

        def update(self, x):
            v, a = self.h.value[..., 0], self.h.value[..., 1]
            a = 0.9 * a + 0.1 * v
            v = 0.5 * v - a + braintrace.matmul(x, self.w.value)
            self.h.value = jnp.stack([v, a], -1)
            return jnp.tanh(v)

    xs = normal(1, 6, 2)
    model, algo = Neuron(), braintrace.D_RTRL(Neuron())
    algo.compile_graph(xs[0])
    (group,) = algo.graph.hidden_groups
    assert (group.varshape, group.num_state) == ((3,), 2)
    assert slots_of(algo.graph).width == 2
    want = brainstate.transform.grad(
        lambda: sum((model(x) ** 2).sum() for x in xs), model.states(brainstate.ParamState)
    )()
    got = algo.etrace_grad(xs, step_fn=lambda x: (algo(x) ** 2).sum(), reduction="sum")
    assert np.abs(got[("w",)] - want[("w",)]).max() <= 1e-9 * np.abs(want[("w",)]).max()
