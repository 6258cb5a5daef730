"""What surrounds a step: its derivative is that within the step, and a learner says so."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from online_cases import drawn, error
from test_errors import refuses

import braintrace

B, N, IN, T = 2, 4, 3, 6
PARAMS = {"w": drawn(0, IN, N), "r": drawn(1, N, N), "enc": drawn(2, IN, IN), "h0": drawn(3, N)}
XS, H0 = drawn(4, T, B, IN), jnp.zeros((B, N))
TIGHT = 1e-10
BLOCKS = (0, 3, T)  # steps per call; 0 is single steps
quietly = pytest.mark.filterwarnings("ignore:.*is differentiated")


def step(params, h, x):
    h = jnp.tanh(0.5 * h + x @ params["w"] + h @ params["r"])
    return h, h


def loss(out):
    return (out**2).sum()


def run(net, params, carry, xs, size):
    """The summed loss of a sequence in calls of so many steps."""
    if size:
        total = 0.0
        for t in range(0, T, size):
            carry, outs = net.scan(params, carry, xs[t : t + size])
            total += loss(outs)
        return total

    def body(carry, x):
        carry, out = net(params, carry, x)
        return carry, loss(out)

    return jax.lax.scan(body, jax.tree.map(jnp.asarray, carry), xs)[1].sum()


def within_the_step(enc):
    """The gradient by an encoder, the states being constants."""
    states = [H0]
    for x in XS:
        states.append(step(PARAMS, states[-1], x @ PARAMS["enc"])[0])
    pairs = list(zip(states, XS, strict=False))
    return jax.grad(lambda e: sum(loss(step(PARAMS, h, x @ e)[1]) for h, x in pairs))(enc)


def as_an_input(rule, size, **options):
    def total(enc):
        net = braintrace.online(step, rule, **options)
        return run(net, PARAMS, net.init(PARAMS, H0, XS[0]), XS @ enc, size)

    return total


def closed_over(rule, size, **options):
    def total(enc):
        net = braintrace.online(lambda p, h, x: step(p, h, x @ enc), rule, **options)
        return run(net, PARAMS, net.init(PARAMS, H0, XS[0]), XS, size)

    return total


# ---------------------------------------------------------------------------- one definition


@quietly
@pytest.mark.parametrize("rule", ["rtrl", "d_rtrl", "uoro"])
@pytest.mark.parametrize("outside", [as_an_input, closed_over])
def test_the_derivative_is_that_within_the_step_in_calls_of_any_size(rule, outside):
    truth = within_the_step(PARAMS["enc"])
    for size in BLOCKS:
        assert error(jax.grad(outside(rule, size))(PARAMS["enc"]), truth) < TIGHT, size
    compiled = jax.grad(jax.jit(outside(rule, 3)))(PARAMS["enc"])
    assert error(compiled, truth) < TIGHT


@quietly
def test_parameters_keep_their_gradient_when_an_input_is_differentiated():
    def total(params, enc, size):
        net = braintrace.online(step, "rtrl")
        return run(net, params, net.init(params, H0, XS[0]), XS @ enc, size)

    def bptt(params):
        body = lambda h, x: (step(params, h, x)[0], loss(step(params, h, x)[1]))
        return jax.lax.scan(body, H0, XS @ PARAMS["enc"])[1].sum()

    truth = jax.grad(bptt)(PARAMS)
    for size in BLOCKS:
        found = jax.grad(total, (0, 1))(PARAMS, PARAMS["enc"], size)[0]
        assert error(found["w"], truth["w"]) < TIGHT and error(found["r"], truth["r"]) < TIGHT


@quietly
def test_the_derivative_by_a_carry_is_zero():
    def total(h):
        net = braintrace.online(step, "rtrl")
        return run(net, PARAMS, net.init(PARAMS, h, XS[0]), XS, 3)

    assert not jax.grad(total)(H0).any()


# ------------------------------------------------------------------------ refused, or warned


def own_output(net, params):
    """A learner whose output is its next input."""

    def body(at, _):
        carry, out = net(params, at[0], at[1])
        return (carry, out[:, :IN]), loss(out)

    carry = jax.tree.map(jnp.asarray, net.init(params, H0, XS[0]))
    return jax.lax.scan(body, (carry, XS[0]), None, T)[1].sum()


def stacked(net, params):
    """Two learners, the second on the output of the first."""
    second = braintrace.online(step, "rtrl", strict=net.strict)
    wide = {"w": params["r"], "r": params["r"]}
    carry = net.init(params, H0, XS[0])
    outs = net.scan(params, carry, XS)[1]
    return loss(second.scan(wide, second.init(wide, H0, H0), outs)[1])


def encoded(net, params):
    return run(net, params, net.init(params, H0, XS[0]), XS @ params["enc"], 3)


def started(net, params):
    begin = jnp.broadcast_to(params["h0"], (B, N))
    return run(net, params, net.init(params, begin, XS[0]), XS, 3)


SURROUNDED = {
    encoded: "the input x is differentiated",
    own_output: "the input x is differentiated",
    stacked: "the input x is differentiated",
    started: "the initial state state is differentiated",
}
each = pytest.mark.parametrize("total, text", SURROUNDED.items())


@each
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit])
def test_a_strict_learner_refuses_what_is_differentiated_around_it(total, text, compiled):
    net = braintrace.online(step, "rtrl", strict=True)
    gradient = jax.grad(compiled(lambda params: total(net, params)))
    refuses(braintrace.CompilationError, f"strict=True, and {text}", gradient, PARAMS)


@each
def test_other_learners_warn_once(total, text):
    net = braintrace.online(step, "d_rtrl")
    gradient = jax.grad(lambda params: total(net, params))
    with pytest.warns(UserWarning, match=text) as caught:
        gradient(PARAMS)
    assert [w.filename for w in caught] == [__file__]
    if total is not stacked:  # its second learner is a new one
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gradient(PARAMS)


def test_what_is_closed_over_is_named():
    enc = PARAMS["enc"]

    def gradient(strict):
        return jax.grad(closed_over("rtrl", 3, strict=strict))(enc)

    text = "strict=True, and the step closes over enc, which is differentiated"
    refuses(braintrace.CompilationError, text, gradient, True)
    with pytest.warns(UserWarning, match=r"\benc\b"):
        gradient(False)


def test_constants_around_a_learner_are_fine():
    def total(params):
        net = braintrace.online(step, "rtrl", strict=True)
        encoded = XS @ jax.lax.stop_gradient(params["enc"])
        return run(net, params, net.init(params, H0, XS[0]), encoded, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(total)(PARAMS)
        jax.jit(jax.vmap(jax.grad(total)))(jax.tree.map(lambda a: jnp.stack([a, a]), PARAMS))


# ------------------------------------------------------------------- a learned initial state

START = lambda params: jnp.broadcast_to(jnp.sin(params["h0"]), (B, N))


def bptt_from(start, step=step):
    def total(params):
        body = lambda h, x: (step(params, h, x)[0], loss(step(params, h, x)[1]))
        return jax.lax.scan(body, start(params), XS)[1].sum()

    return jax.grad(total)(PARAMS)


@pytest.mark.parametrize(
    "rule, options", [("rtrl", {}), ("snap", {"n": 2}), ("d_rtrl", {"window": T})]
)
@pytest.mark.parametrize("start", [START, lambda p: jnp.tanh(jnp.ones((B, N)) @ p["r"] + p["h0"])])
def test_a_learned_initial_state_has_its_exact_gradient(rule, options, start):
    net = braintrace.online(step, rule, **options)
    truth = bptt_from(start)
    for size in (None, 1, 3):
        carry = net.init(PARAMS, start, XS[0])
        assert error(carry.state, start(PARAMS)) == 0
        grads, (carry, _) = net.grad(loss, block_size=size)(PARAMS, carry, XS)
        for name in ("w", "r", "h0"):
            if not (rule == "d_rtrl" and size):
                assert error(grads[name], truth[name]) < TIGHT, (size, name)


def test_rules_with_a_trace_per_weight_follow_an_initial_state_over_calls():
    def leaky(params, h, x):
        h = 0.8 * h + jnp.tanh(x @ params["w"])
        return h, jnp.sin(h)

    net = braintrace.online(leaky, "d_rtrl", strict=True)
    truth = bptt_from(START, leaky)
    for size in (1, 3):
        carry, total = net.init(PARAMS, START, XS[0]), None
        for t in range(0, T, size):  # the trace of h0 goes from call to call
            grads, (carry, _) = net.grad(loss)(PARAMS, carry, XS[t : t + size])
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        assert error(total["h0"], truth["h0"]) < TIGHT and error(total["w"], truth["w"]) < TIGHT
    entry = net.report.parameters["h0",]
    assert entry.exact and entry.how == "trace"


def test_what_a_rule_leaves_out_of_an_initial_state_is_in_its_certificate():
    net = braintrace.online(step, "d_rtrl")
    net.init(PARAMS, START, XS[0])
    assert not net.report.parameters["h0",].exact
    refused = braintrace.online(step, "d_rtrl", strict=True).init
    refuses(braintrace.CompilationError, "does not learn", refused, PARAMS, START, XS[0])


def test_only_the_leaves_of_a_state_that_depend_on_parameters_are_learned():
    def both(params, state, x):
        h, _ = step(params, state["h"], x)
        return {"h": h, "n": state["n"] + 1, "v": 0.5 * state["v"] + h}, state["v"]

    start = lambda p: {"h": START(p), "n": jnp.zeros((), int), "v": jnp.ones((B, N))}
    net = braintrace.online(both, "rtrl")
    carry = net.init(PARAMS, start, XS[0])
    grads, (after, _) = net.grad(loss, block_size=2)(PARAMS, carry, XS)
    assert int(after.state["n"]) == T

    def total(params):
        body = lambda s, x: (both(params, s, x)[0], loss(both(params, s, x)[1]))
        return jax.lax.scan(body, start(params), XS)[1].sum()

    assert error(grads["h0"], jax.grad(total)(PARAMS)["h0"]) < TIGHT


def test_a_learned_initial_state_under_transformations():
    net = braintrace.online(step, "rtrl")
    gradient = net.grad(loss)

    def sequence(params, xs):
        return gradient(params, net.init(params, START, xs[0]), xs)[0]

    truth = bptt_from(START)
    assert error(jax.jit(sequence)(PARAMS, XS)["h0"], truth["h0"]) < TIGHT
    two = jax.vmap(sequence, (None, 0))(PARAMS, jnp.stack([XS, 2 * XS]))
    assert error(two["h0"][0], truth["h0"]) < TIGHT

    def total(params):  # init inside of the derivative
        return run(net, params, net.init(params, START, XS[0]), XS, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error(jax.grad(total)(PARAMS)["h0"], truth["h0"]) < TIGHT


def test_a_function_of_no_parameter_is_an_ordinary_state():
    net = braintrace.online(step, "rtrl", strict=True)
    plain = net.init(PARAMS, H0, XS[0])
    same = net.init(PARAMS, lambda params: H0, XS[0])
    assert jax.tree.structure(same) == jax.tree.structure(plain)
    np.testing.assert_array_equal(same.state, plain.state)


def test_one_array_as_parameter_and_initial_state_names_the_way():
    params = {**PARAMS, "h0": jnp.asarray(np.zeros((B, N)))}
    init = lambda **options: braintrace.online(step, "rtrl", **options).init(
        params, params["h0"], XS[0]
    )
    text = "strict=True, and the parameter h0 is also the initial state state"
    refuses(braintrace.CompilationError, text, init, strict=True)
    with pytest.warns(UserWarning, match="lambda params: state, x.* learns it"):
        init()
