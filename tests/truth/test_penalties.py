"""Backward rules that add a constant to their cotangent: a penalty, once in every step."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import TIGHT, Draw, Net, assert_equal, matmul

import braintrace as bt
from braintrace.graph import affine_equations
from braintrace.program import trace
from gradients import bptt_grad, online_grad
from oracle import reference_grad

T, N = 4, 3
MASK = jnp.array([1.0, 0.0, 0.0, 2.0])
XS = Draw("penalties")(T, N, scale=1.0)


def own_rule(backward):
    """The identity with a backward rule of its own."""
    same = jax.custom_vjp(lambda h: h)
    same.defvjp(lambda h: (h, h), backward)
    return same


active = own_rule(lambda h, ct: (ct + 0.05 * h,))


def new_state(m, x):
    m.h.value = active(jnp.tanh(0.8 * m.h.value + matmul(x, m.A.value)))
    return matmul(m.h.value, m.O.value)


def read_later(m, x):  # the loss of the step does not read what is penalised
    old = m.h.value
    m.h.value = active(jnp.tanh(0.8 * old + matmul(x, m.A.value)))
    return matmul(old, m.O.value)


def recurrent(m, x):  # evaluated with and without the recurrent entries
    v = active(0.8 * m.h.value + matmul(x, m.A.value))
    m.h.value = jnp.tanh(0.5 * v + matmul(v, m.R.value))
    return matmul(m.h.value, m.O.value)


def weight(m, x):  # an operand: its pull-back is taken once per block
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, active(m.A.value)))
    return matmul(active(m.h.value), m.O.value)


def in_bodies(m, x):
    h = jnp.tanh(0.8 * m.h.value + matmul(x, m.A.value))
    h = jax.lax.scan(lambda c, _: (active(c), None), h, None, 2)[0]
    m.h.value = jax.lax.cond(x[0] > 0, active, lambda h: 0.9 * h, h)
    return matmul(m.h.value, m.O.value)


def unread(m, x):  # no loss ever depends on what is penalised: backpropagation does not run it
    m.h.value = active(0.8 * m.h.value + matmul(x, m.A.value))
    return matmul(x, m.O.value)


def model(update):
    draw = Draw("penalised model")
    return Net(update, {"A": draw(N, N), "R": draw(N, N), "O": draw(N, N)}, {"h": draw(N)})


def weighted(net, x, m):
    return jnp.where(m == 0, 0, m * jnp.sum(net(x) ** 2))


def gradient(update, rule, mask, size, loss=lambda y: jnp.sum(y**2), **options):
    learner = bt.compile(model(update), rule, XS[0], **options)
    chunk = 2 if "vjp_method" in options else 1
    one = lambda x: loss(learner(x))
    many = lambda x: jax.vmap(loss)(learner(bt.MultiStepData(x)))
    found = learner.etrace_grad(
        XS,
        step_fn=one if chunk == 1 else many,
        mask=mask,
        chunk_size=chunk,
        block_size=size,
        reduction="sum",
    )
    return dict(found), learner.report.parameters


WINDOWS = {"vjp_method": "multi-step"}
EXACT = [
    (new_state, "d_rtrl", {}, 1),
    (new_state, "d_rtrl", {}, T),
    (new_state, "d_rtrl", WINDOWS, T),
    (read_later, "d_rtrl", {}, 1),
    (read_later, "d_rtrl", {}, 3),
    (read_later, "d_rtrl", WINDOWS, 2),
    (recurrent, "rtrl", {}, T),
    (weight, "d_rtrl", {}, 1),
    (weight, "d_rtrl", {}, T),
    (in_bodies, "d_rtrl", {}, 2),
    (unread, "d_rtrl", {}, 2),
]


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
@pytest.mark.parametrize("update, rule, options, size", EXACT)
def test_what_is_called_exact_is_bptt(update, rule, options, size, mask):
    found, report = gradient(update, rule, mask, size, **options)
    truth = bptt_grad(model(update), weighted, XS, jnp.ones(T) if mask is None else mask)
    assert all(report[path].exact for path in truth)
    assert_equal(found, truth)


def beside(m, x):  # the penalty of h counts, that of g does not
    m.h.value = active(jnp.tanh(0.8 * m.h.value + matmul(x, m.A.value)))
    m.g.value = active(0.5 * m.g.value + matmul(m.h.value, m.R.value))
    return matmul(m.h.value, m.O.value)


@pytest.mark.parametrize("rule, options", [("rtrl", {}), ("d_rtrl", {}), ("d_rtrl", WINDOWS)])
def test_a_penalty_that_counts_beside_one_that_no_loss_depends_on(rule, options):
    draw = Draw("two penalties")
    net = Net(beside, {k: draw(N, N) for k in "ARO"}, {k: draw(N) for k in "hg"})
    learner = bt.compile(net, rule, XS[0], **options)
    assert learner.report.parameters["R",].silent
    step, size = lambda net, x: jnp.sum(net(x) ** 2), T if options else 1
    truth = bptt_grad(net, step, XS)
    assert not np.any(truth["R",])
    assert_equal(online_grad(learner, step, XS, chunk_size=size), truth)
    assert_equal(reference_grad(rule, net, step, XS, chunk_size=size, **options), truth)
    if rule == "rtrl":  # a loss of the other state brings both
        step = lambda m, x: jnp.sum(m(x)) * 0.0 + jnp.sum(net.g.value**2)
        for loss in (step, lambda m, x: (m(x), jnp.sum(net.g.value**2))[1]):
            assert_equal(online_grad(learner, loss, XS), bptt_grad(net, loss, XS))


@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_penalty_of_a_state_that_only_the_loss_reads_counts_once_under_a_mask(size):
    net = model(unread)
    learner = bt.compile(net, "d_rtrl", XS[0])
    loss = lambda m, x: jnp.sum(m(x) ** 2) + jnp.sum(jnp.sin(net.h.value))
    truth = bptt_grad(net, lambda m, x, w: w * loss(m, x), XS, MASK)
    learner.reset_state()
    step = lambda x: loss(learner, x)
    found = learner.etrace_grad(XS, step_fn=step, mask=MASK, block_size=size, reduction="sum")
    assert learner.report.parameters["A",].exact
    np.testing.assert_allclose(found["A",], truth["A",], atol=TIGHT)


RULES = [("d_rtrl", {}), ("pp_prop", {"decay_or_rank": 0.9}), ("otpe", {"leak": 0.8})]
RULES += [("snap", {"n": 1}), ("stllr", {})]


@pytest.mark.parametrize("rule, options", RULES)
def test_rules_are_their_definition(rule, options):
    found, _ = gradient(recurrent, rule, MASK, T, **options)
    assert_equal(found, reference_grad(rule, model(recurrent), weighted, XS, MASK, **options))


@pytest.mark.parametrize("size", [1, 2, T])
def test_around_the_learner(size):
    loss = lambda y: jnp.sum(active(y) ** 2)
    found, _ = gradient(new_state, "d_rtrl", MASK, size, loss)
    step = lambda net, x, m: jnp.where(m == 0, 0, m * loss(net(x)))
    assert_equal(found, bptt_grad(model(new_state), step, XS, MASK))


def test_a_single_call_is_penalised_once():
    learner = bt.compile(net := model(new_state), "d_rtrl", XS[0])
    grads = brainstate.transform.grad(lambda: learner(XS[0]).sum() * 0.0, {"A": net.A})()
    h = np.tanh(0.8 * np.asarray(model(new_state).h.value) + XS[0] @ model(new_state).A.value)
    np.testing.assert_allclose(grads["A"], np.outer(XS[0], 0.05 * h * (1 - h**2)), atol=1e-12)


def test_another_penalty_is_another_program():
    net = model(lambda m, x: setattr(m.h, "value", m.rule(matmul(x, m.A.value))) or m.h.value)
    net.rule = active
    learner = bt.compile(net, "d_rtrl", XS[0])
    step = lambda x: 0.0 * jnp.sum(learner(x))
    found = []
    for net.rule in (active, own_rule(lambda h, ct: (ct + 0.1 * h,))):
        learner.reset_state()
        found.append(learner.etrace_grad(XS, step_fn=step)["A",])
    np.testing.assert_allclose(found[1], 2 * found[0], atol=1e-12)
    assert np.any(found[0])


LINEAR = [
    lambda h, ct: (ct / (1 + jnp.abs(3 * h)) ** 2,),
    lambda h, ct: (jnp.where(h > 0, ct, 0.0),),
    lambda h, ct: (jnp.maximum(0, 1 - jnp.abs(h)) * ct * 0.3,),
    lambda h, ct: (-jnp.flip(ct) @ jnp.outer(h, h),),
]
ADDING = [lambda h, ct: (ct + 0.05 * h,), lambda h, ct: (ct + jnp.arange(N),)]
ADDING += [lambda h, ct: (ct - jax.nn.relu(h - 5.0),)]


@pytest.mark.parametrize("backward", LINEAR + ADDING)
def test_which_rules_add_something(backward):
    program, _ = trace(own_rule(backward), jnp.ones(N))
    assert bool(affine_equations(program, program.outputs)) == (backward in ADDING)


def test_a_rule_that_is_never_run_adds_nothing():
    program, _ = trace(lambda h: jax.lax.stop_gradient(active(h)), jnp.ones(N))
    assert not affine_equations(program, program.outputs)
