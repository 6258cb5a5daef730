"""Loops of unknown length inside `update`."""

from collections.abc import Callable

import brainstate
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
    case,
    check_crossing,
    gradients,
    inputs,
    learner_of,
    made,
    relax,
)
from .zoo import (
    RULES,
    Draw,
    T,
    check,
    matmul,
    net,
    small,
    squares,
    targets,
)

WHILES: dict[str, tuple[Callable, tuple, dict]] = {}


def relax_masked(h, y, tolerance=0.3):
    """The same with a fixed number of turns."""

    def turn(i, h):
        more = jnp.abs(h - jnp.tanh(y)).max() > tolerance
        return jnp.where(more, h + 0.3 * (jnp.tanh(y) - h), h)

    return lax.fori_loop(0, 20, turn, h)


@case(WHILES)
@small({"w": (3, 4)}, {"h": 4})
def after_an_operator(m, x):
    m.h.value = m.solver(m.h.value, matmul(x, m.w.value))
    return m.h.value


@case(WHILES)
@small({"w": (3, 4)}, {"h": 4})
def before_an_operator(m, x):
    m.h.value = 0.9 * m.solver(m.h.value, x[:1] * jnp.ones(4)) + matmul(x, m.w.value)
    return m.h.value


@case(WHILES)
@small({"w": (3, 4)}, {"h": 4})
def part_of_an_expression(m, x):
    y = matmul(x, m.w.value)
    m.h.value = jnp.sin(0.5 * m.h.value * m.solver(m.h.value, y) + y)
    return m.h.value


@case(WHILES)
@small({"w": (3, 4)}, {"h": 4})
def in_the_output_only(m, x):
    m.h.value = 0.9 * m.h.value + matmul(x, m.w.value)
    return m.solver(m.h.value, x[0]) * m.h.value


@case(WHILES)
@small({"w": (3, 4)}, {"h": 4})
def inside_a_choice(m, x):
    y = matmul(x, m.w.value)
    m.h.value = lax.cond(x[0] > 0, lambda h: m.solver(h, y), lambda h: h + 0.3 * y, m.h.value)
    return m.h.value


@case(WHILES)
@small({"w": (3, 4)}, {"h": 4})
def inside_a_loop_with_an_operator(m, x):
    turn = lambda h, _: (m.solver(h, matmul(x, m.w.value)) * 0.9, None)
    m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
    return m.h.value


@case(WHILES, exact=False)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4})
def beside_a_recurrent_operator(m, x):
    y = matmul(x, m.w.value) + matmul(m.h.value, m.r.value)
    m.h.value = 0.5 * m.h.value + m.solver(m.h.value, y)
    return m.h.value


@pytest.mark.parametrize("name", WHILES)
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


def test_while_inside_a_while(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        times = lambda n, turn, h: lax.fori_loop(0, jnp.asarray(n, int), lambda i, h: turn(h), h)
        inner = lambda h: times(2 * jnp.abs(x[1]), lambda h: jnp.sin(h) + 0.2 * y, 0.9 * h)
        m.h.value = times(1 + 2 * jnp.abs(x[0]), inner, m.h.value)
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
        run = lambda learner=learner, window=window, sequences=sequences: online_grad(
            learner, squares, *sequences, chunk_size=window
        )
        assert_equal(computed(run), truth[name])


def test_while_that_mixes_units_with_crossings():
    check_crossing(mixing(Draw("mixing"), by_while_loop), inputs(Draw("mixes"), 3))


def test_reverse_mode_of_a_while_too_wide_to_follow_is_refused(monkeypatch):
    from braintrace.graph import _sets

    monkeypatch.setattr(_sets, "MOST_SOURCES", 8)
    monkeypatch.setattr(_sets, "NARROW", 1)
    model, x = mixing(Draw("mixing"), by_while_loop), inputs(Draw("mixes"), 3)[0]
    learner = learner_of(bt.D_RTRL, model, x, vjp_method="multi-step")
    loss = lambda: jnp.sum(learner(x) ** 2)
    with pytest.raises(bt.NotSupportedError, match="while_loop") as error:
        brainstate.transform.grad(loss, learner.param_states)()
    assert all(part in str(error.value) for part in ("test_whiles.py:", "why:", "do:"))


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
    place = int(text.split("test_whiles.py:")[1].split()[0])
    assert first < place <= first + 3, text
    for part in ("where:", "why:", "do:", "lax.scan or fori_loop"):
        assert part in text, text
