import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace.nn import LeakyRateReadout

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 3)))


@pytest.mark.parametrize(
    "dt, tau, ratio",
    [
        (1.0 * u.ms, 5.0 * u.ms, 0.2),
        (0.001 * u.second, 5.0 * u.ms, 0.2),
        (0.5, 2.0, 0.25),
        (1.0 * u.ms, jnp.array([1.0, 2.0]) * u.ms, np.array([1.0, 0.5])),
    ],
)
def test_readout_leaks_with_its_time_constant(dt, tau, ratio):
    with brainstate.environ.context(dt=dt):
        readout = LeakyRateReadout(3, 2, tau=tau)
    readout.init_state(batch_size=2)
    r = np.zeros((2, 2))
    for x in X:
        r = np.exp(-ratio) * r + np.asarray(x @ readout.W.value)
        np.testing.assert_allclose(readout(x), r, rtol=1e-6)
    readout.reset_state(batch_size=4)
    assert readout.r.value.shape == (4, 2) and not readout.r.value.any()


def test_readout_needs_a_time_step():
    with pytest.raises(ValueError, match=r"dt is not set(.|\n)*environ\.set\(dt="):
        LeakyRateReadout(3, 2)


def test_readout_refuses_times_of_different_kinds():
    with brainstate.environ.context(dt=0.1), pytest.raises(ValueError, match="a plain number"):
        LeakyRateReadout(3, 2, tau=5.0 * u.ms)


def test_readout_keeps_the_axes_before_the_last():
    with brainstate.environ.context(dt=1.0 * u.ms):
        wide, narrow = (LeakyRateReadout(n, m, w_init=0.5) for n, m in (((2, 3), (2, 4)), (3, 4)))
        with pytest.raises(ValueError, match=r"LeakyRateReadout: tau has the shape \(3,\)"):
            LeakyRateReadout(3, 2, tau=jnp.ones(3))
    for readout in (wide, narrow):
        readout.init_state(batch_size=2)
    x = X[:2]
    np.testing.assert_allclose(wide(x)[:, 0], narrow(x[:, 0]), rtol=1e-6)


def test_readout_has_a_parameter_and_a_state():
    with brainstate.environ.context(dt=1.0 * u.ms):
        readout = LeakyRateReadout(3, 2, r_init=0.5, name="out")
    readout.init_state()
    np.testing.assert_allclose(readout.r.value, [0.5, 0.5])
    assert readout.name == "out" and isinstance(readout.W, brainstate.ParamState)
    assert isinstance(readout.r, brainstate.HiddenState)
    assert LeakyRateReadout.__module__ == "braintrace.nn"
