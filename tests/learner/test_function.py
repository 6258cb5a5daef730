"""A function that calls modules as the step of a learner: all of it is analysed."""

import copy
import functools

import brainstate
import jax
import jax.numpy as jnp
import optax
import pytest

import braintrace
from gradients import bptt_grad, online_grad

from .reference import Leaky, assert_alive, assert_close, normal, online, squares

XS = normal(7, 4, 2, 2)  # steps, batch, features
RULES = {"d_rtrl": {}, "pp_prop": {"decay_or_rank": 0.9}, "rtrl": {}}


class Net(brainstate.nn.Module):
    """An encoder, a cell and a read-out."""

    def __init__(self):
        super().__init__()
        with brainstate.random.seed_context(3):
            self.encoder = braintrace.nn.Linear(2, 3)
            self.rnn = braintrace.nn.GRUCell(3, 3)
            self.readout = braintrace.nn.Linear(3, 2)

    def update(self, x):
        return self.readout(self.rnn(self.encoder(x)))

    forward = update


def parts():
    net = Net()
    return net.encoder, net.rnn, net.readout


def function():
    encoder, rnn, readout = parts()
    return lambda x: readout(rnn(encoder(x)))


def small():
    encoder, rnn = parts()[0], Leaky(3)
    return lambda x: rnn(encoder(x))


def compiled(model, rule="d_rtrl", **options):
    options = {"batch_size": 2, **RULES[rule], **options}
    return braintrace.compile(model, rule, XS[0], **options)


def loss(net, x):
    return squares(net(x))


@pytest.mark.parametrize(
    ("rule", "sizes"), [("d_rtrl", (1, 3)), ("pp_prop", (2, 1)), ("rtrl", (3, 2))]
)
def test_function_has_the_gradient_of_the_same_module(rule, sizes):
    whole, net = compiled(function(), rule), compiled(Net(), rule)
    assert list(whole.param_states) == list(net.param_states)
    assert list(whole.hidden_states) == [("rnn", "h")]
    got = online_grad(whole, loss, XS, block_size=sizes[0])
    assert_alive(got)
    assert_close(got, online_grad(net, loss, XS, block_size=sizes[1]))
    reports = zip(whole.report.parameters.values(), net.report.parameters.values(), strict=True)
    for a, b in reports:
        assert (a.how, a.exact, len(a.dropped)) == (b.how, b.exact, len(b.dropped))
    if rule == "rtrl":
        assert_close(got, bptt_grad(whole.model4compile, loss, XS))


def test_encoder_is_exact_in_the_function_and_in_the_step_function():
    encoder, cell = parts()[0], Leaky(3)
    alone = braintrace.compile(cell, "rtrl", jnp.zeros((2, 3)), batch_size=2)
    weights = {**encoder.states(brainstate.ParamState), **alone.param_states}
    step = lambda x: squares(alone(encoder(x)))
    found = alone.etrace_grad(XS, step_fn=step, weights=weights, reduction="sum", block_size=1)
    assert alone.report.parameters["weight",].exact
    whole = compiled(lambda x: cell(encoder(x)), "rtrl")
    assert whole.report.parameters["encoder", "weight"].exact
    got = online_grad(whole, loss, XS, block_size=1)
    want = bptt_grad(whole.model4compile, loss, XS)
    assert_close(got, want)
    assert_close(found["weight",], want["encoder", "weight"])


def test_function_mapped_over_samples_and_single_calls_agree_with_a_batch():
    batched, mapped = compiled(small()), compiled(small(), vmap=True)
    grads = [
        n.etrace_grad(XS, step_fn=lambda x, n=n: squares(n(x)), reduction="sum", block_size=2)
        for n in (batched, mapped)
    ]
    assert mapped.last_run.in_blocks
    assert_close(grads[1], grads[0])
    batched.reset()
    mapped.reset()
    assert_close(dict(online(batched, XS)), grads[0])
    batched.reset()
    assert_close(mapped(XS[0]), batched(XS[0]))


def test_function_trains_saves_and_resumes_bit_for_bit(tmp_path):
    optimizer = optax.adam(1e-2)
    train = lambda n, xs: n.etrace_train(xs, step_fn=lambda x: squares(n(x)), optimizer=optimizer)
    first, second = compiled(small()), compiled(small())
    weight = first.param_states["encoder", "weight"]
    before = weight.value
    train(first, XS[:2])
    moved = jax.tree.map(lambda a, b: abs(a - b).max(), weight.value, before)
    assert min(jax.tree.leaves(moved)) > 1e-3
    first.save(tmp_path / "f.ckpt")
    second.load(tmp_path / "f.ckpt", optimizer=optimizer)
    assert (train(first, XS[2:]) == train(second, XS[2:])).all()


def test_reset_resets_the_modules_of_the_function_also_to_another_batch_size():
    learner = compiled(small())
    first = learner(XS[0])
    assert (learner(XS[0]) != first).all()
    learner.reset()
    assert_close(learner(XS[0]), first, 1e-12)
    learner.reset(batch_size=1)
    assert_close(learner(XS[0, :1]), first[:1], 1e-12)


def test_state_outside_of_modules_is_reset_to_what_it_was_compiled_with():
    encoder = parts()[0]
    box = {"h": brainstate.HiddenState(jnp.full((2, 3), 0.1))}

    def step(x):
        box["h"].value = 0.5 * box["h"].value + encoder(x)
        return box["h"].value

    learner = braintrace.compile(step, "d_rtrl", XS[0])
    assert list(learner.hidden_states) == [("box", "h")]
    learner(XS[0])
    learner.reset()
    assert (box["h"].value == 0.1).all()
    learner.reset(batch_size=1)
    with pytest.raises(ValueError, match="`reset_state`"):
        learner(XS[0, :1])


class Hidden:
    """Holds modules where no name leads to them."""

    __slots__ = ("parts",)


def holder():
    odd = Hidden()
    odd.parts = parts()
    brainstate.nn.init_all_states(odd.parts[1], batch_size=2)
    return odd


class Plain:
    def __init__(self):
        self.layers = list(parts()[:2])

    def __call__(self, x):
        return functools.reduce(lambda y, layer: layer(y), self.layers, x)


def two(encoder, rnn, x, *, gain=1.0):
    return gain * rnn(encoder(x))


def wrapped():
    inner, rnn = function(), braintrace.nn.GRUCell(2, 2)

    @functools.wraps(inner)
    def outer(x):
        return rnn(inner(x))

    return outer


def of_globals():
    global ENCODER, RNN
    ENCODER, RNN, _ = parts()
    return lambda x: RNN(ENCODER(x))


def of_unnamed():
    global UNNAMED
    UNNAMED = holder()
    return lambda x: UNNAMED.parts[1](UNNAMED.parts[0](x))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Net().forward, {"self.encoder.weight", "self.rnn.h"}),
        (lambda: functools.partial(two, *parts()[:2], gain=2.0), {"encoder.weight", "rnn.h"}),
        (Plain, {"self.layers.0.weight", "self.layers.1.h"}),
        (
            lambda: brainstate.transform.jit(function()),
            {"encoder.weight", "rnn.h", "readout.weight"},
        ),
        (wrapped, {"encoder.weight", "rnn.h", "inner_rnn.h"}),
        (of_globals, {"ENCODER.weight", "RNN.h"}),
        (of_unnamed, {"ParamState_0", "HiddenState_0"}),
    ],
    ids=["method", "partial", "object", "jit", "wraps", "globals", "unnamed"],
)
def test_names_of_a_function_are_names_of_states(make, names):
    learner = compiled(make())
    assert names <= {".".join(map(str, path)) for path in learner.path_to_states}
    assert learner(XS[0]).shape[0] == 2


def refused(error, text, function, *inputs, **options):
    with pytest.raises(error, match=text) as info:
        braintrace.compile(function, "d_rtrl", *inputs, **options)
    if "expected" not in text:
        assert "test_function.py" in str(info.value)
    assert "do:" in str(info.value)


def test_functions_that_cannot_be_a_step_are_refused():
    learner, encoder = compiled(function()), parts()[0]
    refused(ValueError, "uses no state of brainstate", lambda x: x + 1, XS[0])
    refused(TypeError, "called with an input: missing a required argument: 'rnn'", two, XS[0])
    refused(TypeError, "an input, y=...", lambda x: encoder(x), XS[0], kwargs={"y": 1.0})
    refused(ValueError, "calls the learner learner", lambda x: learner(x), XS[0])
    refused(TypeError, "expected a brainstate.nn.Module or a function, got int", 3, XS[0])
    refused(TypeError, "expected a brainstate.nn.Module or a function, got Net", Net, XS[0])
    with pytest.raises(ValueError, match="Incompatible shapes") as info:
        braintrace.compile(lambda x: encoder(x) + jnp.ones(7), "d_rtrl", XS[0])
    assert any("it raised the error above" in note for note in info.value.__notes__)


def test_copy_of_a_learner_of_a_function_is_refused_when_it_is_called():
    learner = copy.deepcopy(compiled(function()))
    with pytest.raises(TypeError, match=r"copy.*function.<locals>.<lambda>"):
        learner(XS[0])
