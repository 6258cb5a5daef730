"""What is around a call: environment, attributes, random states, failures."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .reference import (
    XS,
    Leaky,
    assert_close,
    bptt,
    leaky,
    learner_of,
    online,
    squares,
    values,
)


class Clocked(Leaky):
    """Reads t, i, dt and fit of the call."""

    def update(self, x):
        t, i = brainstate.environ.get("t"), brainstate.environ.get("i")
        gain = t + 10 * i + 100 * brainstate.environ.get("dt")
        x = x * (gain if brainstate.environ.get("fit") else -1.0)
        return super().update(x)


def clocked():
    model = Clocked()
    brainstate.nn.init_all_states(model)
    with brainstate.environ.context(t=0.0, i=0, dt=0.1, fit=True):
        algo = learner_of(model, XS[0])
    return algo


def clock_reference(fit=True):
    model, outs = leaky(), []
    for i, x in enumerate(XS):
        outs.append(model(x * (0.1 * i + 10 * i + 100 * 0.2 if fit else -1.0)))
    return jnp.stack(outs)


KINDS = {"python": lambda a: a, "numpy": np.float64, "jax": jnp.asarray}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("fit", [True, False])
def test_environment_values_are_those_of_an_eager_call(kind, fit):
    algo, outs = clocked(), []
    for i, x in enumerate(XS):
        with brainstate.environ.context(t=kind(0.1 * i), i=i, dt=kind(0.2), fit=fit):
            outs.append(algo(x))
    assert_close(jnp.stack(outs), clock_reference(fit))


@pytest.mark.parametrize("fit", [True, False])
def test_environment_values_are_those_of_a_jitted_call_and_of_a_loop(fit):
    def step(algo, i, x):
        with brainstate.environ.context(t=0.1 * i, i=i, dt=0.2, fit=fit):
            return algo(x)

    a, b = clocked(), clocked()
    fast = brainstate.transform.jit(lambda i, x: step(a, i, x))
    jitted = jnp.stack([fast(jnp.asarray(i), x) for i, x in enumerate(XS)])
    looped = brainstate.transform.for_loop(lambda i, x: step(b, i, x), jnp.arange(5), XS)
    assert_close(jitted, clock_reference(fit))
    assert_close(looped, clock_reference(fit))


def test_environment_values_count_in_the_gradient_of_an_eager_call():
    algo = clocked()
    total = None
    for i, x in enumerate(XS):
        with brainstate.environ.context(t=0.1 * i, i=i, dt=0.2, fit=True):
            g = online(algo, [x])
        total = g if total is None else jax.tree.map(jnp.add, total, g)
    scaled = jnp.stack([x * (0.1 * i + 10 * i + 100 * 0.2) for i, x in enumerate(XS)])
    assert_close(total, bptt(leaky(), scaled))


@pytest.mark.parametrize("value", [2.0, 2, jnp.asarray(2.0)], ids=["float", "int", "array"])
def test_attribute_changed_between_calls_counts(value):
    class Gained(Leaky):
        gain = type(value)(1) if not isinstance(value, jax.Array) else jnp.asarray(1.0)

        def update(self, x):
            return super().update(self.gain * x)

    model, twin = Gained(), leaky()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    algo(XS[0]), twin(XS[0])
    model.gain = value
    assert_close(algo(XS[1]), twin(2 * XS[1]))


class Noisy(Leaky):
    def __init__(self):
        super().__init__()
        self.drop = brainstate.nn.Dropout(0.5)

    def update(self, x):
        return super().update(self.drop(x))


@pytest.mark.parametrize("way", ["eager", "jit", "for_loop"])
def test_random_states_advance_with_every_call(way):
    model = Noisy()
    brainstate.nn.init_all_states(model)
    brainstate.random.seed(0)
    with brainstate.environ.context(fit=True):
        algo = learner_of(model, XS[0])

        def step(x):
            model.h.value = jnp.zeros(3)
            return algo(x)

        xs = jnp.ones((12, 2))
        if way == "for_loop":
            outs = brainstate.transform.for_loop(step, xs)
        else:
            run = brainstate.transform.jit(step) if way == "jit" else step
            outs = jnp.stack([run(x) for x in xs])
    assert len(np.unique(np.asarray(outs)[:, 0])) > 1


def test_random_draws_are_those_of_the_bare_model():
    outs = []
    for learn in (False, True):
        model = Noisy()
        brainstate.nn.init_all_states(model)
        with brainstate.environ.context(fit=True):
            run = learner_of(model, XS[0]) if learn else model
            brainstate.random.seed(3)
            outs.append(jnp.stack([run(x) for x in XS]))
    assert_close(outs[1], outs[0])


class Fragile(Leaky):
    bad = False

    def update(self, x):
        self.h.value = self.h.value * 1.0
        if self.bad:
            raise RuntimeError("broken")
        return super().update(x)


@pytest.mark.parametrize("way", ["eager", "jit", "grad", "for_loop", "etrace_grad"])
def test_failed_call_leaves_the_learner_usable(way):
    model = Fragile()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    algo(XS[0])
    before = values(algo)
    grad = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)
    run = {
        "eager": lambda: algo(XS[1]),
        "jit": lambda: brainstate.transform.jit(algo)(XS[1]),
        "grad": lambda: grad(XS[1]),
        "for_loop": lambda: brainstate.transform.for_loop(algo, XS),
        "etrace_grad": lambda: algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x))),
    }[way]
    model.bad = True
    with pytest.raises(RuntimeError, match="broken"):
        run()
    assert_close(values(algo), before, 0)
    model.bad = False
    twin = leaky()
    twin(XS[0])
    assert_close(algo(XS[1]), twin(XS[1]))


def test_refused_call_leaves_states_and_traces_as_they_were():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    before = values(algo)
    for bad in (jnp.ones(3), jnp.ones((2, 2))):
        with pytest.raises(ValueError):
            algo(bad)
    with pytest.raises(ValueError):
        algo.reset_state(batch_size=4)
    assert_close(values(algo), before, 0)
