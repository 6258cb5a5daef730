"""Choices inside `update`: an operator around, before, after and in their branches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from brainstate import transform as bst
from jax import lax

import braintrace as bt

from .control import case, check_crossing, made
from .zoo import (
    RULES,
    T,
    check,
    element_wise,
    matmul,
    net,
    sigmoid,
    small,
)

# name: (maker, shape of an input, options of `check`)
CHOICES: dict[str, tuple[Callable, tuple, dict]] = {}
DEAD: dict[str, tuple[Callable, tuple, dict]] = {}


# ---------------------------------------------------------------------------------- choices


@case(CHOICES)
@small({"w": (3, 4)}, {"h": 4})
def predicate_from_input_operator_before(m, x):
    y = matmul(x, m.w.value)
    m.h.value = lax.cond(x[0] > 0, lambda h: jnp.tanh(h + y), lambda h: 0.5 * h - y, m.h.value)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4)}, {"h": 4})
def predicate_from_state_operator_before(m, x):
    y, h = matmul(x, m.w.value), m.h.value
    m.h.value = lax.cond(h.sum() > 0, lambda h: 0.9 * jnp.sin(h) - 0.3 * y, lambda h: h + y, h)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4)}, {"h": 4})
def predicate_from_the_operator(m, x):
    y = matmul(x, m.w.value)
    m.h.value = lax.cond(y[1] > 0, lambda h, y: h * y, lambda h, y: h + y, 0.9 * m.h.value, y)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4)}, {"h": 4})
def operator_in_one_branch(m, x):
    y = lax.cond(x[0] > 0, lambda: matmul(x, m.w.value), lambda: jnp.full(4, 0.2))
    m.h.value = jnp.tanh(0.8 * m.h.value + y)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4)}, {"h": 4})
def operator_in_both_branches(m, x):
    sides = (lambda x: matmul(x, m.w.value), lambda x: jnp.sin(matmul(2 * x, m.w.value)))
    m.h.value = jnp.tanh(0.8 * m.h.value + lax.cond(m.h.value[0] > 0, *sides, x))
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4), "b": (3, 2), "a": (2, 4), "g": 4}, {"h": 4})
def different_operators_in_branches(m, x):
    sides = [
        lambda h: jnp.tanh(0.8 * h + matmul(x, m.w.value)),
        lambda h: 0.7 * h + bt.lora_matmul(x, m.b.value, m.a.value),
        lambda h: element_wise(m.g.value, sigmoid) * h,
    ]
    m.h.value = lax.switch((jnp.abs(x[0]) * 3).astype(int), sides, m.h.value)
    return m.h.value


@case(CHOICES, (4,))
@small({"w": (4, 4)}, {"h": 4})
def one_weight_by_two_operators(m, x):
    y = lax.cond(
        x[0] > 0, lambda: matmul(x, m.w.value), lambda: element_wise(m.w.value, jnp.sin)[0]
    )
    m.h.value = jnp.tanh(0.8 * m.h.value + y)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4})
def chosen_weight(m, x):
    w = lax.cond(jnp.asarray(True), lambda: m.w.value * 2, lambda: m.u.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
    return m.h.value


@case(CHOICES, exact=False, folds=False)  # a choice of weights by cond is not followed
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4})
def weight_chosen_by_the_input(m, x):
    w = lax.cond(x[0] > 0, lambda: m.w.value, lambda: m.u.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w) + matmul(x, m.w.value))
    return m.h.value


@case(CHOICES, exact=False)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4})
def recurrent_operator_in_a_branch(m, x):
    back = lambda h: matmul(h, m.r.value)
    y = matmul(x, m.w.value)
    m.h.value = jnp.tanh(0.5 * m.h.value + y + lax.cond(x[0] > 0, back, jnp.sin, m.h.value))
    return m.h.value


@case(CHOICES, exact=False)
@small({"w": (3, 4)}, {"h": 4})
def branch_that_mixes(m, x):
    h = 0.8 * m.h.value + matmul(x, m.w.value)
    m.h.value = lax.cond(x[0] > 0, lambda h: h / (1 + jnp.sum(h**2)), jnp.tanh, h)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4})
def nested_choices(m, x):
    def inner(h):
        y = lambda w: matmul(x, w.value)
        return lax.cond(h[0] > 0, lambda h: jnp.sin(h) + y(m.w), lambda h: h * y(m.u), h)

    m.h.value = 0.8 * lax.cond(x[0] > -0.5, inner, jnp.tanh, m.h.value)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4, "k": 4})
def brainstate_cond_writes_states(m, x):
    def left():
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))

    def right():
        m.k.value = 0.6 * m.k.value + m.h.value * matmul(x, m.u.value)

    bst.cond(x[0] > 0, left, right)
    return m.h.value + m.k.value


@case(CHOICES)
@small({"w": (3, 4)}, {"h": 4})
def brainstate_cond_on_a_state_writes_it(m, x):
    y = matmul(x, m.w.value)

    def fire():
        m.h.value = 0.1 * m.h.value - y
        return jnp.ones(())

    def rest():
        m.h.value = 0.9 * jnp.sin(m.h.value) + y
        return jnp.zeros(())

    return m.h.value * (1 + bst.cond(m.h.value.sum() > 0, fire, rest))


@case(CHOICES)
@small({"w": (3, 4), "g": 4}, {"h": 4})
def brainstate_ifelse(m, x):
    sides = [
        lambda: m.h.value * element_wise(m.g.value),
        lambda: jnp.tanh(m.h.value + matmul(x, m.w.value)),
        lambda: 0.5 * m.h.value - matmul(x, m.w.value),
    ]
    conditions = [x[0] > 0.5, (x[0] <= 0.5) & (x[0] > -0.3), x[0] <= -0.3]
    m.h.value = bst.ifelse(conditions, sides, check_cond=False)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4})
def brainstate_switch_writes_states(m, x):
    def write(value):
        m.h.value = value

    sides = [
        lambda: write(jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))),
        lambda: write(0.7 * m.h.value + matmul(x, m.u.value)),
        lambda: write(-m.h.value),
    ]
    bst.switch((jnp.abs(x[0]) * 3).astype(int), sides)
    return m.h.value


@case(CHOICES, (2, 3))
@small({"w": (3, 4), "b": 4}, {"h": (2, 4)})
def choice_of_a_batch(m, x):
    into = lambda: matmul(x, m.w.value, m.b.value)
    m.h.value = jnp.tanh(0.8 * m.h.value + lax.cond(x[0, 0] > 0, into, lambda: 0 * m.h.value))
    return m.h.value


@case(CHOICES, (2, 3))
@small({"w": (3, 4), "u": (3, 4)}, {"h": (2, 4)})
def choice_under_vmap(m, x):
    def one(h, x):
        sides = (lambda h: h + matmul(x, m.w.value), lambda h: h * matmul(x, m.u.value))
        return jnp.tanh(lax.cond(x[0] > 0, *sides, 0.8 * h))

    m.h.value = jax.vmap(one)(m.h.value, x)
    return m.h.value


@case(CHOICES)
@small({"w": (3, 4), "o": (4, 2)}, {"h": 4})
def readout_in_a_branch(m, x):
    m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
    out = lambda h: matmul(h, m.o.value)
    return lax.cond(x[0] > 0, out, lambda h: h[:2] ** 2, m.h.value)


@case(CHOICES)
@small({"w": (3, 4)}, {"h": 4})
def choice_under_checkpoint(m, x):
    def step(h, w):
        return lax.cond(x[0] > 0, lambda h: jnp.tanh(h + matmul(x, w)), lambda h: 0.5 * h, h)

    m.h.value = jax.jit(step)(m.h.value, m.w.value)
    return m.h.value


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name):
    model, xs, options = made(CHOICES, name)
    check(model, xs, rules=2, **options)


@pytest.mark.parametrize(
    "name", ["different_operators_in_branches", "recurrent_operator_in_a_branch", "nested_choices"]
)
def test_choice_with_crossings(name):
    model, xs, _ = made(CHOICES, name)
    check_crossing(model, xs)


# ------------------------------------------------------ branches that go wrong and are not taken


def dead(name: str, wrong: Callable):
    """Models in which `wrong(h)` is NaN or infinite, or its derivative is, and never taken."""

    @case(DEAD, (3,))
    def on_the_state(draw):
        @net({"w": draw(3, 4)}, {"h": draw(4)})
        def model(m, x):
            h = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
            m.h.value = lax.cond(jnp.abs(x).sum() > 100, wrong, lambda h: 0.9 * h, h)
            return m.h.value

        return model

    @case(DEAD, (3,))
    def around_an_operator(draw):
        @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
        def model(m, x):
            bad = lambda h: wrong(h * 0) * matmul(wrong(x * 0), m.w.value) + matmul(x, m.u.value)
            good = lambda h: h + matmul(x, m.w.value)
            m.h.value = jnp.tanh(0.8 * lax.cond(h_is_huge(m.h.value), bad, good, m.h.value))
            return m.h.value

        return model

    for make in (on_the_state, around_an_operator):
        DEAD[f"{name} {make.__name__}"] = DEAD.pop(make.__name__)


def h_is_huge(h):
    return jnp.abs(h).max() > 100


dead("sqrt", lambda h: jnp.sqrt(h - 100))
dead("sqrt at zero", lambda h: jnp.sqrt(h * 0))
dead("log", lambda h: jnp.log(h * 0))
dead("division", lambda h: h / jnp.sum(h * 0))


@pytest.mark.parametrize("name", DEAD)
def test_dead_branch(name):
    model, xs, _ = made(DEAD, name)
    check(model, xs, rules=tuple(RULES) if "sqrt at" in name else 2)


@pytest.mark.parametrize("name", ["sqrt on_the_state", "log around_an_operator"])
def test_dead_branch_with_crossings(name):
    model, xs, _ = made(DEAD, name)
    check_crossing(model, xs)


def test_dead_branch_inside_a_loop(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def turn(i, h):
            bad = lambda h: jnp.log(h * 0) * matmul(x, m.w.value)
            return lax.cond(i < 0, bad, lambda h: 0.9 * h + 0.2 * matmul(x, m.w.value), h)

        m.h.value = jnp.tanh(lax.fori_loop(0, 3, turn, m.h.value))
        return m.h.value

    check(model, draw(T, 3))
