"""A spiking network without spikes is reported, once."""

import warnings

import brainpy.state as bp
import brainstate
import jax
import jax.numpy as jnp
import pytest
import saiunit as u

import braintrace as bt

XS = jnp.ones((6, 2))


@jax.custom_vjp
def fire(v):
    return (v > 0).astype(v.dtype)


fire.defvjp(lambda v: (fire(v), v), lambda v, ct: (ct / (1 + v**2),))


class Net(brainstate.nn.Module):
    """Leaky units behind a weight; what comes out is a function of the voltage."""

    def __init__(self, weight, function):
        super().__init__()
        self.w, self.function = brainstate.ParamState(weight * jnp.ones((2, 3))), function

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x):
        self.v.value = 0.9 * self.v.value + bt.matmul(x, self.w.value)
        return self.function(self.v.value - 1)


class Population(brainstate.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.w, self.neuron = bt.nn.Linear(2, 3, w_init=weight, b_init=None), bp.LIF(3)

    def update(self, x):
        return self.neuron(self.w(x) * u.mA)


def texts(model, sequences=(XS,), transform=lambda f: f):
    """The warnings of gradients of these sequences, with one learner."""
    with brainstate.environ.context(dt=1.0 * u.ms), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        learner = bt.compile(model, "d_rtrl", XS[0])
        for xs in sequences:
            loss = lambda x: jnp.sum(learner(x))
            transform(lambda xs: learner.etrace_grad(xs, step_fn=loss))(xs)  # noqa: B023
    return [str(w.message) for w in seen if "spiked" in str(w.message)]


@pytest.mark.parametrize(
    "build", [lambda w: Net(w, fire), lambda w: Net(w, bt.nn.surrogate("triangle")), Population]
)
def test_silent_network_is_reported_once_and_one_that_spikes_is_not(build):
    (text,) = texts(build(0.01), [XS, XS])
    assert text.startswith("no unit spiked in this sequence.\n  where: ")
    assert "why:" in text and "do:" in text
    assert texts(build(3.0)) == []


def test_the_last_step_counts():
    v = sum(0.9**k for k in range(6)) * 2 * 0.5  # above the threshold in the last step only
    below = 1 / (v / 0.5) + 1e-3
    assert texts(Net(below, fire)) == []
    assert texts(Net(below, fire), [XS[:5]]) != []


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.relu, jax.nn.sigmoid])
def test_units_that_do_not_spike_by_nature_are_not_reported(function):
    assert texts(Net(0.01, function)) == []


def test_under_jit_nothing_is_reported_until_a_plain_call():
    assert texts(Net(0.01, fire), transform=brainstate.transform.jit) == []
