"""States as users make them, of any tree and type, and example inputs that are only shapes."""

import brainpy
import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace

from .reference import compiles, normal, squares

XS = normal(3, 6, 2)
BATCHED = normal(4, 6, 5, 2)
Shape = jax.ShapeDtypeStruct


class Adaptive(brainstate.nn.Module):
    """One state of a float and an integer leaf: a voltage, and how often it was high."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(normal(0, 2, 3))

    def init_state(self, batch_size=None, **kwargs):
        shape = (3,) if batch_size is None else (batch_size, 3)
        self.s = brainstate.ShortTermState({"n": jnp.zeros(shape, int), "v": jnp.zeros(shape)})

    def update(self, x):
        n, v = self.s.value["n"], self.s.value["v"]
        v = 0.8 * jnp.tanh(v) + braintrace.matmul(x, self.w.value) - 0.3 * n
        self.s.value = {"n": n + (v > 0.2), "v": v}
        return v


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl", "snap"])
def test_state_of_a_float_and_an_integer_leaf_is_exact(rule):
    learner = braintrace.compile(Adaptive(), rule, XS[0], strict=True)
    found = braintrace.verify.compare(learner, lambda net, x: squares(net(x)), XS)
    assert found.max_error < 1e-9
    learner.etrace_evolve(XS)
    assert learner.model4compile.s.value["n"].sum() > 0  # the integer leaf takes part


@pytest.mark.parametrize("options", [{"vjp_method": "multi-step"}, {"vmap": True}], ids=str)
def test_state_of_a_float_and_an_integer_leaf_with_a_batch(options):
    chunk = None if options.get("vmap") else 3
    wrap = braintrace.MultiStepData if chunk else lambda x: x
    learner = braintrace.compile(Adaptive(), "d_rtrl", BATCHED[0], batch_size=5, **options)
    model = Adaptive()
    brainstate.nn.init_all_states(model, batch_size=5)
    want = braintrace.verify.bptt_grad(model, lambda net, x: squares(net(x)), BATCHED)
    losses = lambda y: (y**2).sum((1, 2)) if chunk else squares(y)
    got = learner.etrace_grad(
        BATCHED, step_fn=lambda x: losses(learner(wrap(x))), reduction="sum", chunk_size=chunk
    )
    (found,), (truth,) = got.values(), want.values()
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-9 * abs(truth).max())


def test_batch_of_a_state_of_a_float_and_an_integer_leaf_can_change():
    learner = braintrace.compile(Adaptive(), "d_rtrl", BATCHED[0], batch_size=5)
    learner.reset(batch_size=2)
    assert learner(BATCHED[0, :2]).shape == (2, 3)
    brainstate.nn.init_all_states(learner.model4compile, batch_size=4)
    with pytest.raises(ValueError, match=r"\bs\b.*\(4, 3\).*traces.*\(2, 3"):
        learner(BATCHED[0, :2])


# ------------------------------------------------------------------------------------ weak types


class Weak(brainstate.nn.Module):
    """Everything begins weakly typed, as `jnp.full` without a type makes it."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full((2, 3), 0.3))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.full(3, 0.0) * u.mV)

    def reset_state(self, batch_size=None, **kwargs):
        self.h.value = jnp.full(3, 0.0) * u.mV

    def update(self, x):
        self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value) * u.mV
        return self.h.value.to_decimal(u.mV)


def lif():
    """A spiking layer of brainpy, whose voltage begins weakly typed."""

    class Layer(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(normal(0, 2, 3))
            self.lif = brainpy.state.LIF(3)

        def update(self, x):
            return self.lif(braintrace.matmul(x, self.w.value) * u.mA)

    return Layer()


@pytest.mark.parametrize("make", [Weak, lif])
def test_weakly_typed_states_compile_once(make, monkeypatch):
    analyses = []
    analyse = braintrace.learner._learner.plan_of
    counted = lambda *args: analyses.append(None) or analyse(*args)
    monkeypatch.setattr(braintrace.learner._learner, "plan_of", counted)
    with brainstate.environ.context(dt=1.0 * u.ms):
        fresh = make()
        brainstate.nn.init_all_states(fresh)
        leaves = jax.tree.leaves([s.value for s in fresh.states().values()])
        assert any(a.weak_type for a in leaves)  # else this tests nothing
        learner = braintrace.compile(make(), "d_rtrl", XS[0])
        learner(XS[0])
        assert compiles(lambda: learner(XS[1])) == 0
        learner.reset()
        assert compiles(lambda: learner(XS[1])) == 0
        brainstate.nn.reset_all_states(learner)
        assert compiles(lambda: learner(XS[1])) == 0
    assert len(analyses) == 1


def test_weakly_typed_states_of_a_mapped_learner_become_strong():
    learner = braintrace.compile(Weak(), "d_rtrl", BATCHED[0], vmap=True, batch_size=5)
    hidden = lambda: learner.module.model4compile.h.value.mantissa
    assert not hidden().weak_type
    learner.reset()
    assert not hidden().weak_type and hidden().shape == (5, 3)


# ----------------------------------------------------------------------------- shapes as examples


class Nested(Adaptive):
    """Takes a dict of quantities and a key."""

    def update(self, inputs, *, key):
        noise = jax.random.normal(key, (2,))
        return super().update(inputs["x"].to_decimal(u.mV) + noise)


def test_examples_may_be_shapes():
    x, key = {"x": XS[0] * u.mV}, jax.random.key(0)
    shapes = jax.eval_shape(lambda: (x, key))
    learner = braintrace.compile(Nested(), "d_rtrl", shapes[0], kwargs={"key": shapes[1]})
    other = braintrace.compile(Nested(), "d_rtrl", x, kwargs={"key": key})
    np.testing.assert_array_equal(learner(x, key=key), other(x, key=key))
    learner.compile_graph(shapes[0], key=shapes[1])  # the same again: nothing to do
    with pytest.raises(ValueError, match=r"compiled"):
        learner.compile_graph({"x": Shape((3,), float) * u.mV}, key=shapes[1])


@pytest.mark.parametrize(
    "example, options",
    [
        (Shape((5, 2), float), {"batch_size": 5}),
        (Shape((5, 2), float), {"batch_size": 5, "vmap": True}),
        (braintrace.MultiStepData(Shape((6, 5, 2), float)), {"batch_size": 5}),
    ],
    ids=["batch", "vmap", "window"],
)
def test_shape_as_an_example_with_a_batch(example, options):
    learner = braintrace.compile(Adaptive(), "d_rtrl", example, **options)
    other = braintrace.compile(Adaptive(), "d_rtrl", BATCHED[0], batch_size=5)
    np.testing.assert_allclose(learner(BATCHED[0]), other(BATCHED[0]), rtol=1e-12)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="maps 4 samples"):
        braintrace.compile(Adaptive(), "d_rtrl", Shape((5, 2), float), vmap=True, batch_size=4)
    with pytest.raises(ValueError, match="has no elements"):
        braintrace.compile(Adaptive(), "d_rtrl", Shape((0,), float))
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        braintrace.compile(Adaptive(), "d_rtrl", XS[0])(Shape((2,), float))
