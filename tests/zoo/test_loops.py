"""Loops inside `update`, and that neither program nor traces grow with their turns."""

import jax
import jax.numpy as jnp
import pytest
from brainstate import transform as bst
from jax import lax

import braintrace as bt
from braintrace.verify._compare import online_grad
from interpret import computed

from .control import (
    KINDS,
    OPTIONS,
    assert_equal,
    check_crossing,
    gradients,
    learner_of,
    made,
)
from .loops import LOOPS
from .zoo import (
    T,
    check,
    matmul,
    net,
    squares,
    targets,
)


def test_weight_that_changes_with_the_state_of_a_loop_is_left_out_by_name(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda i, h: jnp.tanh(0.8 * h + matmul(x, m.w.value * (1 + i * h)))
        m.h.value = lax.fori_loop(0, 2, turn, m.h.value) + matmul(x, m.w.value)
        return m.h.value

    xs = draw(T, 3)
    report = learner_of(bt.D_RTRL, model, xs[0]).report.parameters["w",]
    assert not report.exact and "changes within a sequence" in str(report)
    assert_equal(*gradients(model, xs, learner_of(bt.RTRL, model, xs[0])))


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name):
    model, xs, options = made(LOOPS, name)
    check(model, xs, rules=2, **options)


@pytest.mark.parametrize(
    "name", ["recurrent_operator_inside", "weights_as_slices", "recurrent_layers_by_scan"]
)
def test_loop_with_crossings(name):
    model, xs, _ = made(LOOPS, name)
    check_crossing(model, xs)


# --------------------------------------------------------------------------- many turns, flat


def outside(m, x, turns):
    y = matmul(x, m.w.value)
    m.h.value = lax.fori_loop(0, turns, lambda i, h: h + (y - jnp.tanh(h)) / turns, m.h.value)
    return m.h.value


def inside(m, x, turns):
    turn = lambda h, _: (h + (matmul(x, m.w.value) - jnp.tanh(h)) / turns, None)
    m.h.value = lax.scan(turn, m.h.value, None, turns)[0]
    return m.h.value


def stateful(m, x, turns):
    def turn(i):
        m.h.value = m.h.value + (matmul(x, m.w.value) - jnp.sin(m.h.value)) / turns

    bst.for_loop(turn, jnp.arange(turns))
    return m.h.value


SUBSTEPS = [outside, inside, stateful]


@pytest.mark.parametrize("turns", [2, 40, 5, 500])
@pytest.mark.parametrize("update", SUBSTEPS)
def test_substeps(update, turns, draw):
    model = net({"w": draw(3, 4)}, {"h": draw(4)})(lambda m, x: update(m, x, turns))
    xs = draw(T, 3)
    if turns <= 5:
        check(model, xs, rules=2)
        return
    single = learner_of(bt.D_RTRL, model, xs[0])
    windows = learner_of(bt.D_RTRL, model, xs[0], vjp_method="multi-step")
    sequences = (xs, targets(model, xs[0]))
    found, bptt = gradients(model, xs, single)
    assert_equal(found, bptt)
    run = lambda: online_grad(windows, squares, *sequences, chunk_size=2)
    assert_equal(computed(run), bptt)


@pytest.mark.parametrize("kind", [bt.SnAp, bt.RTRL])
def test_many_substeps_with_crossings(kind, draw):
    @net({"w": draw(3, 4), "r": draw(4, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda i, h: h + 0.02 * (matmul(x, m.w.value) + matmul(h, m.r.value) - h)
        m.h.value = lax.fori_loop(0, 40, turn, m.h.value)
        return m.h.value

    xs = draw(T, 3)
    assert_equal(*gradients(model, xs, learner_of(kind, model, xs[0])))


def size_of(jaxpr) -> int:
    """Equations of a program, those of its bodies too."""
    total = 0
    for eqn in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns")):
            body = getattr(value, "jaxpr", value)
            total += size_of(body) if hasattr(body, "eqns") else 0
    return total


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "snap", "rtrl"])
@pytest.mark.parametrize("update", SUBSTEPS)
def test_program_and_traces_are_flat_in_the_number_of_turns(update, rule, draw):
    def measured(turns):
        model = net({"w": draw(3, 4)}, {"h": draw(4)})(lambda m, x: update(m, x, turns))
        learner = learner_of(KINDS[rule], model, jnp.ones(3), **OPTIONS[rule])
        step = bst.grad(lambda x: jnp.sum(learner(x) ** 2), learner.param_states)
        program = bst.StatefulFunction(step).make_jaxpr(jnp.ones(3)).get_jaxpr(jnp.ones(3))
        traces = jax.tree.map(jnp.shape, [t.value for t in learner.etraces.values()])
        # pp_prop has a pair of factors for every use of an operator, and so for every turn.
        return size_of(program.jaxpr), None if rule == "pp_prop" else traces

    assert measured(40) == measured(500)
