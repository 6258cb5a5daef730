import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace as bt
from braintrace.nn import FilteredReadout, LeakyRateReadout, LIFCell
from braintrace.verify import bptt_grad

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
    with pytest.raises(ValueError, match=r"\bdt\b(.|\n)*environ\.set\(dt="):
        LeakyRateReadout(3, 2)


def test_readout_refuses_times_of_different_kinds():
    with brainstate.environ.context(dt=0.1), pytest.raises(ValueError, match="a plain number"):
        LeakyRateReadout(3, 2, tau=5.0 * u.ms)


def test_readout_keeps_the_axes_before_the_last():
    with brainstate.environ.context(dt=1.0 * u.ms):
        wide, narrow = (LeakyRateReadout(n, m, w_init=0.5) for n, m in (((2, 3), (2, 4)), (3, 4)))
        with pytest.raises(ValueError, match=r"LeakyRateReadout.*tau.*\(3,\)"):
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


class Network(brainstate.nn.Module):
    def __init__(self, readout, **options):
        super().__init__()
        draw = np.random.default_rng(3).normal
        self.cell = LIFCell(3, 5, w_init=jnp.asarray(draw(size=(3, 5))), **options)
        self.readout = readout(5, 2, tau=8.0 * u.ms, w_init=jnp.asarray(draw(size=(5, 2))))

    def update(self, x):
        return self.readout(self.cell(x))


XS = jnp.asarray(np.random.default_rng(1).normal(size=(20, 2, 3)))


def learner_of(readout, **options):
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = Network(readout, tau=10.0 * u.ms, **options)
    return model, bt.compile(model, "d_rtrl", XS[0], batch_size=2)


def gradients(readout, **options):
    """Outputs of a small network, its report, and the gradients of D_RTRL and BPTT."""
    (model, learner), xs = learner_of(readout, **options), XS
    loss = lambda x: jnp.sum(jnp.sin(learner(x)))
    learner.reset()
    online = learner.etrace_grad(xs, step_fn=loss, reduction="sum")
    learner.reset()
    exact = bptt_grad(model, lambda model, x: jnp.sum(jnp.sin(model(x))), xs)
    learner.reset()
    outs = learner.etrace_evolve(xs, return_outputs=True)
    return outs, learner.report, online, exact


def test_a_filter_before_the_weight_is_the_same_function_and_exact():
    before, behind = (
        gradients(kind, recurrent=False) for kind in (FilteredReadout, LeakyRateReadout)
    )
    np.testing.assert_allclose(before[0], behind[0], rtol=1e-12)
    W = "cell", "W", "weight"
    for _, report, online, exact in (before, behind):
        error = np.abs(online[W]["weight"] - exact[W]["weight"]).max()
        assert (error < 1e-12) == report.parameters[W].exact
    assert before[1].parameters[W].exact and not behind[1].parameters[W].exact


def test_the_report_says_that_the_filter_could_be_before_the_weight():
    hint = "readout.r is a filter behind a weight: the same function"
    for recurrent in (False, True):
        report = learner_of(LeakyRateReadout, recurrent=recurrent)[1].report
        assert hint in str(report), report
        assert not any(d.do for d in report.parameters["readout", "W"].dropped)
        assert any(hint in line for line in str(report.advice).split("\n"))  # what plan prints
    report = learner_of(FilteredReadout, recurrent=True)[1].report
    assert "filter behind a weight" not in str(report)
