"""Gradients of baselines and rules, against unrolled programs that `jax.grad` differentiates."""

from functools import cache

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.lab.comparison._gradient import Compiled, agreement, matching_window, method_of
from braintrace.lab.comparison._model import builder, pure_model
from braintrace.lab.comparison._rules import choices_of
from braintrace.lab.comparison._sequences import sequences_of
from braintrace.lab.comparison._training import Optimizer, Stream

from .toy import INPUTS, LENGTH, UNITS, Sum, network, step

TASK = sequences_of(Sum(), 2)
XS, YS = BATCH = TASK.draw(jax.random.key(0))
MODEL = pure_model(network(jax.random.key(3), 2), 2, TASK.x)
PARAMS = network(jax.random.key(3), 2)[1]


@cache
def toy_gradient(text):
    return gradient(text, MODEL)


def gradient(text, model=None):
    if model is None:
        return toy_gradient(text)
    (choice,) = choices_of([text])
    return Compiled(choice, model, TASK)(model.params, BATCH)


def loss_at(params, t, window):
    """The loss of step t; no gradient passes into the state `window` steps before it."""
    h = jnp.zeros((2, UNITS))
    for s in range(t + 1):
        if s == t + 1 - window:
            h = jax.lax.stop_gradient(h)
        h, out = step(params, h, XS[s])
    return ((out - YS[t]) ** 2).mean()


def assert_close(found, wanted, tolerance=1e-12):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("window", [1, 3, LENGTH])
def test_rolling_goes_back_to_the_steps_before_a_window(window):
    found, _ = gradient(f"rolling:window={window}")
    weights = np.asarray(Sum.mask) / 4
    first = [max(0, t // window * window + 1 - window) for t in range(LENGTH)]
    back = lambda p: sum(weights[t] * loss_at(p, t, t + 1 - first[t]) for t in range(LENGTH))
    assert_close(found, jax.jit(jax.grad(back))(PARAMS))


def test_rolling_over_the_whole_past_is_bptt_and_over_one_step_no_trace():
    whole, loss = gradient("bptt")
    found, again = gradient(f"rolling:window={LENGTH + 2}")
    assert_close(found, whole)
    assert abs(loss - again) < 1e-12
    single, _ = gradient("rolling:window=1")
    assert_close(single, gradient("no_trace")[0])
    assert agreement(single, whole, list(whole))[1] > 0.05


@pytest.mark.parametrize(("rule", "window"), [("bptt", LENGTH), ("rolling:window=2", 2)])
def test_rolling_replays_with_the_weights_of_now(rule, window):
    (choice,) = choices_of([rule])
    method, sgd = method_of(choice, MODEL, TASK.loss, LENGTH, 1), Optimizer("sgd")
    found = Stream(method, TASK, sgd, 1)(MODEL.params, sgd.init(MODEL.params), BATCH, 0.1)[0]

    # The state before the oldest input, the weights of now, one loss: clipped to norm 1, a step.
    params, visited = PARAMS, [jnp.zeros((2, UNITS))]
    for t in range(LENGTH):
        first = max(0, t + 1 - window)

        def replayed(params, t=t, first=first, h=visited[first]):
            for s in range(first, t + 1):
                h, out = step(params, h, XS[s])
            return ((out - YS[t]) ** 2).mean()

        visited.append(step(params, visited[t], XS[t])[0])
        if Sum.mask[t]:
            grads = jax.jit(jax.grad(replayed))(params)
            norm = jnp.sqrt(sum((g**2).sum() for g in grads.values()))
            params = {k: p - 0.1 * grads[k] / jnp.maximum(1, norm) for k, p in params.items()}
    assert_close(found, params)


def test_truncated_bptt_is_bptt_in_one_window_and_immediate_in_windows_of_one():
    whole, loss = gradient("bptt")
    assert_close(gradient("tbptt:window=9")[0], whole)
    pieces, again = gradient("tbptt:window=4")  # and a rest of two
    assert abs(again - loss) < 1e-12 and 0.1 < agreement(pieces, whole, list(whole))[0] < 1 - 1e-6
    weights = np.asarray(Sum.mask) / 4
    chunked = lambda p: sum(weights[t] * loss_at(p, t, t % 4 + 1) for t in range(LENGTH))
    assert_close(pieces, jax.jit(jax.grad(chunked))(PARAMS))
    assert_close(gradient("tbptt:window=1")[0], gradient("no_trace")[0])


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 1])  # in whole parts, and with a rest
def test_rematerialised_bptt_is_bptt_in_less_memory(length):
    model, xs, ys = MODEL, XS[:length], YS[:length]
    steps = xs, ys, jnp.linspace(0.5, 1, length)
    of = lambda word: method_of(choices_of([word])[0], model, TASK.loss, length, length).run
    (grads, state, loss, outs), whole = (
        of(word)(PARAMS, model.state, steps) for word in ("remat", "bptt")
    )
    assert_close(grads, whole[0])
    assert abs(loss - whole[2]) < 1e-12
    np.testing.assert_allclose(outs, whole[3], atol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), state, whole[1])


@pytest.mark.parametrize("rule", [f"d_rtrl:window={LENGTH}", "rtrl:block=2"])
def test_one_window_of_a_rule_is_bptt_and_so_is_rtrl(rule):
    assert_close(gradient(rule)[0], gradient("bptt")[0])


def test_random_rule_draws_anew_for_the_next_sequence_and_the_same_after_a_reset():
    (choice,) = choices_of(["uoro"])
    compiled = Compiled(choice, MODEL, TASK)
    first, second = (compiled(MODEL.params, BATCH)[0] for _ in range(2))
    assert agreement(first, second, list(first))[1] > 0.01
    compiled.reset()
    assert_close(compiled(MODEL.params, BATCH)[0], first, 0)


class Leaky(brainstate.nn.Module):
    """One recurrence per unit, in brainstate, with noise."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.w = braintrace.nn.Linear(INPUTS, UNITS)
        self.out = braintrace.nn.Linear(UNITS, 1)
        self.noise = noise

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        noise = self.noise * brainstate.random.randn(*self.h.value.shape) if self.noise else 0
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.w(x)) + noise
        return self.out(self.h.value)[:, 0]


def nnx_network(seed, batch_size):
    from flax import nnx

    class Leaky(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Linear(INPUTS, UNITS, rngs=rngs, param_dtype=float)
            self.h = nnx.Variable(jnp.zeros((batch_size, UNITS)))

        def __call__(self, x):
            self.h[...] = 0.8 * self.h[...] + jnp.tanh(self.w(x))
            return self.h[...].sum(-1)

    return Leaky(nnx.Rngs(seed))


def equinox_network(key, batch_size):
    import equinox as eqx

    cell = eqx.nn.MLP(
        INPUTS, UNITS, 4, 0, final_activation=jnp.tanh, key=key
    )  # has functions as leaves

    def step(cell, h, x):
        h = 0.8 * h + jax.vmap(cell)(x)
        return h, h.sum(-1)

    return step, cell, jnp.zeros((batch_size, UNITS))


@pytest.mark.parametrize("make", [Leaky, nnx_network, equinox_network])
def test_models_of_other_libraries_are_exact_where_units_are_separate(make):
    model = builder(make, lambda size: jnp.zeros((size, INPUTS)))(0, 2)
    whole = gradient("bptt", model)[0]
    assert_close(gradient("d_rtrl:block=2", model)[0], whole, 1e-9)
    assert agreement(gradient("no_trace", model)[0], whole, list(whole))[1] > 0.05
    other = builder(make, lambda size: jnp.zeros((size, INPUTS)))(1, 2)
    assert any((model.params[k] != other.params[k]).any() for k in whole)


def test_parameters_that_no_state_depends_on_are_left_out_of_the_cosine():
    model = builder(Leaky, lambda size: jnp.zeros((size, INPUTS)))(0, 2)
    assert all("w." in name for name in model.recurrent(TASK.x)) and len(model.params) == 4
    assert len(MODEL.recurrent(TASK.x)) == 3


def test_noise_of_a_model_goes_on_from_sequence_to_sequence():
    (choice,) = choices_of(["d_rtrl"])
    model = builder(lambda: Leaky(0.5), lambda size: jnp.zeros((size, INPUTS)))(0, 2)
    compiled = Compiled(choice, model, TASK)
    first, second = (float(compiled(model.params, BATCH)[1]) for _ in range(2))
    assert first != second
    compiled.reset()
    assert float(compiled(model.params, BATCH)[1]) == first


def test_window_that_matches_memory():
    line = lambda window: 10.0 + 5 * window
    assert matching_window(line, 61, 40) == 10
    assert matching_window(line, 1, 40) == 1 and matching_window(line, 1e9, 40) == 40
    bent = lambda window: 10 + window**1.3
    assert abs(matching_window(bent, bent(10), 100) - 10) <= 3


def test_a_mixture_in_words_has_each_parameter_by_its_rule():
    text = "u=snap:n=2,w=d_rtrl:window=2,*=no_trace"
    found = gradient(text)[0]
    alone = {"u": "snap:n=2", "w": "d_rtrl:window=2", "a": "no_trace", "out": "no_trace"}
    assert_close(found, {name: gradient(rule)[0][name] for name, rule in alone.items()})
    (choice,) = choices_of([{"u": braintrace.rules.snap(2), "*": "no_trace"}])
    assert choice.label == "{u: snap(n=2), *: no_trace}"


MIXED = {
    "u=snap:n=2,u=d_rtrl": "u has two rules",
    "u=bptt,*=d_rtrl": "bptt has no traces and no part in a mixture",
    "u=snap:m=2,*=d_rtrl": "no option of snap 'm'",
}


@pytest.mark.parametrize("text, words", MIXED.items())
def test_mixtures_in_words_that_do_not_read_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        choices_of([text])
