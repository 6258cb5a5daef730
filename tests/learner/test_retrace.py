"""A call is traced again if anything changed that a name of the step leads to, and only then."""

import functools
import itertools
import random
import types
from dataclasses import dataclass

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.frontend import key_of

from .reference import XS, Leaky, assert_close, leaky, learner_of, squares, values

GAIN = 1.0
SETTINGS = types.ModuleType("settings")  # stands for a module of the user's
SETTINGS.inner = types.ModuleType("settings.inner")
SETTINGS.inner.gain = 1.0
SETTINGS.inner.inner = SETTINGS


class Config:
    gain = 1.0


@dataclass(slots=True)
class Options:
    gain: float = 1.0


class Filter(brainstate.ShortTermState):
    gain = 1.0


def by_global(x):
    return GAIN * by_global.gain * x


by_global.gain = 1.0


def closure(gain):
    def by_closure(x):
        return gain * x

    def change(new):
        nonlocal gain
        gain = new

    return by_closure, change


BY_CLOSURE, CHANGE = closure(1.0)
NAMELESS = {"gain": 1.0}  # code of a notebook or a document may have no module
exec("def by_exec(x):\n    return gain * x", NAMELESS)
BY_EXEC = NAMELESS["by_exec"]


def scaled(x, gain):
    return gain * x


class Net(Leaky):
    """x is multiplied with everything that a program may take from somewhere."""

    class_gain = 1.0

    def __init__(self):
        super().__init__()
        self.gain = 1.0
        self.flag = False
        self.array = np.ones(2)
        self.nested = {"list": [1.0], "set": {"a"}}
        self.options = Options()
        self.partial = functools.partial(scaled, gain=1.0)
        self.filter = Filter(jnp.zeros(2))
        self.jitted = jnp.ones(())

    @property
    def doubled(self):
        return 2.0 * self.gain

    def update(self, x):
        print("traced")
        x = self.doubled * self.class_gain * x * (3.0 if self.flag else 1.0) * self.array
        x = self.nested["list"][0] * len(self.nested["set"]) * self.options.gain * x
        x = by_global(BY_CLOSURE(self.partial(x))) * Config.gain * SETTINGS.inner.gain * self.jitted
        x = BY_EXEC(x) * self.filter.gain * brainstate.environ.get("dt", default=1.0)
        return super().update(x)


CHANGES = {
    "attribute": lambda net, new: setattr(net, "gain", new),
    "flag": lambda net, new: setattr(net, "flag", new == 3.0),
    "jax array": lambda net, new: setattr(net, "jitted", jnp.asarray(new)),
    "numpy array in place": lambda net, new: net.array.fill(new),
    "list": lambda net, new: net.nested["list"].__setitem__(0, new),
    "set": lambda net, new: net.nested.update(set={"a"} if new == 1.0 else {"a", "b", "c"}),
    "slot": lambda net, new: setattr(net.options, "gain", new),
    "partial": lambda net, new: setattr(net, "partial", functools.partial(scaled, gain=new)),
    "state": lambda net, new: setattr(net.filter, "gain", new),
    "class attribute": lambda net, new: setattr(Net, "class_gain", new),
    "another class": lambda net, new: setattr(Config, "gain", new),
    "global": lambda net, new: globals().update(GAIN=new),
    "attribute of a function": lambda net, new: setattr(by_global, "gain", new),
    "global without a module": lambda net, new: NAMELESS.update(gain=new),
    "closure": lambda net, new: CHANGE(new),
    "method": lambda net, new: setattr(net, "update", lambda x: Net.update(net, new * x)),
    "dt": lambda net, new: brainstate.environ.set(dt=new),
}


def test_attributes_of_python_modules_are_for_recompile(learner, capsys):
    first = call(learner)
    capsys.readouterr()
    SETTINGS.inner.gain = 3.0
    try:
        assert_close(call(learner), first, 0)
        learner.recompile()
        assert jnp.abs(call(learner) - first).max() > 0.1
        assert "traced" in capsys.readouterr().out
    finally:
        SETTINGS.inner.gain = 1.0
        learner.recompile()


@pytest.fixture(scope="module")
def learner():
    model = Net()
    brainstate.nn.init_all_states(model)
    return learner_of(model, XS[0])


def call(learner, x=XS[0]):
    learner.reset()
    return learner(x)


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_counts_in_the_next_call(name, learner, capsys):
    change, net = CHANGES[name], learner.model4compile
    outs = {gain: leaky()(2.0 * gain * XS[0]) for gain in (1.0, 3.0)}
    try:
        assert_close(call(learner), outs[1.0], 1e-12)
        capsys.readouterr()
        assert_close(call(learner), outs[1.0], 1e-12)
        assert capsys.readouterr().out == ""
        change(net, 3.0)
        assert_close(call(learner), outs[3.0], 1e-12)
        assert "traced" in capsys.readouterr().out
        grads = brainstate.transform.grad(lambda x: squares(call(learner, x)), learner.param_states)
        model = leaky()
        bare = brainstate.transform.grad(
            lambda x: squares(model(6.0 * x)), model.states(brainstate.ParamState)
        )
        assert_close(dict(grads(XS[0])), dict(bare(XS[0])), 1e-12)
        assert capsys.readouterr().out == ""
    finally:
        change(net, 1.0)
        brainstate.environ.pop("dt", None)
        vars(net).pop("update", None)
    assert_close(call(learner), outs[1.0], 1e-12)


UNCLEAR = {
    "a counter of calls": lambda net: vars(net).update(count=vars(net).get("count", 0) + 1),
    "an iterator": lambda net: next(net.iterator),
    "a generator of numpy": lambda net: net.generator.normal(),
    "a method of a generator": lambda net: net.draw(),
    "a very deep list": lambda net: net.deep,
    "a very long list": lambda net: net.long,
    "a generator of Python": lambda net: net.random.random(),
}


class Busy(Leaky):
    def __init__(self, name):
        super().__init__()
        self.act = UNCLEAR[name]
        if name == "an iterator":
            self.iterator = itertools.count()
        if name == "a generator of numpy":
            self.generator = np.random.default_rng(0)
        if name == "a method of a generator":
            self.draw = np.random.default_rng(0).normal
        if name == "a very deep list":
            self.deep = functools.reduce(lambda inner, _: [inner], range(900), [])
        if name == "a very long list":
            self.long = [[] for _ in range(3_000)]
        if name == "a generator of Python":
            self.random = random.Random(0)

    def update(self, x):
        print("traced")
        self.act(self)
        return super().update(x)


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_cannot_be_compared_is_traced_at_every_call(name, capsys):
    model = Busy(name)
    brainstate.nn.init_all_states(model)
    learner = learner_of(model, XS[0])
    for _ in range(2):
        capsys.readouterr()
        learner(XS[0])
        assert capsys.readouterr().out == "traced\n"


class Raises:
    """An attribute of a model, about which nothing can be asked."""

    __hash__ = None

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError("==")

    def __repr__(self):
        raise RuntimeError("repr")


def test_objects_that_raise_whatever_is_asked_are_attributes_like_others():
    def gradient(model):
        learner = learner_of(model, XS[0])
        assert str(learner.report)
        return learner.etrace_grad(XS, step_fn=lambda x: squares(learner(x)))

    odd = leaky()
    odd.odd = Raises()
    assert_close(gradient(odd), gradient(leaky()))


def test_state_with_a_hook_is_traced_at_every_call(learner, capsys):
    calls = []
    handle = learner.model4compile.h.register_hook("read", lambda ctx: calls.append(ctx))
    call(learner)
    capsys.readouterr()
    call(learner)
    assert capsys.readouterr().out == "traced\n"
    learner.model4compile.h.unregister_hook(handle)


def test_other_batch_sizes_types_and_settings_are_other_programs(capsys):
    model = Net()
    learner = braintrace.compile(model, "d_rtrl", XS[:2], batch_size=2)
    learner(XS[:2])
    learner.reset(batch_size=3)
    capsys.readouterr()
    assert learner(XS[:3]).shape == (3, 2)
    assert "traced" in capsys.readouterr().out
    learner.reset(batch_size=2)
    capsys.readouterr()
    assert_close(learner(XS[:2]), leaky(2)(2.0 * XS[:2]), 1e-12)
    assert capsys.readouterr().out == ""
    with jax.default_matmul_precision("tensorfloat32"):
        learner(XS[:2])
    assert "traced" in capsys.readouterr().out
    brainstate.nn.init_all_states(model, batch_size=2)  # other state objects
    learner(XS[:2])
    assert "traced" in capsys.readouterr().out
    assert jnp.abs(model.h.value).max() > 0


def test_untraced_call_moves_states_and_traces_and_donates_nothing(learner):
    call(learner)
    before = values(learner)
    arrays = jax.tree.leaves(before)
    jitted = brainstate.transform.jit(learner)
    learner(XS[1])
    after = values(learner)
    for path, state in learner.states().items():
        state.value = before[path]
    jitted(XS[1])
    assert not any(a.is_deleted() for a in arrays if isinstance(a, jax.Array))
    assert_close(after, values(learner), 1e-12)
    assert jnp.abs(after["model4compile", "h"] - before["model4compile", "h"]).max() > 0.1


def test_traces_of_one_transformation_are_not_used_in_another(learner):
    """A value of a running trace that a model reads is never stored."""
    net = learner.model4compile

    def with_gain(gain):
        net.gain = gain
        try:
            return squares(call(learner))
        finally:
            net.gain = 1.0

    derivative = brainstate.transform.jit(brainstate.transform.grad(with_gain, argnums=0))
    want = jax.grad(lambda g: squares(leaky()(2.0 * g * XS[0])))
    for g in (1.0, 2.0):
        assert_close(derivative(g), want(g), 1e-12)


def test_model_with_a_value_of_a_running_trace_has_no_key(learner):
    """Also with one that the step does not read: a key would hold on to it."""
    net, keys = learner.model4compile, []

    def look(x):
        net.unread = x
        keys.append(key_of((XS[0],), net))
        return x

    try:
        jax.jit(look)(1.0)
        assert keys == [None]
        assert look(1.0) and keys[1] is not None
    finally:
        del net.unread


class Pair(Leaky):
    """Two states of one shape: `update` adds to the first and returns it."""

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.other = brainstate.HiddenState(jnp.ones(self.n))

    def update(self, x):
        print("traced")
        self.other.value = 0.5 * self.other.value
        return super().update(x)


def test_states_that_change_places_are_another_program(capsys):
    model, bare = Pair(), Pair()
    for net in (model, bare):
        brainstate.nn.init_all_states(net)
    learner = learner_of(model, XS[0])
    learner(XS[0]), learner(XS[0]), bare(XS[0]), bare(XS[0])
    for net in (model, bare):
        net.h, net.other = net.other, net.h
    capsys.readouterr()
    assert_close(learner(XS[1]), bare(XS[1]), 1e-12)
    assert capsys.readouterr().out.count("traced") == 2
    assert_close(model.other.value, bare.other.value, 1e-12)
