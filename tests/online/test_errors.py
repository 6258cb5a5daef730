"""What a user of `braintrace.online` can get wrong is said in four parts."""

import re

import jax
import jax.numpy as jnp
import pytest
from online_cases import N, T, error

import braintrace
from braintrace import rules

PARTS = re.compile(r"\A\S[^\n]*(\n  where: [^\n]+)?\n  why:   \S.*\n  do:    \S", re.S)


def refuses(kind, text, function, *args, **kwargs):
    with pytest.raises(kind, match=text) as caught:
        function(*args, **kwargs)
    assert PARTS.match(str(caught.value)), str(caught.value)


@pytest.fixture
def made(leaky):
    net = braintrace.online(leaky.step, "d_rtrl")
    return net, net.init(leaky.params, leaky.state, leaky.xs[0])


def test_rule_and_options(leaky):
    step = leaky.step
    refuses(ValueError, "did you mean 'd_rtrl'", braintrace.online, step, "drtrl")
    refuses(ValueError, "choose one of them", braintrace.online, step, "zzz")
    refuses(TypeError, "missing option.*decay_or_rank", braintrace.online, step, "pp_prop")
    refuses(TypeError, "unknown option.*decay", braintrace.online, step, "d_rtrl", decay=0.5)
    refuses(TypeError, "as a value", braintrace.online, step, rules.d_rtrl(), n=2)
    refuses(TypeError, "int is not a rule", braintrace.online, step, 3)
    refuses(TypeError, "the step is a int", braintrace.online, 3)
    refuses(ValueError, "has no windows", braintrace.online, step, "stllr", window=2)
    refuses(ValueError, "window=0", braintrace.online, step, window=0)


def test_steps_that_are_none(leaky):
    init = lambda step, state=leaky.state: braintrace.online(step).init(
        leaky.params, state, leaky.xs[0]
    )
    refuses(TypeError, "returned dict", init, lambda p, s, x: s)
    refuses(TypeError, "of the structure", init, lambda p, s, x: (x, s))
    lost = lambda p, s, x: ({"v": leaky.step(p, s, x)[0]["v"].astype(jnp.float32)}, x)
    refuses(ValueError, "v enters as float64.*leaves as float32", init, lost)
    refuses(braintrace.CompilationError, "no floating state", init, lambda p, s, x: (s, x), 3)
    plain = lambda p, s, x: ({"v": 0.5 * s["v"] + x @ p["w"]}, x)
    marked = lambda step: braintrace.online(step, marked_only=True).init(
        leaky.params, leaky.state, leaky.xs[0]
    )
    refuses(braintrace.CompilationError, "no parameter reaches", marked, plain)


def test_strict_names_what_is_left_out(recurrent):
    net = braintrace.online(recurrent.step, strict=True)
    refuses(
        braintrace.CompilationError,
        "does not learn 2 parameter",
        net.init,
        recurrent.params,
        recurrent.state,
        recurrent.xs[0],
    )


def test_sequences(leaky, made):
    net, carry = made
    run = lambda *args, **k: net.grad(leaky.loss)(leaky.params, carry, *args, **k)
    refuses(ValueError, "sequences of the shapes", run, leaky.xs, leaky.ys[:-1])
    refuses(ValueError, "sequences of the shapes", run, leaky.xs[:0], leaky.ys[:0])
    refuses(ValueError, "mask has shape", run, leaky.xs, leaky.ys, mask=jnp.ones(T + 1))
    nan = jnp.ones(T).at[2].set(jnp.nan)
    refuses(ValueError, "not a finite number", run, leaky.xs, leaky.ys, mask=nan)
    refuses(TypeError, "takes no modulator", run, leaky.xs, leaky.ys, modulator=jnp.ones(T))
    refuses(ValueError, "block_size=0", net.grad, leaky.loss, block_size=0)
    refuses(TypeError, "update_every is a str", net.train, leaky.loss, None, "1")


def test_a_carry_belongs_to_its_shapes_and_its_rule(leaky, made):
    net, carry = made
    refuses(ValueError, "the carry has the traces", net, leaky.params, carry, leaky.xs[0, :1])
    run = net.grad(leaky.loss)
    refuses(
        ValueError, "the carry has the traces", run, leaky.params, carry, leaky.xs[:, :1], leaky.ys
    )
    other = braintrace.online(leaky.step, "rtrl")
    refuses(ValueError, "those of rtrl are", other, leaky.params, carry, leaky.xs[0])
    refuses(TypeError, "the carry is a dict", net, leaky.params, carry.state, leaky.xs[0])


def test_losses(leaky, made):
    net, carry = made
    run = lambda loss, **k: net.grad(loss, **k)(leaky.params, carry, leaky.xs, leaky.ys)
    refuses(TypeError, "has_aux=False", run, lambda out, y: (leaky.loss(out, y), 0))
    refuses(TypeError, "has_aux=True", run, leaky.loss, has_aux=True)
    refuses(TypeError, "returned float64", run, lambda out, y: out - y)


def test_a_modulator_is_needed(leaky):
    net = braintrace.online(leaky.step, "three_factor")
    carry = net.init(leaky.params, leaky.state, leaky.xs[0])
    refuses(RuntimeError, "without a modulator", net, leaky.params, carry, leaky.xs[0])


def test_none_is_no_target(leaky):
    matrix = jnp.ones((2, N))
    net = braintrace.online(leaky.step, "osttp", B_list=[matrix])
    carry = net.init(leaky.params, leaky.state, leaky.xs[0])
    refuses(ValueError, "without y_target", net, leaky.params, carry, leaky.xs[0], y_target=None)
    net = braintrace.online(leaky.step, "osttp", B_list=[matrix], target_timing="sequence-end")
    loss = lambda params, **target: net(params, carry, leaky.xs[0], **target)[1].sum()
    without, none = jax.grad(loss)(leaky.params), jax.grad(loss)(leaky.params, y_target=None)
    assert error(none, without) == 0


def test_a_report_needs_shapes(leaky):
    net = braintrace.online(leaky.step)
    refuses(RuntimeError, "not analysed yet", lambda: net.report)
    jax.eval_shape(net.init, leaky.params, leaky.state, leaky.xs[0])
    assert net.report.parameters
