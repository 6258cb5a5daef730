"""The user's step function is the step: what is shared with the model's own, and what is seen."""

import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

from .reference import Leaky, Recurrent, assert_close, normal, squares

XS, YS = normal(7, 9, 2), normal(8, 9, 2)


def compiled(rule="d_rtrl", model=Recurrent, **options):
    return braintrace.compile(model(), rule, XS[0], **options)


def bptt(learner, step, xs=XS):
    return braintrace.verify.bptt_grad(learner.model4compile, step, xs)


def gradient(learner, step, xs=XS, **options):
    return learner.etrace_grad(xs, step_fn=step, reduction="sum", **options)


# ------------------------------------------------------------------------- traces that are shared


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl", "pp_prop"])
def test_calls_and_step_functions_share_the_traces_of_the_model(rule):
    options = {"decay_or_rank": 0.9} if rule == "pp_prop" else {}
    mixed, one = compiled(rule, **options), compiled(rule, **options)
    step = lambda net: lambda x: squares(net(x) - 1)
    for x in XS[:4]:
        mixed(x)
    one.etrace_evolve(XS[:4])
    assert_close(gradient(mixed, step(mixed), XS[4:]), gradient(one, step(one), XS[4:]))
    names = set(mixed.etraces)
    other = lambda x: squares(mixed(x)) + squares(mixed.model4compile.h.value)
    gradient(mixed, other, XS[:2])
    assert set(mixed.etraces) == names


def test_a_state_of_a_step_function_starts_at_zero_and_is_shared_afterwards():
    learner = compiled("rtrl", Leaky)
    last = brainstate.ShortTermState(jnp.zeros(2))

    def step(net, x):
        last.value = jnp.tanh(net(x + 0.5 * last.value))
        return squares(last.value)

    own = set(learner.etraces)
    for x in XS[:3]:
        learner(x)
    gradient(learner, lambda x: step(learner, x), XS[3:6])
    more = set(learner.etraces) - own
    assert more >= {"w -> last", "v -> last"}
    assert any(np.any(learner.etraces[name].value) for name in more)
    again, last.value = compiled("rtrl", Leaky), jnp.zeros(2)
    gradient(again, lambda x: step(again, x), XS[:3])
    learner.reset()
    last.value = jnp.zeros(2)
    gradient(learner, lambda x: step(learner, x), XS[:3])
    assert_close(
        [t.value for t in again.etraces.values() if again],
        [learner.etraces[name].value for name in again.etraces],
    )


def test_uoro_has_traces_of_its_own_for_a_step_function_with_a_state():
    learner = compiled("uoro")
    names = set(learner.etraces)
    memory = brainstate.ShortTermState(jnp.zeros(2))

    def step(x):
        memory.value = 0.5 * memory.value + learner(x)
        return squares(memory.value)

    gradient(learner, step)
    assert set(learner.etraces) > names


@pytest.mark.parametrize("rule", ["rtrl", "d_rtrl"])
def test_a_closed_loop_with_noise_runs_in_blocks(rule):
    learner = compiled(rule, Leaky)
    last = brainstate.HiddenState(jnp.zeros(2))

    def step(net, x):
        last.value = net(0.5 * last.value + x + 0.1 * brainstate.random.normal(size=(2,)))
        return squares(last.value)

    found = []
    for size in (None, 4, 1):
        learner.reset()
        last.value = jnp.zeros(2)
        brainstate.random.seed(3)
        found.append(gradient(learner, lambda x: step(learner, x), block_size=size))
        assert learner.last_run.in_blocks
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])
    learner.reset()
    last.value = jnp.zeros(2)
    brainstate.random.seed(3)
    want = bptt(learner, step)
    error = np.abs(np.asarray(found[0]["w",]) - np.asarray(want["w",])).max()
    assert error < 1e-9 if rule == "rtrl" else error > 1e-2


def test_a_learner_in_a_branch_and_two_learners_in_a_row_are_one_step():
    first, second = compiled("rtrl"), compiled("rtrl", Leaky)

    def branch(x):
        run = lambda: squares(first(x))
        return brainstate.transform.cond(x[0] > 0, run, lambda: 0.0 * x.sum())

    def branch_of_model(net, x):
        return brainstate.transform.cond(x[0] > 0, lambda: squares(net(x)), lambda: 0.0 * x.sum())

    assert_close(gradient(first, branch), bptt(compiled("rtrl"), branch_of_model))
    first.reset()
    weights = {**{("first", *p): s for p, s in first.param_states.items()}, **second.param_states}
    found = gradient(second, lambda x: squares(second(first(x))), weights=weights)
    first.reset(), second.reset()

    def total():
        run = lambda x: squares(second.model4compile(first.model4compile(x)))
        return brainstate.transform.for_loop(run, XS).sum()

    want = brainstate.transform.grad(total, weights)()
    assert_close({str(k): v for k, v in found.items()}, {str(k): v for k, v in want.items()})


# -------------------------------------------------------------------------- what a call passes on


def test_a_modulator_that_a_step_function_computes_counts():
    learner, other = compiled("three_factor"), compiled("three_factor")
    step = lambda net: lambda x, y: squares(net(x, modulator=jnp.tanh(3 * y.sum())))
    found = learner.etrace_grad(XS, YS, step_fn=step(learner), reduction="sum")
    total = None
    grad = brainstate.transform.grad(step(other), other.param_states)
    for x, y in zip(XS, YS, strict=True):
        g = grad(x, y)
        total = g if total is None else jax.tree.map(jnp.add, total, g)
    assert_close(found, dict(total))
    assert learner.last_run.in_blocks


def test_a_modulator_that_depends_on_a_state_is_taken_step_by_step():
    learner, other = compiled("three_factor"), compiled("three_factor")
    step = lambda net: lambda x: squares(net(x, modulator=net.model4compile.h.value.sum()))
    found = gradient(learner, step(learner))
    assert not learner.last_run.in_blocks and "depends on a state" in learner.last_run.reason
    total = None
    grad = brainstate.transform.grad(step(other), other.param_states)
    for x in XS:
        g = grad(x)
        total = g if total is None else jax.tree.map(jnp.add, total, g)
    assert_close(found, dict(total))


# ------------------------------------------------------------------- states that change outside


def changed(learner, change):
    """The traces begin anew, with a warning that says what to do."""
    learner.reset()
    for x in XS[:3]:
        learner(x)
    change(learner.model4compile)
    begin = learner.model4compile.h.value
    with pytest.warns(UserWarning, match=r"(?s)changed outside.*reset\(\).*keep\(\)"):
        learner(XS[3])
    return begin


CHANGES = {
    "assigned": lambda model: setattr(model.h, "value", jnp.ones(3)),
    "initialised": lambda model: brainstate.nn.init_all_states(model),
    "called": lambda model: model(XS[0]),
    "another learner": lambda model: _another(model)(XS[0]),
}


def _another(model):
    other = braintrace.D_RTRL(model)
    other.compile_graph(XS[0])
    return other


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_that_was_changed_outside_resets_the_traces_with_a_warning(change):
    learner, fresh = compiled(), compiled()
    fresh.model4compile.h.value = changed(learner, change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh(XS[3])
    traces = [[t.value for t in net.etraces.values()] for net in (learner, fresh)]
    assert_close(*traces)


def test_keep_leaves_the_traces_as_they_are():
    learner, other = compiled(), compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in XS[:3]:
            learner(x), other(x)
        learner.model4compile.h.value = other.model4compile.h.value + 0.0
        learner.keep()
        step = lambda net: lambda x: squares(net(x))
        assert_close(gradient(learner, step(learner)), gradient(other, step(other)))


def test_states_and_traces_that_are_put_back_together_stay():
    learner = compiled()
    for x in XS[:3]:
        learner(x)
    arrays = dict(learner.named_arrays())
    first = gradient(learner, lambda x: squares(learner(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.assign(arrays)
        assert_close(gradient(learner, lambda x: squares(learner(x))), first, 0)


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("way", ["file", "pytree"])
def test_traces_of_a_step_function_are_put_back_before_it_ever_ran(way, tmp_path):
    last = brainstate.ShortTermState(jnp.zeros(2))

    def step(net):
        def function(x):
            last.value = jnp.tanh(net(x + last.value))
            return squares(last.value)

        return function

    learner, other = compiled("rtrl"), compiled("rtrl")
    gradient(learner, step(learner), XS[:4])
    if way == "file":
        learner.save(tmp_path / "saved")
    tree, now = learner.to_pytree(), last.value
    want = gradient(learner, step(learner), XS[4:])
    other.load(tmp_path / "saved") if way == "file" else other.from_pytree(tree)
    last.value = now
    assert_close(gradient(other, step(other), XS[4:]), want, 1e-12)
    third = compiled("rtrl", Leaky)
    names = set(third.etraces)
    with pytest.raises(ValueError, match="only in the"):
        third.load(tmp_path / "saved") if way == "file" else third.from_pytree(tree)
    assert set(third.etraces) == names


# --------------------------------------------------------------------------------- two faces, one


def test_grad_and_train_of_losses_of_outputs_are_those_of_step_functions():
    loss = lambda out, y: jnp.mean((out - y) ** 2)
    a, b = compiled(), compiled()
    grads, losses = a.grad(loss)(XS, YS)
    want = b.etrace_grad(
        XS, YS, step_fn=lambda x, y: loss(b(x), y), reduction="sum", return_value=True
    )
    assert_close((grads, losses), want)
    optimizer = optax.sgd(1e-2)
    found = a.train(loss, optimizer, 3)(XS, YS)
    step = lambda x, y: loss(b(x), y)
    want = b.etrace_train(
        XS, YS, step_fn=step, optimizer=optimizer, update_every=3, reduction="sum"
    )
    assert_close(found, want)
    assert_close(a.model4compile.w.value, b.model4compile.w.value)


def test_a_window_is_windows_in_both_faces():
    loss = lambda out, y: jnp.mean((out - y) ** 2)
    a, b = compiled(window=3), compiled(vjp_method="multi-step")
    found = a.grad(loss)(XS, YS)
    step = lambda x, y: ((b(braintrace.MultiStepData(x)) - y) ** 2).mean(-1)
    options = {"chunk_size": 3, "reduction": "sum", "return_value": True}
    want = b.etrace_grad(XS, YS, step_fn=step, **options)
    assert_close(found, want)
    with pytest.raises(TypeError, match="window"):
        compiled(window=1.5)


def test_recompile_sees_what_no_key_has():
    class Net(Leaky):
        scale = 1.0

        def update(self, x):
            return super().update(type(self).scale * x)

    learner, twin = compiled(model=Net), Net()
    brainstate.nn.init_all_states(twin)
    assert_close(learner(XS[0]), twin(XS[0]))
    Net.scale = 2.0
    learner.recompile()
    assert_close(learner(XS[1]), twin(XS[1]))


def test_an_array_that_takes_the_place_of_another_is_never_stale():
    global SCALE
    learner = compiled(model=Leaky)
    SCALE, local = jnp.asarray(1.0), jnp.asarray(1.0)
    step = lambda x: squares(learner(x)) * SCALE * local
    first = gradient(learner, step)
    SCALE = jnp.asarray(2.0)
    learner.reset()
    assert_close(gradient(learner, step), jax.tree.map(lambda g: 2 * g, first))
    local = jnp.asarray(3.0)
    learner.reset()
    assert_close(gradient(learner, step), jax.tree.map(lambda g: 6 * g, first))
