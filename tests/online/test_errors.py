"""What a user of `braintrace.online` can get wrong is said in four parts."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
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
    refuses(TypeError, "the step has type int", braintrace.online, 3)
    refuses(ValueError, "has no windows", braintrace.online, step, "stllr", window=2)
    refuses(ValueError, "window=0", braintrace.online, step, window=0)


def test_modules_of_pytorch_are_sent_to_their_own_entry_point(leaky):
    base = type("Module", (), {"__module__": "torch.nn.modules.module", "__call__": leaky.step})
    cell = type("Cell", (base,), {})()
    for call in (braintrace.online, partial(braintrace.compile, cell, "d_rtrl")):
        refuses(TypeError, "is a Cell, a module of PyTorch", call, cell)


def test_steps_that_are_none(leaky):
    init = lambda step, state=leaky.state: braintrace.online(step).init(
        leaky.params, state, leaky.xs[0]
    )
    refuses(TypeError, "returned a dict, not a pair", init, lambda p, s, x: s)
    refuses(TypeError, "returned an array, not a pair", init, lambda p, s, x: x)
    refuses(TypeError, "returned a tuple of 3, not a pair", init, lambda p, s, x: (s, x, x))
    refuses(TypeError, "of the structure", init, lambda p, s, x: (x, s))
    lost = lambda p, s, x: ({"v": leaky.step(p, s, x)[0]["v"].astype(jnp.float32)}, x)
    refuses(ValueError, "v enters as float64.*leaves as float32", init, lost)
    refuses(braintrace.CompilationError, "no floating state", init, lambda p, s, x: (s, x), 3)
    plain = lambda p, s, x: ({"v": 0.5 * s["v"] + x @ p["w"]}, x)
    marked = lambda step: braintrace.online(step, marked_only=True).init(
        leaky.params, leaky.state, leaky.xs[0]
    )
    refuses(braintrace.CompilationError, "no parameter reaches", marked, plain)


def test_error_inside_a_step_has_a_note(leaky, made):
    net, carry = made
    short = leaky.xs[..., :1]
    with pytest.raises(ValueError, match=r"init.*float64\[2, 3\]") as caught:
        net.grad(leaky.loss)(leaky.params, carry, short)
    note = "\n".join(caught.value.__cause__.__notes__)
    parts = PARTS.search(note[note.index("the step") :])
    assert parts and "could not be traced on inputs float64[2, 1]" in note
    assert "online_cases.py:" in note


def test_loss_takes_the_output_and_the_targets(leaky, made):
    net, carry = made
    grad = net.grad(lambda out, y: jnp.sum(out))
    refuses(
        TypeError,
        r"\(out, y\) is called with the output: missing",
        grad,
        leaky.params,
        carry,
        leaky.xs,
    )
    refuses(TypeError, "the loss has type NoneType", net.grad, None)


def test_training_takes_an_optimizer_and_its_state(leaky, made):
    net, carry = made
    refuses(TypeError, "optimizer has type NoneType", net.train, leaky.loss, None)
    refuses(TypeError, "optimizer has type function", net.train, leaky.loss, optax.adam)
    with pytest.raises(AttributeError) as caught:
        train = net.train(jnp.sum, optax.adam(0.1))
        train(leaky.params, optax.sgd(0.1).init(leaky.params), carry, leaky.xs)
    assert any("optimizer.init(params)" in note and PARTS.match(note)
               for note in caught.value.__notes__)  # fmt: skip


def test_lists_are_no_sequences(leaky, made):
    net, carry = made
    pairs = jnp.asarray(leaky.xs).tolist()
    refuses(
        ValueError,
        "a list is a pytree of scalars",
        net.grad(leaky.loss),
        leaky.params,
        carry,
        pairs,
    )


def test_learner_is_shown_by_rule_and_step(leaky, made):
    assert repr(braintrace.online(leaky.step)).endswith("not analysed yet")
    assert "trace" in repr(made[0]) and repr(made[0]).startswith("d_rtrl of ")


def leak(w, h, x):
    return 0.5 * h + jnp.tanh(x @ w)


W, ZERO, X = jnp.ones((3, N)), jnp.zeros((2, N)), jnp.ones((2, 3))


def init(step, params=W, state=ZERO, inputs=(X,)):
    net = braintrace.online(step)
    return net, net.init(params, state, *inputs)


def test_states_keep_structure_shape_and_type():
    def returns(change):
        return lambda w, h, x: (change(leak(w, h, x)), x)

    refuses(TypeError, "of the structure PyTreeDef.None", init, returns(lambda h: None))
    refuses(TypeError, "of the structure .*'h'", init, returns(lambda h: {"h": h}))
    shorter = returns(lambda h: h[:1])
    refuses(ValueError, r"enters as float64\[2, 4\] and leaves as float64\[1, 4\]", init, shorter)
    integer = returns(lambda h: jnp.round(h).astype(int))
    refuses(ValueError, "enters as float64.* and leaves as int64", init, integer)
    counted = lambda w, s, x: ((leak(w, s[0], x), s[1] + 0.5), x)
    refuses(ValueError, "enters as int64.* leaves as float64", init, counted, W, (ZERO, 0))


def test_a_parameter_is_no_state():
    carried = lambda w, s, x: ({"h": leak(w, s["h"], x), "w": s["w"]}, x)
    state = {"h": ZERO, "w": W}
    refuses(ValueError, "the parameter params is also the state w", init, carried, W, state)
    returned = lambda p, s, x: ((p["w"], leak(p["w"], s[1], x)), x)
    refuses(
        ValueError, "the parameter w is also the state .*0", init, returned, {"w": W}, (W, ZERO)
    )
    # One array that both start from is no parameter in the state; see also test_outside.py.
    with pytest.warns(UserWarning, match="parameter b"):
        init(lambda p, h, x: (h + p["b"] + leak(p["w"], h, x), h), {"w": W, "b": ZERO}, ZERO)


def test_states_without_a_use_have_a_line_in_the_report():
    def step(w, s, x):
        h = leak(w, s["h"], x) + s["fixed"]
        return {"h": h, "fixed": s["fixed"], "last": 2 * h, "swap": s["other"], "other": h}, h

    net, _ = init(step, W, dict.fromkeys(("h", "fixed", "last", "swap", "other"), ZERO))
    lines = [d.message for d in net.report.diagnostics if d.kind == "state_mismatch"]
    assert [" ".join(line.split()[:4]) for line in lines] == [
        "state fixed never changes:",
        "state last is never",
        "state swap is never",
    ]


def test_only_floating_arrays_are_trained():
    step = lambda p, h, x: (leak(p["w"], h, x) * p["n"], h)
    net, carry = init(step, {"w": W, "n": jnp.asarray(2)})
    grads, _ = net.grad(lambda out: out.sum())({"w": W, "n": jnp.asarray(2)}, carry, X[None])
    assert grads["n"] is None and grads["w"].shape == W.shape
    assert list(net.report.parameters) == [("w",)]
    for params in ({"w": W.astype(int), "n": 2}, {"w": 1.0, "n": 2}, {}):
        refuses(TypeError, "params has no floating array", init, step, params)


def test_a_step_takes_parameters_state_and_its_inputs():
    refuses(TypeError, "called with params, state, an input", init, lambda w, h: (h, h))
    refuses(TypeError, "missing a required argument: 'x'", init, lambda w, h, x: (h, h), inputs=())
    noisy = lambda w, h, x, key: (leak(w, h, x) + jax.random.normal(key, h.shape), h)
    refuses(
        TypeError, "(?s)missing a required argument: 'key'.*where: .*jax.random.split", init, noisy
    )
    init(lambda *args: (leak(*args), args[1]))


def test_a_value_that_leaves_the_step_sideways_is_refused():
    values, attributes, last = [], SimpleNamespace(), None

    def appends(w, h, x):
        h = leak(w, h, x)
        values.append(2 * h)
        return h, h

    def sets(w, h, x):
        attributes.last = x
        return leak(w, h, x), h

    def rebinds(w, h, x):
        nonlocal last
        h = leak(w, h, x)
        last = h
        return h, h

    def computes(w, h, x):  # what it keeps is no value of a step
        values.append(h.shape)
        body = lambda c, _: (leak(w, c, x), None)
        return jax.lax.scan(body, h, None, 2)[0], jax.nn.relu(h)

    where = r"(?s)outside of its results.*where: \S*test_errors.py:\d+ \(.*appends\)"
    refuses(TypeError, where, init, appends)
    refuses(TypeError, "keeps a float64.2, 3. that", init, sets)
    refuses(TypeError, "outside of its results", init, rebinds)
    assert last is not None
    init(computes)


def test_noise_that_is_the_same_at_every_step_is_refused():
    key = jax.random.key(0)
    noisy = lambda w, h, x, key: (leak(w, h, x) + jax.random.normal(key, h.shape), h)
    same = "(?s)the same random numbers at every step.*where: .*jax.random.split"
    refuses(ValueError, same, init, lambda w, h, x: noisy(w, h, x, key))
    refuses(ValueError, same, init, lambda w, h, x: noisy(w, h, x, jax.random.PRNGKey(1)))

    net, carry = init(noisy, inputs=(X, key))
    xs = (jnp.ones((3, 2, 3)), jax.random.split(key, 3))
    _, outs = net.scan(W, carry, xs)
    assert not jnp.allclose(outs[2] - 0.5 * outs[1], outs[1] - 0.5 * outs[0])

    def splits(w, state, x):
        key, own = jax.random.split(state["key"])
        h, out = noisy(w, state["h"], x, own)
        return {"h": h, "key": key}, out

    init(splits, W, {"h": ZERO, "key": key})
    fixed = jax.random.normal(key, ZERO.shape)  # drawn once, outside
    init(lambda w, h, x: (leak(w, h, x) + fixed, h))


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
    refuses(ValueError, "sequences of different lengths", run, leaky.xs, leaky.ys[:-1])
    refuses(ValueError, "zero steps", run, leaky.xs[:0], leaky.ys[:0])
    refuses(ValueError, "mask has shape", run, leaky.xs, leaky.ys, mask=jnp.ones(T + 1))
    nan = jnp.ones(T).at[2].set(jnp.nan)
    refuses(ValueError, "not a finite number", run, leaky.xs, leaky.ys, mask=nan)
    refuses(TypeError, "takes no modulator", run, leaky.xs, leaky.ys, modulator=jnp.ones(T))
    refuses(ValueError, "block_size=0", net.grad, leaky.loss, block_size=0)
    refuses(TypeError, "update_every has type str", net.train, leaky.loss, None, "1")


def test_a_carry_belongs_to_its_shapes_and_its_rule(leaky, made):
    net, carry = made
    refuses(ValueError, "the carry has the traces", net, leaky.params, carry, leaky.xs[0, :1])
    run = net.grad(leaky.loss)
    refuses(
        ValueError, "the carry has the traces", run, leaky.params, carry, leaky.xs[:, :1], leaky.ys
    )
    other = braintrace.online(leaky.step, "rtrl")
    refuses(ValueError, "those of rtrl are", other, leaky.params, carry, leaky.xs[0])
    refuses(TypeError, "the carry has type dict", net, leaky.params, carry.state, leaky.xs[0])


def test_losses(leaky, made):
    net, carry = made
    run = lambda loss, **k: net.grad(loss, **k)(leaky.params, carry, leaky.xs, leaky.ys)
    refuses(TypeError, "has_aux=False", run, lambda out, y: (leaky.loss(out, y), 0))
    refuses(TypeError, "has_aux=True", run, leaky.loss, has_aux=True)
    refuses(ValueError, "loss of shape", run, lambda out, y: out - y)


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
