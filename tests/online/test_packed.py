"""States packed into one array, by split and concatenation, count as several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library_cases import SPYX, I, N, T, inputs
from unmarked_gradients import bptt, close, definition, gradient

import braintrace
from braintrace import rules


def separate(case, axis=-1):
    """The same step with the two halves of every array of the state as states of their own."""
    step, params, state, xs = case
    halves = lambda tree: jax.tree.map(lambda a: tuple(jnp.split(a, 2, axis)), tree)
    pair = lambda n: isinstance(n, tuple)

    def twin(params, state, x):
        whole = jax.tree.map(lambda n: jnp.concatenate(n, axis), state, is_leaf=pair)
        state, out = step(params, whole, x)
        return halves(state), out

    return twin, params, halves(state), xs


def stacked(batch):
    """A current and a voltage in one array, written in plain JAX."""

    def step(p, state, x):
        v, i = state
        i = 0.7 * i + x @ p["w"] - 0.1 * v
        v = jnp.tanh(p["leak"] * v + i)
        return jnp.stack([v, i]), v

    w = jnp.asarray(np.random.default_rng(5).normal(size=(I, N)))
    params = {"leak": jnp.full(N, 0.9), "w": w}
    return step, params, jnp.zeros((2, batch, N)), inputs(batch, I)


IN_ONE_ARRAY = {"ALIF": SPYX["ALIF"], "CuBaLIF": SPYX["CuBaLIF"], "stacked": stacked}


@pytest.mark.parametrize("name", IN_ONE_ARRAY)
def test_states_in_one_array_are_followed_like_separate_ones(name):
    case = IN_ONE_ARRAY[name](2)
    axis = 0 if name == "stacked" else -1
    got, net = gradient(case, "d_rtrl")
    want, twin = gradient(separate(case, axis), "d_rtrl")
    close(got, want)
    assert all(p.exact for p in net.report.parameters.values())
    assert net.memory == twin.memory
    # The group has two variables per unit, and puts them back where they were.
    (group,) = net._last.graph.groups
    shape = jax.tree.leaves(case[2])[0].shape
    state = jnp.arange(4.0 * N).reshape(shape)
    stack = group.concat_hidden([state])
    assert stack.shape == (2, N, 2) and group.num_state == 2
    np.testing.assert_array_equal(group.split_hidden(stack)[0], state)
    first = state[0] if axis == 0 else state[:, :N]
    np.testing.assert_array_equal(stack[..., 0], first)


RULES = {
    "pp_prop": (rules.pp_prop(0.9), {}),
    "snap": (rules.snap(2), {}),
    "eprop": (rules.eprop(kappa_filter_decay=0.5), {}),
    "three_factor": (rules.three_factor(), {"modulator": np.arange(1.0, T + 1)}),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_follows_them(rule):
    case, (value, extra) = stacked(2), RULES[rule]
    got, net = gradient(case, value, **extra)
    want, twin = gradient(separate(case, 0), value, **extra)
    close(got, want)
    assert net.memory == twin.memory


def test_states_in_one_array_by_their_definition():
    case = separate(SPYX["ALIF"](1))
    got, net = gradient(case, "d_rtrl")
    close(got, definition(case, net))


def test_a_delay_line_stays_one_array():
    def step(p, line, x):
        line = jnp.concatenate([(x @ p)[None], line[:-1]])
        return line, line[-1]

    case = step, jnp.ones((I, N)), jnp.zeros((4, 2, N)), inputs(2, I)
    got, net = gradient(case, "d_rtrl")
    close(got, bptt(case))
    assert net._last.graph.step.hidden[0].packed is None


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_analysis_of_states_in_one_array_does_not_grow_with_the_batch(axis):
    """`jnp.stack([v, i], 0)` and `(..., 1)`, and an LSTM's `jnp.concatenate([h, c], -1)`."""

    def step(p, state, x):
        v, i = jnp.split(state, 2, axis)
        v, i = (jnp.reshape(a, (len(x), N)) for a in (v, i))
        i = 0.7 * i + x @ p["w"] + v @ p["r"]
        v = jnp.tanh(p["leak"] * v + i)
        join = jnp.concatenate if axis == -1 else jnp.stack
        return join([v, i], axis), v

    def found(batch):
        shape = {0: (2, batch, N), 1: (batch, 2, N), -1: (batch, 2 * N)}[axis]
        params = {"w": jnp.ones((I, N)), "r": jnp.ones((N, N)), "leak": jnp.ones(N)}
        net = braintrace.online(step)
        net.init(params, jnp.zeros(shape), jnp.ones((batch, I)))
        graph = net._last.graph
        assert graph.step.hidden[0].packed is not None
        edges = [len(view.pattern.edges) for view in graph.views]
        return edges, [r.slots.analysed.shape for r in graph.relations]

    assert found(4) == found(512)
