"""Parameters, states and inputs of `braintrace.online` may be any pytrees."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from online_cases import error

import braintrace


def test_keys_are_state(leaky):
    def step(params, state, x):
        inner, key = state
        key, use = jax.random.split(key)
        inner, out = leaky.step(params, inner, x + jax.random.normal(use, x.shape))
        return (inner, key), out

    net = braintrace.online(step)
    carry = net.init(leaky.params, (leaky.state, jax.random.key(1)), leaky.xs[0])
    last, outs = net.scan(leaky.params, carry, leaky.xs)
    truth, wanted = jax.lax.scan(lambda s, x: step(leaky.params, s, x), carry.state, leaky.xs)
    np.testing.assert_allclose(outs, wanted, atol=1e-12)
    assert last.state[1] == truth[1]


def test_numbers_that_are_equal_are_not_the_same(leaky):
    def step(params, state, x):
        state, out = leaky.step(params, state, x)
        return state, {int: 1, float: 2, bool: 3}[type(params["how"])] * out

    net = braintrace.online(step)
    first = lambda how: net(
        {**leaky.params, "how": how},
        net.init(leaky.params | {"how": how}, leaky.state, leaky.xs[0]),
        leaky.xs[0],
    )[1]
    np.testing.assert_allclose(first(1.0), 2 * first(1))
    np.testing.assert_allclose(first(True), 3 * first(1))


def test_a_leaf_that_is_no_array_cannot_change(leaky):
    def step(params, state, x):
        inner, out = leaky.step(params, {"v": state["v"]}, x)
        return {**inner, "mode": "slow"}, out

    init = lambda mode: braintrace.online(step).init(
        leaky.params, {**leaky.state, "mode": mode}, leaky.xs[0]
    )
    init("slow")
    with pytest.raises(TypeError, match=r"changed 'fast'.*to 'slow'.\n  why: .*\n  do: "):
        init("fast")


def test_any_key_names_a_leaf(leaky):
    class Box:
        def __init__(self, content):
            self.content = content

    jax.tree_util.register_pytree_with_keys(
        Box, lambda box: ((("content", box.content),), None), lambda _, children: Box(*children)
    )
    net = braintrace.online(lambda params, state, x: leaky.step(params.content, state, x))
    net.init(Box(leaky.params), leaky.state, leaky.xs[0])
    assert ("content", "w") in net.report.parameters


class Cell(NamedTuple):
    """Parameters by attribute."""

    kernel: Any
    others: Any


def test_names_are_written_as_in_the_users_code(leaky):
    w, b, out = (leaky.params[k] for k in ("w", "b", "out"))
    params = [{"cell": Cell(w, {"the bias": b}), "out": [None, out]}]

    def step(params, states, x):
        cell, (_, out) = params[0]["cell"], params[0]["out"]
        inner = {"w": cell.kernel, "b": cell.others["the bias"], "out": out}
        state, out = leaky.step(inner, {"v": states[0]}, x)
        return [state["v"]], out

    net = braintrace.online(step)
    net.init(params, [leaky.state["v"]], leaky.xs[0])
    texts = [str(p) for p in net.report.parameters.values()]
    assert [t.partition(": ")[0] for t in texts] == [
        "params[0].cell.kernel",
        "params[0].cell.others['the bias']",
        "params[0].out[1]",
    ]
    assert (0, "cell", "others", "the bias") in net.report.parameters
    assert " to state[0], " in texts[0]


@pytest.mark.parametrize("whole", [False, True])
def test_a_variable_of_nnx_is_named_by_its_path_alone(whole):
    cell = nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0))
    structure, params = nnx.split(cell)
    step = lambda params, carry, x: nnx.merge(structure, params)(carry, x)
    if whole:
        step, params = lambda cell, carry, x: cell(carry, x), cell
    net = braintrace.online(step)
    net.init(params, jnp.zeros(3, jnp.float32), jnp.zeros(2, jnp.float32))
    names = ["dense_h.kernel", "dense_i.bias", "dense_i.kernel"]
    assert sorted(str(p).partition(": ")[0] for p in net.report.parameters.values()) == names
    text = net.report.to_str()
    assert __file__.rpartition("/")[2] in text and "site-packages" not in text


class Observed(NamedTuple):
    """One input of two arrays."""

    left: Any
    right: Any


def test_a_named_tuple_is_one_input(leaky):
    def step(params, state, seen):
        return leaky.step(params, state, jnp.concatenate(seen, -1))

    net, seen = braintrace.online(step), Observed(leaky.xs[..., :1], leaky.xs[..., 1:])
    carry = net.init(leaky.params, leaky.state, Observed(seen.left[0], seen.right[0]))
    grads, _ = net.grad(leaky.loss)(leaky.params, carry, seen, leaky.ys)
    assert error(grads, leaky.bptt()) < 1e-9


def test_a_step_may_have_no_input(leaky):
    def step(params, state):
        return leaky.step(params, state, leaky.xs[0])

    net = braintrace.online(step)
    carry = net.init(leaky.params, leaky.state)
    _, out = net(leaky.params, carry)
    np.testing.assert_allclose(out, step(leaky.params, leaky.state)[1], atol=1e-12)
    _, (_, losses) = net.grad(leaky.loss)(leaky.params, carry, (), leaky.ys)
    np.testing.assert_allclose(losses[0], leaky.loss(out, leaky.ys[0]), atol=1e-12)


def test_a_number_takes_the_type_of_the_state(leaky):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (leaky.params, leaky.state, leaky.xs[0]))

    def step(params, state, x, dt):
        return leaky.step(params, state, dt * x)

    net, (params, state, x) = braintrace.online(step), half
    carry, out = net(params, net.init(params, state, x, 0.5), x, 0.5)
    assert out.dtype == carry.state["v"].dtype == jnp.bfloat16
