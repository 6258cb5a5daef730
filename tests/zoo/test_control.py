"""Choices and loops inside `update`: an operator around, before, after and in their bodies."""

from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import transform as bst
from jax import lax

import braintrace as bt
from braintrace.verify import bptt_grad
from braintrace.verify._compare import comparison, online_grad
from oracle import dense, rule_on
from thinned import some

from .zoo import (
    QUICK,
    RULES,
    TIGHT,
    Draw,
    T,
    check,
    element_wise,
    matmul,
    net,
    sigmoid,
    squares,
    targets,
)

KINDS = {"d_rtrl": bt.D_RTRL, "pp_prop": bt.pp_prop, "snap": bt.SnAp, "rtrl": bt.RTRL}
OPTIONS = {name: {"decay_or_rank": 0.9} if name == "pp_prop" else {} for name in KINDS}

# name: (maker, shape of an input, options of `check`)
CHOICES: dict[str, tuple[Callable, tuple, dict]] = {}
DEAD: dict[str, tuple[Callable, tuple, dict]] = {}
LOOPS: dict[str, tuple[Callable, tuple, dict]] = {}
WHILES: dict[str, tuple[Callable, tuple, dict]] = {}


def case(registry: dict, shape: tuple[int, ...] = (3,), **options):
    """Register a maker of a model: `maker(draw)`, fed with T random inputs of a shape."""

    def register(make: Callable) -> Callable:
        registry[make.__name__] = (make, shape, options)
        return make

    return register


def made(registry: dict, name: str):
    make, shape, options = registry[name]
    draw = Draw(name)
    return make(draw), inputs(draw, *shape), options


def inputs(draw, *shape):
    """T inputs whose first number changes sign at every step and from sample to sample."""
    x = draw(T, *shape, scale=1.0)
    sign = (-1.0) ** np.indices(x.shape[:-1]).sum(0)
    return x.at[..., 0].set(sign * jnp.abs(x[..., 0]))


def assert_equal(found, truth, tolerance=TIGHT):
    result = comparison(found, truth)
    assert result.max_error <= tolerance, f"\n{result}"


def learner_of(kind, model, x0, **options):
    learner = kind(model, **options)
    learner.compile_graph(x0)
    return learner


def jitted(fun, *args):
    """A gradient as one program that is compiled fast."""
    return bst.jit(fun, compiler_options=QUICK)(*args)


def gradients(model, x_seq, *learners, step_fn=squares):
    """Summed gradients of single-step learners, then BPTT's."""
    sequences = (x_seq, targets(model, x_seq[0]))

    def run(sequences):
        found = [online_grad(learner, step_fn, *sequences) for learner in learners]
        return [*found, bptt_grad(model, step_fn, *sequences)]

    return jitted(run, sequences)


def check_crossing(model, x_seq):
    """SnAp is its definition, RTRL is BPTT."""
    snaps = [learner_of(bt.SnAp, model, x_seq[0], n=n) for n in (1, 2)]
    *found, rtrl, bptt = gradients(model, x_seq, *snaps, learner_of(bt.RTRL, model, x_seq[0]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found, rtrl, bptt)))
    assert_equal(rtrl, bptt)
    seen = dense(model, squares, x_seq, targets(model, x_seq[0]))
    for n, grads in enumerate(found, 1):
        assert_equal(grads, rule_on(seen, "snap", n=n))


# ---------------------------------------------------------------------------------- choices


@case(CHOICES)
def predicate_from_input_operator_before(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = lax.cond(x[0] > 0, lambda h: jnp.tanh(h + y), lambda h: 0.5 * h - y, m.h.value)
        return m.h.value

    return model


@case(CHOICES)
def predicate_from_state_operator_before(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y, h = matmul(x, m.w.value), m.h.value
        m.h.value = lax.cond(h.sum() > 0, lambda h: 0.9 * jnp.sin(h) - 0.3 * y, lambda h: h + y, h)
        return m.h.value

    return model


@case(CHOICES)
def predicate_from_the_operator(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = lax.cond(y[1] > 0, lambda h, y: h * y, lambda h, y: h + y, 0.9 * m.h.value, y)
        return m.h.value

    return model


@case(CHOICES)
def operator_in_one_branch(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = lax.cond(x[0] > 0, lambda: matmul(x, m.w.value), lambda: jnp.full(4, 0.2))
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    return model


@case(CHOICES)
def operator_in_both_branches(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        sides = (lambda x: matmul(x, m.w.value), lambda x: jnp.sin(matmul(2 * x, m.w.value)))
        m.h.value = jnp.tanh(0.8 * m.h.value + lax.cond(m.h.value[0] > 0, *sides, x))
        return m.h.value

    return model


@case(CHOICES)
def different_operators_in_branches(draw):
    @net({"w": draw(3, 4), "b": draw(3, 2), "a": draw(2, 4), "g": draw(4)}, {"h": draw(4)})
    def model(m, x):
        sides = [
            lambda h: jnp.tanh(0.8 * h + matmul(x, m.w.value)),
            lambda h: 0.7 * h + bt.lora_matmul(x, m.b.value, m.a.value),
            lambda h: element_wise(m.g.value, sigmoid) * h,
        ]
        m.h.value = lax.switch((jnp.abs(x[0]) * 3).astype(int), sides, m.h.value)
        return m.h.value

    return model


@case(CHOICES, (4,))
def one_weight_by_two_operators(draw):
    @net({"w": draw(4, 4)}, {"h": draw(4)})
    def model(m, x):
        y = lax.cond(
            x[0] > 0, lambda: matmul(x, m.w.value), lambda: element_wise(m.w.value, jnp.sin)[0]
        )
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    return model


@case(CHOICES)
def chosen_weight(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        w = lax.cond(jnp.asarray(True), lambda: m.w.value * 2, lambda: m.u.value)
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w))
        return m.h.value

    return model


@case(CHOICES, exact=False)
def weight_chosen_by_the_input(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        w = lax.cond(x[0] > 0, lambda: m.w.value, lambda: m.u.value)
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, w) + matmul(x, m.w.value))
        return m.h.value

    return model


@case(CHOICES, exact=False)
def recurrent_operator_in_a_branch(draw):
    @net({"w": draw(3, 4), "r": draw(4, 4)}, {"h": draw(4)})
    def model(m, x):
        back = lambda h: matmul(h, m.r.value)
        y = matmul(x, m.w.value)
        m.h.value = jnp.tanh(0.5 * m.h.value + y + lax.cond(x[0] > 0, back, jnp.sin, m.h.value))
        return m.h.value

    return model


@case(CHOICES, exact=False)
def branch_that_mixes(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        h = 0.8 * m.h.value + matmul(x, m.w.value)
        m.h.value = lax.cond(x[0] > 0, lambda h: h / (1 + jnp.sum(h**2)), jnp.tanh, h)
        return m.h.value

    return model


@case(CHOICES)
def nested_choices(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def inner(h):
            y = lambda w: matmul(x, w.value)
            return lax.cond(h[0] > 0, lambda h: jnp.sin(h) + y(m.w), lambda h: h * y(m.u), h)

        m.h.value = 0.8 * lax.cond(x[0] > -0.5, inner, jnp.tanh, m.h.value)
        return m.h.value

    return model


@case(CHOICES)
def brainstate_cond_writes_states(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4), "k": draw(4)})
    def model(m, x):
        def left():
            m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))

        def right():
            m.k.value = 0.6 * m.k.value + m.h.value * matmul(x, m.u.value)

        bst.cond(x[0] > 0, left, right)
        return m.h.value + m.k.value

    return model


@case(CHOICES)
def brainstate_cond_on_a_state_writes_it(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)

        def fire():
            m.h.value = 0.1 * m.h.value - y
            return jnp.ones(())

        def rest():
            m.h.value = 0.9 * jnp.sin(m.h.value) + y
            return jnp.zeros(())

        return m.h.value * (1 + bst.cond(m.h.value.sum() > 0, fire, rest))

    return model


@case(CHOICES)
def brainstate_ifelse(draw):
    @net({"w": draw(3, 4), "g": draw(4)}, {"h": draw(4)})
    def model(m, x):
        sides = [
            lambda: m.h.value * element_wise(m.g.value),
            lambda: jnp.tanh(m.h.value + matmul(x, m.w.value)),
            lambda: 0.5 * m.h.value - matmul(x, m.w.value),
        ]
        conditions = [x[0] > 0.5, (x[0] <= 0.5) & (x[0] > -0.3), x[0] <= -0.3]
        m.h.value = bst.ifelse(conditions, sides, check_cond=False)
        return m.h.value

    return model


@case(CHOICES)
def brainstate_switch_writes_states(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def write(value):
            m.h.value = value

        sides = [
            lambda: write(jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))),
            lambda: write(0.7 * m.h.value + matmul(x, m.u.value)),
            lambda: write(-m.h.value),
        ]
        bst.switch((jnp.abs(x[0]) * 3).astype(int), sides)
        return m.h.value

    return model


@case(CHOICES, (2, 3))
def choice_of_a_batch(draw):
    @net({"w": draw(3, 4), "b": draw(4)}, {"h": draw(2, 4)})
    def model(m, x):
        into = lambda: matmul(x, m.w.value, m.b.value)
        m.h.value = jnp.tanh(0.8 * m.h.value + lax.cond(x[0, 0] > 0, into, lambda: 0 * m.h.value))
        return m.h.value

    return model


@case(CHOICES, (2, 3))
def choice_under_vmap(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        def one(h, x):
            sides = (lambda h: h + matmul(x, m.w.value), lambda h: h * matmul(x, m.u.value))
            return jnp.tanh(lax.cond(x[0] > 0, *sides, 0.8 * h))

        m.h.value = jax.vmap(one)(m.h.value, x)
        return m.h.value

    return model


@case(CHOICES)
def readout_in_a_branch(draw):
    @net({"w": draw(3, 4), "o": draw(4, 2)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        out = lambda h: matmul(h, m.o.value)
        return lax.cond(x[0] > 0, out, lambda h: h[:2] ** 2, m.h.value)

    return model


@case(CHOICES)
def choice_under_checkpoint(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        @jax.checkpoint
        def step(h, w):
            return lax.cond(x[0] > 0, lambda h: jnp.tanh(h + matmul(x, w)), lambda h: 0.5 * h, h)

        m.h.value = jax.jit(step)(m.h.value, m.w.value)
        return m.h.value

    return model


@pytest.mark.parametrize("name", some(CHOICES, 3))
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


# ------------------------------------------------------------------------------------- loops


@case(LOOPS)
def operator_outside(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = lax.fori_loop(0, 2, lambda i, h: h + 0.2 * (y - jnp.tanh(h)), m.h.value)
        return m.h.value

    return model


@case(LOOPS)
def operator_inside(draw):
    @net({"w": draw(3, 4), "b": draw(4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, _: (jnp.sin(0.9 * h + 0.3 * matmul(x, m.w.value, m.b.value)), None)
        m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
        return m.h.value

    return model


@case(LOOPS, (2, 3))
def operator_on_what_a_turn_brings(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, v: (jnp.tanh(0.8 * h + matmul(v, m.w.value)), jnp.sin(h))
        m.h.value, path = lax.scan(turn, m.h.value, x)
        return path.sum(0) + m.h.value

    return model


@case(LOOPS, exact=False)
def recurrent_operator_inside(draw):
    @net({"w": draw(3, 4), "r": draw(4, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        turn = lambda h, _: (0.7 * h + 0.3 * jnp.tanh(y + matmul(h, m.r.value)), None)
        m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
        return m.h.value

    return model


@case(LOOPS, exact=False)
def recurrent_and_driving_operator_inside(draw):
    @net({"w": draw(3, 4), "r": draw(4, 4)}, {"h": draw(4)})
    def model(m, x):
        def turn(i, h):
            return jnp.tanh(0.6 * h + 0.5 * matmul(x, m.w.value) + 0.3 * matmul(h, m.r.value))

        m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
        return m.h.value

    return model


@case(LOOPS, (2, 3))
def weights_as_slices(draw):
    @net({"w": draw(2, 3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, vw: (jnp.tanh(0.8 * h + matmul(*vw)), None)
        m.h.value = lax.scan(turn, m.h.value, (x, m.w.value))[0]
        return m.h.value

    return model


@case(LOOPS, (2, 3), exact=False)
def weights_as_slices_and_as_a_whole(draw):
    @net({"w": draw(2, 3, 4)}, {"h": draw(4)})
    def model(m, x):
        def turn(h, vw):
            return jnp.tanh(0.8 * h + matmul(*vw) + matmul(vw[0], m.w.value.sum(0)) * h.mean()), h

        m.h.value, path = lax.scan(turn, m.h.value, (x, m.w.value))
        return m.h.value + path[1]

    return model


@case(LOOPS, (2, 3))
def operator_outputs_as_slices(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, y: (jnp.tanh(0.8 * h + y), h * y)
        m.h.value, path = lax.scan(turn, m.h.value, matmul(x, m.w.value))
        return m.h.value + path[0]

    return model


@case(LOOPS, (3, 3))
def reverse_scan(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, v: (jnp.tanh(0.8 * h + matmul(v, m.w.value)), h)
        m.h.value, path = lax.scan(turn, m.h.value, x, reverse=True)
        return path[0] * path[2]

    return model


@case(LOOPS, (3, 3))
def reverse_scan_of_weights(draw):
    @net({"w": draw(3, 3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, vw: (0.8 * jnp.sin(h) + matmul(*vw), h)
        m.h.value, path = lax.scan(turn, m.h.value, (x, m.w.value), reverse=True)
        return path[0] + m.h.value

    return model


@case(LOOPS, (2, 3))
def nested_scans(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def outer(h, v):
            inner = lambda h, _: (0.9 * h + 0.2 * matmul(v, m.w.value), None)
            h = lax.scan(inner, h, None, 2)[0]
            return jnp.tanh(h + matmul(v, m.u.value)), None

        m.h.value = lax.scan(outer, m.h.value, x)[0]
        return m.h.value

    return model


@case(LOOPS)
def nested_scans_weights_of_both(draw):
    @net({"w": draw(2, 3, 4)}, {"h": draw(4)})
    def model(m, x):
        def outer(h, w):
            inner = lambda h, _: (jnp.sin(0.9 * h + 0.2 * matmul(x, w)), None)
            return lax.scan(inner, h, None, 2)[0], None

        m.h.value = lax.scan(outer, m.h.value, m.w.value)[0]
        return m.h.value

    return model


@case(LOOPS)
def choice_inside_a_loop(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def turn(i, h):
            even = lambda h: 0.9 * h + 0.2 * matmul(x, m.w.value)
            odd = lambda h: jnp.sin(h) * matmul(x, m.u.value)
            return lax.cond((i % 2 == 0) | (h[0] > 0), even, odd, h)

        m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
        return m.h.value

    return model


@case(LOOPS)
def loop_inside_a_choice(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda i, h: jnp.sin(0.9 * h + 0.2 * matmul(x, m.w.value))
        many = lambda h: lax.fori_loop(0, 2, turn, h)
        m.h.value = lax.cond(x[0] > 0, many, lambda h: 0.5 * h, m.h.value)
        return m.h.value

    return model


@case(LOOPS, (2, 3))
def lax_map(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        y = lax.map(lambda v: jnp.sin(matmul(v, m.w.value)), x)
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    return model


@case(LOOPS, (4, 3))
def lax_map_in_batches(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4, 4)})
    def model(m, x):
        one = lambda hv: jnp.tanh(0.8 * hv[0] + matmul(hv[1], m.w.value))
        m.h.value = lax.map(one, (m.h.value, x), batch_size=2)
        return m.h.value

    return model


@case(LOOPS)
def two_operators_in_one_body(draw):
    @net({"w": draw(3, 4), "g": draw(4)}, {"h": draw(4), "v": draw(4)})
    def model(m, x):
        def turn(carry, gain):
            h, v = carry
            v = v - 0.1 * h + 0.2 * gain * matmul(x, m.w.value)
            return (h + 0.2 * element_wise(m.g.value, jnp.tanh) * v, v), v

        (m.h.value, m.v.value), path = lax.scan(turn, (m.h.value, m.v.value), jnp.arange(3.0))
        return m.h.value + path[1]

    return model


@case(LOOPS, (2, 3))
def bias_that_varies(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, v: (jnp.tanh(0.8 * h + matmul(v, m.w.value, v[:1] * jnp.ones(4))), None)
        m.h.value = lax.scan(turn, m.h.value, x)[0]
        return m.h.value

    return model


@case(LOOPS, exact=False)
def bias_that_follows_the_state(draw):
    @net({"w": draw(3, 4), "b": draw(4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda i, h: jnp.tanh(0.8 * h + matmul(x, m.w.value, m.b.value * h))
        m.h.value = lax.fori_loop(0, 2, turn, m.h.value) + matmul(x, m.w.value)
        return m.h.value

    return model


@case(LOOPS)
def weight_transforms_inside(draw):
    mask = jnp.asarray(np.random.default_rng(0).random((3, 4)) < 0.6)

    @net({"w": draw(3, 4), "u": draw(4, 3)}, {"h": draw(4)})
    def model(m, x):
        def turn(h, _):
            y = matmul(x, m.w.value * mask) + jnp.sin(matmul(x, jnp.tanh(m.u.value).T))
            return jnp.tanh(0.8 * h + 0.3 * y), None

        m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
        return m.h.value

    return model


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


@case(LOOPS)
def weight_scaled_by_a_slice(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, g: (jnp.sin(0.9 * h + 0.1 * matmul(x, m.w.value * g)), None)
        m.h.value = lax.scan(turn, m.h.value, jnp.arange(1.0, 4.0))[0]
        return m.h.value

    return model


@case(LOOPS, exact=False)
def layer_norm_inside(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def turn(h, _):
            y = h + 0.5 * matmul(x, m.w.value)
            return 0.5 * h + (y - y.mean()) / jnp.sqrt(y.var() + 0.5), None

        m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
        return m.h.value

    return model


@case(LOOPS, exact=False)
def layer_norm_inside_operator_outside(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        turn = lambda i, h: 0.7 * h + 0.3 * y / (1 + jnp.sum((h + y) ** 2))
        m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
        return m.h.value

    return model


@case(LOOPS, (4,))
def layers_by_scan(draw):
    @net({"w": draw(2, 4, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        def layer(_, of):
            w, h = of
            return _, jnp.tanh(0.8 * h + matmul(x, w))

        m.h.value = lax.scan(layer, 0, (m.w.value, m.h.value))[1]
        return m.h.value

    return model


@case(LOOPS, (4,), exact=False)
def layers_by_scan_that_feed_each_other(draw):
    @net({"w": draw(2, 4, 4), "b": draw(2, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        def layer(below, of):
            w, b, h = of
            h = jnp.tanh(0.8 * h + matmul(below, w, b))
            return h, h

        top, m.h.value = lax.scan(layer, x, (m.w.value, m.b.value, m.h.value))
        return top

    return model


@case(LOOPS, (4,), exact=False)
def recurrent_layers_by_scan(draw):
    @net({"w": draw(2, 4, 4), "r": draw(2, 4, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        def layer(below, of):
            w, r, h = of
            h = jnp.tanh(0.5 * h + matmul(below, w) + matmul(h, r))
            return h, h

        top, m.h.value = lax.scan(layer, x, (m.w.value, m.r.value, m.h.value))
        return top

    return model


@case(LOOPS, (2, 3))
def brainstate_scan(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4), "k": draw(4)})
    def model(m, x):
        def turn(c, v):
            m.h.value = jnp.tanh(0.8 * m.h.value + matmul(v, m.w.value))
            return 0.5 * c + m.h.value, m.h.value

        m.k.value, path = bst.scan(turn, m.k.value, x)
        return m.k.value + path[0]

    return model


@case(LOOPS, (3, 3))
def brainstate_for_loop(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def turn(v):
            m.h.value = jnp.tanh(0.8 * m.h.value + matmul(v, m.w.value))
            return m.h.value

        return bst.for_loop(turn, x).sum(0)

    return model


@case(LOOPS, (2, 3))
def brainstate_cond_in_for_loop(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        def write(v):
            m.h.value = jnp.tanh(0.8 * m.h.value + matmul(v, m.w.value))

        bst.for_loop(lambda v: bst.cond(v[0] > 0, write, lambda v: None, v), x)
        return m.h.value

    return model


@case(LOOPS)
def operator_before_and_after(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        h = m.h.value + matmul(x, m.w.value)
        h = lax.fori_loop(0, 2, lambda i, h: 0.9 * h - 0.1 * jnp.sin(i + h), h)
        m.h.value = jnp.tanh(0.8 * h + matmul(x**2, m.u.value))
        return m.h.value

    return model


@case(LOOPS, (2, 3))
def loop_on_a_batch(draw):
    @net({"w": draw(3, 4), "b": draw(4)}, {"h": draw(2, 4)})
    def model(m, x):
        turn = lambda i, h: jnp.sin(0.9 * h + 0.3 * matmul(x, m.w.value, m.b.value))
        m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
        return m.h.value

    return model


@case(LOOPS, (2, 3))
def loop_under_vmap(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        def one(h, v):
            turn = lambda h, _: (jnp.sin(0.9 * h + 0.3 * matmul(v, m.w.value)), None)
            return lax.scan(turn, h, None, 2)[0]

        m.h.value = jax.vmap(one)(m.h.value, x)
        return m.h.value

    return model


@case(LOOPS)
def delay_line_by_scan(draw):
    @net({"w": draw(3, 4)}, {"line": draw(3, 4)})
    def model(m, x):
        shift = lambda above, own: (own, above)
        out, m.line.value = lax.scan(shift, matmul(x, m.w.value), m.line.value)
        return jnp.sin(out)

    return model


@case(LOOPS)
def outputs_in_the_loss_only(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = 0.9 * m.h.value + matmul(x, m.w.value)
        return lax.scan(lambda c, _: (jnp.sin(c), c * m.h.value), m.h.value, None, 2)[1]

    return model


@case(LOOPS)
def no_turns_and_one_turn(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, _: (jnp.tanh(0.8 * h + matmul(x, m.w.value)), None)
        h = lax.scan(turn, m.h.value, None, 0)[0]
        m.h.value = lax.scan(turn, h, None, 1)[0]
        return m.h.value

    return model


@case(LOOPS)
def unrolled_scan(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, g: (jnp.tanh(0.8 * h + g * matmul(x, m.w.value)), h)
        m.h.value, path = lax.scan(turn, m.h.value, jnp.arange(1.0, 4.0), unroll=2)
        return m.h.value + path[-1]

    return model


@pytest.mark.parametrize("name", some(LOOPS, 3))
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


@pytest.mark.parametrize("turns", some([2, 40, 5, 500], 2))
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
    assert_equal(jitted(lambda s: online_grad(windows, squares, *s, chunk_size=2), sequences), bptt)


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


# ------------------------------------------------------------------------------ while loops


def relax(h, y, tolerance=0.3):
    """Adaptive relaxation of h towards y, each unit by itself; the number of turns is decided
    by all of them."""
    return lax.while_loop(
        lambda c: (jnp.abs(c[1] - jnp.tanh(y)).max() > tolerance) & (c[0] < 20),
        lambda c: (c[0] + 1, c[1] + 0.3 * (jnp.tanh(y) - c[1])),
        (0, h),
    )[1]


def relax_masked(h, y, tolerance=0.3):
    """The same with a fixed number of turns."""

    def turn(i, h):
        more = jnp.abs(h - jnp.tanh(y)).max() > tolerance
        return jnp.where(more, h + 0.3 * (jnp.tanh(y) - h), h)

    return lax.fori_loop(0, 20, turn, h)


@case(WHILES)
def after_an_operator(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = m.solver(m.h.value, matmul(x, m.w.value))
        return m.h.value

    return model


@case(WHILES)
def before_an_operator(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = 0.9 * m.solver(m.h.value, x[:1] * jnp.ones(4)) + matmul(x, m.w.value)
        return m.h.value

    return model


@case(WHILES)
def part_of_an_expression(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = jnp.sin(0.5 * m.h.value * m.solver(m.h.value, y) + y)
        return m.h.value

    return model


@case(WHILES)
def in_the_output_only(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        m.h.value = 0.9 * m.h.value + matmul(x, m.w.value)
        return m.solver(m.h.value, x[0]) * m.h.value

    return model


@case(WHILES)
def inside_a_choice(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = lax.cond(x[0] > 0, lambda h: m.solver(h, y), lambda h: h + 0.3 * y, m.h.value)
        return m.h.value

    return model


@case(WHILES)
def inside_a_loop_with_an_operator(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        turn = lambda h, _: (m.solver(h, matmul(x, m.w.value)) * 0.9, None)
        m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
        return m.h.value

    return model


@case(WHILES, exact=False)
def beside_a_recurrent_operator(draw):
    @net({"w": draw(3, 4), "r": draw(4, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value) + matmul(m.h.value, m.r.value)
        m.h.value = 0.5 * m.h.value + m.solver(m.h.value, y)
        return m.h.value

    return model


@pytest.mark.parametrize("name", some(WHILES, 3))
def test_while_of_pure_dynamics(name):
    model, xs, options = made(WHILES, name)
    model.solver = relax_masked
    truth, bptt = gradients(model, xs, learner_of(bt.D_RTRL, model, xs[0]))
    model.solver = relax
    rules = ("d_rtrl", *list(RULES)[1 + list(WHILES).index(name) % 4 :][:1])
    found = check(model, xs, rules=rules, **options)
    assert_equal(found["d_rtrl"], truth)
    if options.get("exact", True):
        assert_equal(found["d_rtrl"], bptt)


def test_while_with_crossings():
    model, xs, _ = made(WHILES, "beside_a_recurrent_operator")
    model.solver = relax
    check_crossing(model, xs)


def test_number_of_turns_from_the_state_alone(draw):
    @net({"w": draw(3, 4)}, {"h": 3 + jnp.abs(draw(4))})
    def model(m, x):
        small = lax.while_loop(
            lambda h: jnp.abs(h).sum() > 2, lambda h: 0.7 * jnp.sin(h), m.h.value
        )
        m.h.value = small + jnp.exp(matmul(x, m.w.value))
        return m.h.value

    check(model, draw(T, 3))


def test_number_of_turns_from_the_input(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        turn = lambda c: (c[0] - 0.5, jnp.sin(c[1]) + 0.2 * y)
        m.h.value = lax.while_loop(lambda c: c[0] > 0, turn, (jnp.abs(x[0]), m.h.value))[1]
        return m.h.value

    check(model, draw(T, 3), rules=4)


def test_coupled_states_in_a_while(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"v": draw(4), "a": draw(4)})
    def model(m, x):
        y, z = matmul(x, m.w.value), matmul(x, m.u.value)

        def turn(c):
            t, v, a = c
            return t + 1, v + 0.2 * (y - a - v**3), a + 0.1 * (v + z - a)

        go = lambda c: (c[0] < 5) & (jnp.abs(c[1] - c[2]).max() > 0.1)
        _, m.v.value, m.a.value = lax.while_loop(go, turn, (0, m.v.value, m.a.value))
        return m.v.value * m.a.value

    check(model, draw(T, 3), rules=4)


def mixing(draw, loop):
    mix = draw(4, 4, scale=0.3)

    def scaled(h, y):
        return 0.8 * h + 0.2 * y / (1 + jnp.sum(h**2))

    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4), "k": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = loop(lambda h: scaled(h, y), m.h.value) + y
        swept = loop(lambda k: jnp.tanh(k @ mix) + 0.3 * k, m.k.value)
        m.k.value = 0.5 * m.k.value + swept + matmul(x, m.u.value)
        return m.h.value * m.k.value

    return model


def by_while_loop(turn, h):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, turn(c[1])), (0, h))[1]


def by_fori_loop(turn, h):
    return lax.fori_loop(0, 3, lambda i, h: turn(h), h)


@pytest.mark.parametrize("rules", [("d_rtrl", "d_rtrl, one window"), ("pp_prop",)])
def test_while_that_mixes_units_is_the_loop_that_does(rules):
    xs = inputs(Draw("mixes"), 3)
    truth = check(mixing(Draw("mixing"), by_fori_loop), xs, exact=False, rules=rules)
    model = mixing(Draw("mixing"), by_while_loop)
    for name in rules:
        kind, decay, window = RULES[name]
        options = {} if window is None else {"vjp_method": "multi-step"}
        options |= {"decay_or_rank": decay} if decay else {}
        learner = learner_of(kind, model, xs[0], **options)
        sequences = (xs, targets(model, xs[0]))
        run = lambda s, learner=learner, window=window: online_grad(
            learner, squares, *s, chunk_size=window
        )
        assert_equal(jitted(run, sequences), truth[name])


def test_while_that_mixes_units_with_crossings():
    check_crossing(mixing(Draw("mixing"), by_while_loop), inputs(Draw("mixes"), 3))


def test_reverse_mode_of_a_while_too_wide_to_follow_is_refused(monkeypatch):
    from braintrace.graph import _influence

    monkeypatch.setattr(_influence, "MOST_SOURCES", 8)
    model, x = mixing(Draw("mixing"), by_while_loop), inputs(Draw("mixes"), 3)[0]
    learner = learner_of(bt.D_RTRL, model, x, vjp_method="multi-step")
    loss = lambda: jnp.sum(learner(x) ** 2)
    with pytest.raises(bt.NotSupportedError, match="reverse derivative of a while_loop") as error:
        brainstate.transform.grad(loss, learner.param_states)()
    assert all(part in str(error.value) for part in ("test_control.py:", "why:", "do:"))


def test_while_of_a_complex_state(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4) + 1j * draw(4)})
    def model(m, x):
        turn = lambda c: (c[0] + 1, (0.9 + 0.2j) * c[1] * jnp.exp(0.1j * c[1].real))
        turned = lax.while_loop(lambda c: c[0] < 2 + (x[0] > 0), turn, (0, m.h.value))[1]
        m.h.value = turned + matmul(x, m.w.value)
        return m.h.value.real * m.h.value.imag

    check(model, draw(T, 3))


def test_while_on_a_batch(draw):
    @net({"w": draw(3, 4)}, {"h": draw(2, 4)})
    def model(m, x):
        m.h.value = jax.vmap(relax)(m.h.value, matmul(x, m.w.value))
        return m.h.value

    check(model, draw(T, 2, 3))


def test_while_of_integers_beside_the_states(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        n = lax.while_loop(lambda n: n * n < 10 * jnp.abs(x[0]), lambda n: n + 1, 0)
        m.h.value = jnp.tanh(0.2 * n * m.h.value + matmul(x, m.w.value))
        return m.h.value

    check(model, draw(T, 3), rules=2)


def test_dynamic_fori_loop_is_a_while(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        n = 1 + (jnp.abs(x[0]) * 3).astype(int)
        m.h.value = lax.fori_loop(0, n, lambda i, h: 0.9 * jnp.sin(h) + 0.2 * y, m.h.value)
        return m.h.value

    check(model, draw(T, 3))


def test_brainstate_while_loop_writes_states(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)

        def turn(n):
            m.h.value = 0.9 * jnp.sin(m.h.value) + 0.2 * y
            return n + 1

        bst.while_loop(lambda n: n < 2 + (x[0] > 0), turn, 0)
        return m.h.value

    check(model, draw(T, 3))


def looping(m, x):
    turn = lambda c: (c[0] + 1, 0.9 * c[1] + matmul(x, m.w.value))
    m.h.value = lax.while_loop(lambda c: c[0] < 3, turn, (0, m.h.value))[1]
    return m.h.value


def looping_in_a_scan(m, x):
    go = lambda h: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.9 * c[1] + matmul(x, m.w.value)), (0, h)
    )[1]
    m.h.value = lax.scan(lambda h, _: (go(h), None), m.h.value, None, 2)[0]
    return m.h.value


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "snap"])
@pytest.mark.parametrize("update", [looping, looping_in_a_scan])
def test_operator_inside_a_while_is_refused(update, rule, draw):
    model = net({"w": draw(3, 4)}, {"h": draw(4)})(update)
    with pytest.raises(bt.NotSupportedError, match="inside a while_loop") as error:
        learner_of(KINDS[rule], model, jnp.ones(3), **OPTIONS[rule])
    text = str(error.value)
    first = update.__code__.co_firstlineno
    place = int(text.split("test_control.py:")[1].split()[0])
    assert first < place <= first + 3, text
    for part in ("where:", "why:", "do:", "lax.scan or fori_loop"):
        assert part in text, text


# ------------------------------------------------------------------- under other transformations


class Cell(brainstate.nn.Module):
    """A model whose states are made by `init_state`, so that they can be mapped."""

    def __init__(self, draw, update):
        super().__init__()
        self.w, self.r = brainstate.ParamState(draw(3, 4)), brainstate.ParamState(draw(4, 4))
        self.start, self.step = draw(4), update

    def init_state(self, batch_size=None, **kwargs):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.broadcast_to(self.start, (*lead, 4)))

    def update(self, x):
        self.h.value = self.step(self, self.h.value, x)
        return self.h.value


def by_choice(m, h, x):
    sides = (lambda h: jnp.tanh(h + matmul(x, m.w.value)), lambda h: 0.5 * h + matmul(h, m.r.value))
    return lax.cond(x[0] > 0, *sides, h)


def by_scan(m, h, x):
    turn = lambda h, g: (0.6 * h + g * matmul(x, m.w.value) + 0.2 * matmul(h, m.r.value), None)
    return jnp.tanh(lax.scan(turn, h, jnp.arange(1.0, 4.0))[0])


def by_while(m, h, x):
    return 0.6 * relax(h, matmul(x, m.w.value)) + 0.4 * matmul(h, m.r.value)


def by_all(m, h, x):
    turn = lambda h, _: (lax.cond(x[0] > 0, lambda h: relax(h, x[1]), by_choice_of(m, x), h), None)
    return lax.scan(turn, h, None, 2)[0] + 0.1 * matmul(h, m.r.value)


def by_choice_of(m, x):
    return lambda h: 0.8 * h + matmul(x, m.w.value)


UPDATES = [by_choice, by_scan, by_while, by_all]


@pytest.mark.parametrize("update", some(UPDATES, 2))
def test_jit_inside_and_outside(update, draw):
    cell = Cell(draw, lambda m, h, x: jax.jit(lambda h: update(m, h, x))(h))
    cell.init_state()
    learner = learner_of(bt.D_RTRL, cell, jnp.ones(3))
    loss = lambda x: jnp.sum(learner(x) ** 2)
    step = bst.grad(loss, learner.param_states)
    xs = draw(3, 3)
    eager = [step(x) for x in xs]
    cell.init_state()
    learner = learner_of(bt.D_RTRL, cell, jnp.ones(3))
    step = bst.jit(bst.grad(lambda x: jnp.sum(learner(x) ** 2), learner.param_states))
    for x, want in zip(xs, eager, strict=True):
        assert_equal(step(x), want)


def per_sample(update, rule, xs):
    """The summed gradient of a sequence, the samples one by one."""
    if (update, rule) not in _found:
        total = []
        for i in range(xs.shape[1]):
            cell = Cell(Draw("cell"), update)
            cell.init_state()
            total.append(summed(learner_of(KINDS[rule], cell, xs[0, 0], **OPTIONS[rule]), xs[:, i]))
        _found[update, rule] = jax.tree.map(lambda *g: sum(g), *total)
    return _found[update, rule]


_found: dict = {}


def summed(learner, xs):
    loss = lambda x: 0.5 * jnp.sum(learner(x) ** 2)
    return jitted(lambda xs: dict(learner.etrace_grad(xs, step_fn=loss, reduction="sum")), xs)


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop"])
@pytest.mark.parametrize("update", some(UPDATES, 2))
def test_mapped_by_compile(update, rule):
    xs = inputs(Draw("mapped"), 2, 3)
    cell = Cell(Draw("cell"), update)
    learner = bt.compile(cell, rule, xs[0], vmap=True, batch_size=2, **OPTIONS[rule])
    assert_equal(summed(learner, xs), per_sample(update, rule, xs))


@pytest.mark.parametrize("update", some(UPDATES, 2))
def test_mapped_by_brainstate(update):
    xs = inputs(Draw("mapped"), 2, 3)
    model = brainstate.nn.Map(Cell(Draw("cell"), update), init_map_size=2)
    model.init_all_states()
    found = summed(learner_of(bt.D_RTRL, model, xs[0]), xs)
    assert_equal({k[-1:]: v for k, v in found.items()}, per_sample(update, "d_rtrl", xs))


@pytest.mark.parametrize("rule", ["snap", "rtrl"])
@pytest.mark.parametrize("update", [by_choice, by_scan, by_while])
def test_mapped_with_crossings(update, rule):
    xs = inputs(Draw("mapped"), 2, 3)
    learner = bt.compile(Cell(Draw("cell"), update), rule, xs[0], vmap=True, batch_size=2)
    assert_equal(summed(learner, xs), per_sample(update, rule, xs))


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "rtrl"])
def test_dead_branch_of_one_sample_among_others(rule, draw):
    """A choice under vmap runs both sides; the side of another sample must not reach a gradient."""

    def update(m, h, x):
        bad = lambda h: jnp.sqrt(x[0]) * h + matmul(x, m.w.value)
        return jnp.tanh(lax.cond(x[0] > 0, bad, lambda h: 0.5 * h + matmul(x, m.w.value), h))

    xs = inputs(draw, 2, 3)
    cell = Cell(Draw("cell"), update)
    learner = bt.compile(cell, rule, xs[0], vmap=True, batch_size=2, **OPTIONS[rule])
    assert_equal(summed(learner, xs), per_sample(update, rule, xs))
