"""Sequences and windows: `etrace_grad`, `etrace_evolve` and their options."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

from .reference import (
    XS,
    H,
    Leaky,
    assert_alive,
    assert_close,
    bptt,
    leaky,
    learner_of,
    normal,
    online,
    recurrent,
    squares,
    traces_of,
    values,
)


def test_multi_step_data_forward_equals_stepping():
    algo, other = learner_of(recurrent(), XS[0]), learner_of(recurrent(), XS[0])
    out = algo(braintrace.MultiStepData(XS))
    assert_close(out, jnp.stack([other(x) for x in XS]))
    a, b = values(algo), values(other)
    a.pop(("running_index",)), b.pop(("running_index",))
    assert_close(a, b)


def test_multi_step_data_gradient_of_a_single_step_learner_is_the_sum_of_online_gradients():
    algo, other = learner_of(recurrent(), XS[0]), learner_of(recurrent(), XS[0])
    got = brainstate.transform.grad(
        lambda: squares(algo(braintrace.MultiStepData(XS))), algo.param_states
    )()
    assert_alive(got)
    assert_close(got, online(other, XS))


def test_single_step_data_is_reused_at_every_step():
    class Driven(Leaky):
        def update(self, x, gain):
            return super().update(gain * x)

    def make():
        model = Driven()
        brainstate.nn.init_all_states(model)
        algo = braintrace.D_RTRL(model)
        algo.compile_graph(XS[0], jnp.zeros(2))
        return algo

    gain = normal(3, 2)
    a, b, c = make(), make(), make()
    want = jnp.stack([a(x, gain) for x in XS])
    assert_close(b(braintrace.MultiStepData(XS), braintrace.SingleStepData(gain)), want)
    assert_close(c(braintrace.MultiStepData(XS), gain), want)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9])
def test_windows_of_any_size_cover_a_sequence_of_any_length(chunk):
    algo = learner_of(leaky(), XS[0], vjp_method="multi-step")

    def loss(x):
        out = algo(braintrace.MultiStepData(x) if chunk > 1 else x)
        return (out**2).sum(-1)

    got, losses = algo.etrace_grad(
        XS, step_fn=loss, chunk_size=chunk, reduction="sum", return_value=True
    )
    assert losses.shape == (5,)
    assert_close(got, bptt(leaky(), XS))


def test_whole_window_is_bptt_for_a_recurrent_weight():
    algo = learner_of(recurrent(), XS[0], vjp_method="multi-step")
    got = algo.etrace_grad(
        XS,
        step_fn=lambda x: (algo(braintrace.MultiStepData(x)) ** 2).sum(-1),
        chunk_size=5,
        reduction="sum",
    )
    assert_close(got, bptt(recurrent(), XS))


def window_learner():
    algo = learner_of(leaky(), XS[0], vjp_method="multi-step")
    return algo, lambda x: algo(braintrace.MultiStepData(x))


@pytest.mark.parametrize("length", [4, 5])
def test_windows_stack_auxiliary_values_per_step_and_per_window(length):
    algo, call = window_learner()
    xs = XS[:length]

    def loss(x):
        out = call(x)
        return (out**2).sum(-1), {"out": out}

    _, losses, aux = algo.etrace_grad(
        xs, step_fn=loss, chunk_size=2, has_aux=True, return_value=True
    )
    plain = leaky()
    want = jnp.stack([plain(x) for x in xs])
    assert_close(aux["out"], want)
    assert_close(losses, (want**2).sum(-1))


@pytest.mark.parametrize(
    "summary", [lambda o: o.mean(), lambda o: jnp.tile(o.sum(0), 2)], ids=["0d", "1d"]
)
@pytest.mark.parametrize("length", [4, 5])
def test_windows_stack_summaries_of_windows(summary, length):
    algo, call = window_learner()

    def loss(x):
        out = call(x)
        return (out**2).sum(-1), summary(out)

    _, aux = algo.etrace_grad(XS[:length], step_fn=loss, chunk_size=2, has_aux=True)
    plain = leaky()
    outs = jnp.stack([plain(x) for x in XS[:length]])
    parts = [outs[i : i + 2] for i in range(0, length, 2)]
    assert_close(aux, jnp.stack([summary(p) for p in parts]))


def sequence(**options):
    algo = learner_of(leaky(), XS[0])
    return algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)), **options)


def step_losses():
    model = leaky()
    return jnp.stack([squares(model(x)) for x in XS])


def test_etrace_grad_mask_weighs_the_losses_and_mean_divides_by_its_sum():
    mask = jnp.asarray([0.0, 2.0, 0.0, 1.0, 0.5])
    algo = learner_of(leaky(), XS[0])
    steps = [
        brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)(x) for x in XS
    ]
    want = jax.tree.map(lambda *g: sum(m * a for m, a in zip(mask, g, strict=True)), *steps)
    assert_close(sequence(mask=mask, reduction="sum"), want)
    assert_close(sequence(mask=mask), jax.tree.map(lambda g: g / 3.5, want))


@pytest.mark.parametrize("mask", [[True, False, True, True, False], np.array([1, 0, 1, 1, 0])])
def test_etrace_grad_accepts_boolean_and_integer_masks(mask):
    want = sequence(mask=jnp.asarray(mask, float))
    assert_close(sequence(mask=mask), want)


def test_etrace_grad_mean_of_a_small_mask_divides_by_one():
    mask = 0.1 * jnp.ones(5)
    assert_close(sequence(mask=mask), sequence(mask=mask, reduction="sum"))


def test_etrace_grad_returns_losses_in_three_forms():
    mask = jnp.asarray([0.0, 2.0, 0.0, 1.0, 0.5])
    raw = step_losses()
    options = {"mask": mask, "return_value": True}
    assert_close(sequence(**options)[1], raw)
    assert_close(sequence(loss_output="masked", **options)[1], raw * mask)
    assert_close(sequence(loss_output="scalar", **options)[1], (raw * mask).sum() / 3.5)
    assert_close(sequence(loss_output="scalar", reduction="sum", **options)[1], (raw * mask).sum())


def test_etrace_grad_returns_auxiliary_values_stacked_over_time():
    algo = learner_of(leaky(), XS[0])

    def loss(x):
        out = algo(x)
        return squares(out), {"out": out, "first": out[0]}

    grads, losses, aux = algo.etrace_grad(XS, step_fn=loss, has_aux=True, return_value=True)
    model = leaky()
    want = jnp.stack([model(x) for x in XS])
    assert_close(aux["out"], want)
    assert_close(aux["first"], want[:, 0])
    assert_close(losses, step_losses())
    assert_close(grads, sequence())
    algo = learner_of(leaky(), XS[0])
    pair = algo.etrace_grad(XS, step_fn=loss, has_aux=True)
    assert_close(pair[1]["out"], want)


def test_etrace_grad_slices_pytrees_in_lockstep():
    targets = {"a": normal(1, 5, 2), "b": normal(2, 5)}
    algo, other = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])

    def loss(learner, x, y):
        return ((learner(x) - y["a"]) ** 2).sum() * y["b"]

    got = algo.etrace_grad(XS, targets, step_fn=lambda x, y: loss(algo, x, y), reduction="sum")
    step = brainstate.transform.grad(lambda x, y: loss(other, x, y), other.param_states)
    each = [step(XS[t], jax.tree.map(lambda a: a[t], targets)) for t in range(5)]  # noqa: B023
    assert_close(got, jax.tree.map(lambda *g: sum(g), *each))


@pytest.mark.parametrize("kind", [lambda m: m.w, lambda m: [m.w, m.v], lambda m: {"x": m.w}])
def test_etrace_grad_of_chosen_weights(kind):
    algo = learner_of(leaky(), XS[0])
    weights = kind(algo.model4compile)
    got = algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)), weights=weights)
    assert_close(jax.tree.leaves(got)[0], sequence()[("w",)])


def test_etrace_grad_continues_from_the_present_state_and_leaves_the_new_one():
    a, b = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])
    grads = [
        a.etrace_grad(x, step_fn=lambda x: squares(a(x)), reduction="sum") for x in (XS[:2], XS[2:])
    ]
    whole = b.etrace_grad(XS, step_fn=lambda x: squares(b(x)), reduction="sum")
    assert_close(jax.tree.map(jnp.add, *grads), whole)
    assert_close(values(a), values(b))


def test_etrace_evolve_advances_like_calls_and_returns_outputs_on_demand():
    a, b, c, d = (learner_of(leaky(), XS[0]) for _ in range(4))
    want = jnp.stack([a(x) for x in XS])
    assert b.etrace_evolve(XS) is None
    assert_close(values(b), values(a))
    assert_close(c.etrace_evolve(XS, return_outputs=True), want)
    got = d.etrace_evolve(XS, step_fn=lambda x: d(x).sum(), return_outputs=True)
    assert_close(got, want.sum(-1))


@pytest.mark.parametrize("chunk", [2, 5, 8])
def test_etrace_evolve_in_windows_equals_steps(chunk):
    a, b = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])
    want = a.etrace_evolve(XS, return_outputs=True)
    assert_close(b.etrace_evolve(XS, chunk_size=chunk, return_outputs=True), want)
    assert_close(values(b)[H], values(a)[H])
    assert_close(traces_of(b), traces_of(a))
