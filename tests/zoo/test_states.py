"""States of many shapes, and how they meet."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .zoo import T, check, element_wise, matmul, net, sigmoid, spike

# ---------------------------------------------------------------------------------- shapes


def test_several_shapes_in_one_model(draw):
    @net({"w": draw(3, 4), "u": draw(3, 2)}, {"a": draw(4), "b": draw(2), "c": draw(2, 4)})
    def model(m, x):
        y, z = matmul(x, m.w.value), matmul(x, m.u.value)
        m.a.value = jnp.tanh(0.8 * m.a.value + y)
        m.b.value = 0.7 * m.b.value + z
        m.c.value = 0.6 * m.c.value + m.a.value * jnp.sin(z)[:, None]
        return m.c.value * m.a.value + m.b.value[:, None]

    check(model, draw(T, 3))


def test_scalar_state(draw):
    @net({"w": draw(3, 1), "a": draw()}, {"h": draw()})
    def model(m, x):
        a = element_wise(m.a.value, sigmoid)
        m.h.value = a * m.h.value + jnp.sin(matmul(x, m.w.value).squeeze())
        return m.h.value

    check(model, draw(T, 3))


def test_linear_attention(draw):
    params = {"q": draw(3, 2), "k": draw(3, 2), "v": draw(3, 4)}

    @net(params, {"s": draw(2, 4)})
    def model(m, x):
        m.s.value = m.s.value + jnp.outer(matmul(x, m.k.value), matmul(x, m.v.value))
        return matmul(x, m.q.value) @ m.s.value

    check(model, draw(T, 3))


def test_gated_linear_attention_on_a_batch(draw):
    params = {"q": draw(3, 2), "k": draw(3, 2), "v": draw(3, 2), "a": draw(3, 2)}

    @net(params, {"s": draw(2, 2, 2)})
    def model(m, x):
        k, v, a = (matmul(x, p.value) for p in (m.k, m.v, m.a))
        m.s.value = sigmoid(a)[:, :, None] * m.s.value + jnp.einsum("bi,bj->bij", k, v)
        return jnp.einsum("bi,bij->bj", matmul(x, m.q.value), m.s.value)

    check(model, draw(T, 2, 3))


def test_attention_with_a_normaliser(draw):
    params = {"q": draw(3, 2), "k": draw(3, 2), "v": draw(3, 4)}

    @net(params, {"s": jnp.abs(draw(2, 4)), "z": jnp.abs(draw(2)) + 1})
    def model(m, x):
        q, k = jax.nn.elu(matmul(x, m.q.value)) + 1, jax.nn.elu(matmul(x, m.k.value)) + 1
        m.s.value = m.s.value + jnp.outer(k, matmul(x, m.v.value))
        m.z.value = m.z.value + k
        return q @ m.s.value / (q @ m.z.value)

    check(model, draw(T, 3))


def test_delta_rule(draw):
    params = {"q": draw(3, 2), "k": draw(3, 2), "v": draw(3, 4)}

    @net(params, {"s": draw(2, 4)})
    def model(m, x):
        k = matmul(x, m.k.value)
        read = k @ m.s.value  # a sum over the units of the state
        m.s.value = m.s.value + 0.5 * jnp.outer(k, matmul(x, m.v.value) - read)
        return matmul(x, m.q.value) @ m.s.value

    check(model, draw(T, 3), exact=False)


def test_selective_state_space(draw):
    params = {"d": draw(3, 3), "a": draw(3, 2), "b": draw(3, 2), "c": draw(3, 2), "skip": draw(3)}

    @net(params, {"h": draw(3, 2)})
    def model(m, x):
        dt = jax.nn.softplus(matmul(x, m.d.value))[:, None]
        a = jnp.exp(-dt * jnp.exp(element_wise(m.a.value)))
        m.h.value = a * m.h.value + dt * x[:, None] * matmul(x, m.b.value)
        return m.h.value @ matmul(x, m.c.value) + x * element_wise(m.skip.value)

    check(model, draw(T, 3))


def test_fast_weights(draw):
    @net({"w": draw(3, 3)}, {"h": draw(3), "fast": draw(3, 3, scale=0.3)})
    def model(m, x):
        m.fast.value = 0.9 * m.fast.value + 0.3 * jnp.outer(m.h.value, m.h.value)
        m.h.value = jnp.tanh(matmul(x, m.w.value) + m.h.value @ m.fast.value)
        return m.h.value

    check(model, draw(T, 3), exact=False)


# ----------------------------------------------------------------------------- who meets whom


def test_state_updated_twice(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        m.h.value = 0.7 * jnp.sin(m.h.value) + matmul(x**2, m.u.value)
        return m.h.value

    check(model, draw(T, 3))


def test_two_states_meet(draw):
    states = {"a": draw(2, 4), "b": draw(2, 4), "c": draw(2, 4)}

    @net({"w": draw(3, 4), "u": draw(3, 4)}, states)
    def model(m, x):
        m.a.value = 0.9 * m.a.value + matmul(x, m.w.value)
        m.b.value = 0.8 * m.b.value + matmul(x, m.u.value)
        m.c.value = 0.7 * m.c.value + m.a.value * jnp.sin(m.b.value)
        return m.c.value

    check(model, draw(T, 2, 3))


def test_peephole_cell(draw):
    params = {k: draw(3, 4) for k in "fiog"} | {"pf": draw(4), "po": draw(4)}

    @net(params, {"c": draw(4), "h": draw(4)})
    def model(m, x):
        f = sigmoid(matmul(x, m.f.value) + element_wise(m.pf.value) * m.c.value + 0.3 * m.h.value)
        i, g = sigmoid(matmul(x, m.i.value)), jnp.tanh(matmul(x, m.g.value))
        m.c.value = f * m.c.value + i * g
        o = sigmoid(matmul(x, m.o.value) + element_wise(m.po.value) * m.c.value)
        m.h.value = o * jnp.tanh(m.c.value)
        return m.h.value

    check(model, draw(T, 3))


def test_synapse_voltage_adaptation(draw):
    states = {"s": draw(2, 4), "v": draw(2, 4), "a": jnp.abs(draw(2, 4))}

    @net({"w": draw(3, 4, scale=1.5), "tau": draw(4)}, states)
    def model(m, x):
        m.s.value = element_wise(m.tau.value, sigmoid) * m.s.value + matmul(x, m.w.value)
        v = 0.9 * m.v.value + m.s.value
        z = spike(v - 0.3 - m.a.value)
        m.a.value = 0.8 * m.a.value + 0.2 * z
        m.v.value = v * (1 - z)
        return z + 0.1 * v

    check(model, draw(T, 2, 3))


def test_two_compartments(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4), "g": draw(4)}, {"soma": draw(4), "dendrite": draw(4)})
    def model(m, x):
        flow = element_wise(m.g.value, sigmoid) * (m.dendrite.value - m.soma.value)
        m.dendrite.value = 0.9 * m.dendrite.value - flow + matmul(x, m.w.value)
        m.soma.value = jnp.tanh(0.8 * m.soma.value + flow + matmul(x, m.u.value))
        return m.soma.value

    check(model, draw(T, 3))


def test_dendrites_of_one_unit(draw):
    group = brainstate.HiddenGroupState(draw(2, 4))  # three dendrites and a soma

    @net({"w": draw(3, 6)}, {"cell": group})
    def model(m, x):
        dendrites, soma = m.cell.value[:, :3], m.cell.value[:, 3:]
        into = matmul(x, m.w.value).reshape(2, 3) + 0.3 * soma
        dendrites = jnp.tanh(0.8 * dendrites + into)
        soma = 0.7 * soma + jnp.sin(dendrites).sum(1, keepdims=True)
        m.cell.value = jnp.concatenate([dendrites, soma], 1)
        return soma[:, 0]

    check(model, draw(T, 3))


@pytest.mark.parametrize("back", [False, True], ids=["one way", "both ways"])
def test_dendrites_summed_into_a_soma(draw, back):
    @net({"w": draw(3, 6)}, {"soma": draw(2), "dendrites": draw(3, 2)})
    def model(m, x):
        into = matmul(x, m.w.value).reshape(3, 2) + 0.3 * back * m.soma.value
        m.dendrites.value = jnp.tanh(0.8 * m.dendrites.value + into)
        m.soma.value = 0.7 * m.soma.value + jnp.sin(m.dendrites.value).sum(0)
        return m.soma.value

    # The soma feeds back to all dendrites, so their sum reaches several positions: it is cut. The
    # dendrites of a HiddenGroupState are variables of one unit, and nothing is.
    check(model, draw(T, 3), exact=False)


def test_synapses_of_every_pair(draw):
    @net({"w": draw(3, 2)}, {"syn": draw(3, 2), "v": draw(2)})
    def model(m, x):
        m.syn.value = 0.8 * m.syn.value + x[:, None] * element_wise(m.w.value)
        m.v.value = jnp.tanh(0.9 * m.v.value + m.syn.value.sum(0))
        return m.v.value

    check(model, draw(T, 3))


def test_synapses_of_every_pair_by_a_matrix_product(draw):
    @net({"w": draw(3, 2)}, {"syn": draw(3, 2), "v": draw(2)})
    def model(m, x):
        m.syn.value = 0.8 * m.syn.value + x[:, None] * element_wise(m.w.value)
        m.v.value = jnp.tanh(0.9 * m.v.value + jnp.cos(x) @ m.syn.value)
        return m.v.value

    check(model, draw(T, 3))


def test_swapped_and_copied_states(draw):
    @net({"w": draw(3, 4)}, {"a": draw(4), "b": draw(4), "c": draw(4)})
    def model(m, x):
        a = m.a.value
        m.a.value, m.b.value = jnp.sin(m.b.value) + matmul(x, m.w.value), a
        m.c.value = a
        return m.a.value * m.b.value + m.c.value

    check(model, draw(T, 3))


# -------------------------------------------------------------------------------------- delays


def test_shift_register(draw):
    @net({"w": draw(3, 2)}, {"line": draw(3, 2), "v": draw(2)})
    def model(m, x):
        m.v.value = 0.9 * m.v.value + jnp.sin(m.line.value[-1])
        new = jnp.tanh(matmul(x, m.w.value))
        m.line.value = jnp.roll(m.line.value, 1, axis=0).at[0].set(new)
        return m.v.value

    check(model, draw(T, 3))


@pytest.mark.parametrize("by", ["at", "dynamic"])
def test_ring_buffer(draw, by):
    count = brainstate.ShortTermState(jnp.zeros((), int))

    @net({"w": draw(3, 2)}, {"ring": draw(2, 2), "v": draw(2), "at": count})
    def model(m, x):
        i = m.at.value % 2
        new = jnp.tanh(matmul(x, m.w.value))
        if by == "at":
            old = m.ring.value[i]
            m.ring.value = m.ring.value.at[i].set(new)
        else:
            old = lax.dynamic_index_in_dim(m.ring.value, i, keepdims=False)
            m.ring.value = lax.dynamic_update_index_in_dim(m.ring.value, new, i, 0)
        m.v.value = 0.9 * m.v.value + jnp.sin(old)
        m.at.value = m.at.value + 1
        return m.v.value

    check(model, draw(T, 3))


def test_delay_that_differs_per_unit(draw):
    delays = np.array([0, 2, 1])

    @net({"w": draw(3, 3)}, {"line": draw(3, 3), "v": draw(3)})
    def model(m, x):
        new = matmul(x, m.w.value)
        m.line.value = jnp.concatenate([new[None], m.line.value[:-1]])
        m.v.value = 0.9 * jnp.sin(m.v.value) + m.line.value[delays, np.arange(3)]
        return m.v.value

    check(model, draw(T, 3))


# ----------------------------------------------------------------------------- kinds of states


def test_hidden_group_state(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": brainstate.HiddenGroupState(draw(2, 4, 2))})
    def model(m, x):
        v, a = m.h.get_value(0), m.h.get_value(1)
        v = jnp.tanh(0.8 * v - a + matmul(x, m.w.value))
        m.h.set_value([v, 0.7 * a + v * matmul(x, m.u.value)])
        return v

    check(model, draw(T, 2, 3))


def test_hidden_tree_state(draw):
    tree = brainstate.HiddenTreeState({"v": draw(4), "a": draw(4)})

    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": tree})
    def model(m, x):
        v, a = m.h.get_value("v"), m.h.get_value("a")
        v = jnp.tanh(0.8 * v - a + matmul(x, m.w.value))
        m.h.set_value({"v": v, "a": 0.7 * a + v * matmul(x, m.u.value)})
        return v

    check(model, draw(T, 3))


def test_state_that_is_a_tree(draw):
    tree = brainstate.ShortTermState({"v": draw(4), "w": (draw(4), draw(2))})

    @net({"w": draw(3, 4)}, {"h": tree})
    def model(m, x):
        v, (a, b) = m.h.value["v"], m.h.value["w"]
        v = jnp.tanh(0.8 * v - a + matmul(x, m.w.value))
        m.h.value = {"v": v, "w": (0.7 * a + v, 0.5 * b + v[1:3])}
        return v[:2] * b

    check(model, draw(T, 3))


@pytest.mark.parametrize("kind", ["ShortTermState", "LongTermState", "State"])
def test_other_kinds_of_state(draw, kind):
    @net({"w": draw(3, 4)}, {"h": getattr(brainstate, kind)(draw(4))})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value

    check(model, draw(T, 3))


def test_dropout_and_noise(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        keep = brainstate.random.bernoulli(0.7, size=(2, 4))
        noise = 0.1 * brainstate.random.normal(size=(2, 4))
        m.h.value = jnp.tanh(0.8 * m.h.value * keep + matmul(x, m.w.value) * (1 + noise))
        return jnp.where(brainstate.random.rand(2, 4) < 0.8, m.h.value / 0.8, 0.0)

    check(model, draw(T, 2, 3))


def test_dropout_layer(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4), "drop": brainstate.nn.Dropout(0.6)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + m.drop(matmul(x, m.w.value)))
        return m.h.value

    with brainstate.environ.context(fit=True):
        check(model, draw(T, 2, 3))


def test_counters_and_refractory_times(draw):
    states = {
        "v": draw(4),
        "count": brainstate.ShortTermState(jnp.zeros((), int)),
        "rest": brainstate.ShortTermState(jnp.asarray([0, 1, 0, 2])),
        "on": brainstate.ShortTermState(jnp.zeros(4, bool)),
    }

    @net({"w": draw(3, 4)}, states)
    def model(m, x):
        m.count.value += 1
        v = 0.9 * m.v.value + matmul(x, m.w.value) / m.count.value
        v = jnp.where(m.rest.value > 0, 0.5 * m.v.value, v)
        m.on.value = v > 0.5
        m.rest.value = jnp.where(m.on.value, 2, jnp.maximum(m.rest.value - 1, 0))
        m.v.value = v
        return jnp.where(m.count.value % 2 == 0, v, 2 * v)

    check(model, draw(T, 3))


def test_states_that_no_operator_touches(draw):
    states = {"h": draw(4), "k": draw(3), "still": draw(4), "clock": draw()}

    @net({"w": draw(3, 4), "plain": draw(4, 2)}, states)
    def model(m, x):
        m.clock.value = m.clock.value + 0.3
        m.k.value = 0.9 * m.k.value + x
        m.h.value = jnp.tanh(m.still.value * m.h.value + matmul(m.k.value, m.w.value))
        return (m.h.value * jnp.sin(m.clock.value)) @ m.plain.value

    check(model, draw(T, 3))


def test_states_far_apart_do_not_meet(draw):
    @net({"w": draw(3, 4), "u": draw(2, 3)}, {"a": draw(4), "b": draw(2, 3)})
    def model(m, x):
        m.a.value = jnp.tanh(0.8 * m.a.value + matmul(x, m.w.value))
        m.b.value = jnp.tanh(0.7 * m.b.value + matmul(jnp.stack([x[:2], x[1:]]), m.u.value))
        return m.a.value[:3] + m.b.value

    check(model, draw(T, 3))


def test_state_written_under_a_condition_on_the_data(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        new = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        m.h.value = jnp.where(x[:, :1] > 0, new, m.h.value)
        return m.h.value

    check(model, draw(T, 2, 3))


def test_state_reset_to_zero_by_the_data(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        h = m.h.value * (x[0] > 0)
        m.h.value = jnp.tanh(0.8 * h + matmul(x, m.w.value))
        return m.h.value

    check(model, draw(T, 3))


def test_unit_delay_through_the_old_value(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4), "last": draw(4)})
    def model(m, x):
        change = m.h.value - m.last.value
        m.last.value = m.h.value
        m.h.value = jnp.tanh(0.8 * m.h.value + 0.3 * change + matmul(x, m.w.value))
        return m.h.value

    check(model, draw(T, 3))
