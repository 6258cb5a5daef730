"""Rules whose eligibility waits for a reward, against their equations."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
from tests.oracle._reward import r_stdp_grad, reward_eprop_grad
from tests.rules.spiking import neurons

import braintrace
from braintrace.rules import r_stdp, reward_eprop, three_factor

T, I, N, O = 50, 4, 6, 2
RNG = np.random.default_rng(1)
XS = jnp.asarray(RNG.normal(size=(T, I)))
LATE = jnp.zeros(T).at[30].set(1.0).at[44].set(-0.5)  # a reward, and a punishment
PER_UNIT = jnp.asarray(RNG.normal(size=(T, N)))
WEIGHTS = {
    "w_in": jnp.asarray(0.7 * RNG.normal(size=(I, N))),
    "w_rec": jnp.asarray(0.3 * RNG.normal(size=(N, N))),
    "w_out": jnp.asarray(RNG.normal(size=(N, O))),
}
RULES = {
    "r_stdp": (r_stdp((0, 1.0)), r_stdp_grad),
    "coincidences": (
        r_stdp(lambda state: state[..., 0] > 1.0, decay=0.8, decay_pre=0.0, a_pre=2.0, a_post=0.0),
        lambda *a: r_stdp_grad(*a, d=0.8, a=0.0, a_pre=2.0, a_post=0.0),
    ),
    "reward_eprop": (reward_eprop(0.9), lambda *a: reward_eprop_grad(*a, d=0.9)),
}


def step(params, state, x):
    v, z = neurons(params, state, x)
    return (v, z), z @ params["w_out"]


def gradient(rule, modulator, xs=XS, batch=(), **options):
    net = braintrace.online(step, rule)
    state = (jnp.zeros((*batch, N)), jnp.zeros((*batch, N)))
    carry = net.init(WEIGHTS, state, xs[0])
    loss = lambda out: (out**2).sum()
    return net.grad(loss, **options)(WEIGHTS, carry, xs, modulator=modulator)[0]


def close(got, want):
    for k, g in want.items():
        assert np.abs(g).max() > 1e-2
        np.testing.assert_allclose(got[k], g, rtol=1e-10, atol=1e-12, err_msg=k)


@pytest.mark.parametrize("modulator, block", [(LATE, 7), (PER_UNIT, 50)], ids=["late", "per unit"])
@pytest.mark.parametrize("name", RULES)
def test_the_gradient_is_that_of_the_equations(name, modulator, block):
    rule, reference = RULES[name]
    want = reference(WEIGHTS, XS, np.asarray(modulator))
    close(gradient(rule, modulator, block_size=block), want)


@pytest.mark.parametrize("name", RULES)
def test_samples_are_summed(name):
    rule, reference = RULES[name]
    xs, M = jnp.stack([XS, -XS], 1), jnp.stack([LATE, 2 * LATE], 1)
    each = [reference(WEIGHTS, xs[:, i], np.asarray(M[:, i])) for i in range(2)]
    close(gradient(rule, M, xs, (2,)), {k: each[0][k] + each[1][k] for k in each[0]})


@pytest.mark.parametrize("name", RULES)
def test_training_at_every_step_goes_on_from_the_traces(name):
    """Weights that hardly change give the gradient of the sequence, update by update."""
    import optax

    rule, reference = RULES[name]
    net = braintrace.online(step, rule)
    carry = net.init(WEIGHTS, (jnp.zeros(N), jnp.zeros(N)), XS[0])
    rate, optimizer = 1e-9, optax.sgd(1e-9)
    run = net.train(lambda out: 0 * out.sum(), optimizer)
    new, *_ = run(WEIGHTS, optimizer.init(WEIGHTS), carry, XS, modulator=LATE)
    for k, g in reference(WEIGHTS, XS, np.asarray(LATE)).items():
        np.testing.assert_allclose((WEIGHTS[k] - new[k]) / rate, g, rtol=1e-3, atol=1e-3)


def test_a_reward_strengthens_what_was_active_before_it():
    rule = r_stdp(lambda state: state[..., 0] > 1.0, a_post=0.0)
    active = jnp.abs(XS)
    got = gradient(rule, LATE.at[44].set(0.0), active)["w_in"]
    assert (got <= 0).all() and (got < 0).any()
    published = gradient(three_factor(), LATE.at[44].set(0.0), active)["w_in"]
    assert (published >= 0).all()  # it is descended as a derivative of a loss


def test_read_outs_have_the_gradient_of_the_loss():
    out = gradient(RULES["reward_eprop"][0], LATE)["w_out"]
    net = braintrace.online(step, "no_trace")
    carry = net.init(WEIGHTS, (jnp.zeros(N), jnp.zeros(N)), XS[0])
    within = net.grad(lambda out: (out**2).sum())(WEIGHTS, carry, XS)[0]
    np.testing.assert_allclose(out, within["w_out"], rtol=1e-12)


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = braintrace.nn.LIFCell(3, 4, tau=10.0), braintrace.nn.Linear(4, 2)

    def update(self, x):
        return self.out(self.cell(x))


@pytest.mark.parametrize(
    "name, options",
    [("r_stdp", {"post": lambda state: state[..., 0] > 1.0}), ("reward_eprop", {"decay": 0.8})],
)
def test_a_learner_of_layers_takes_the_modulator_with_a_call(name, options):
    xs = 3 * jnp.ones((6, 2, 3))
    with brainstate.environ.context(dt=1.0), brainstate.random.seed_context(0):
        learner = braintrace.compile(Net(), name, xs[0], batch_size=2, **options)
        rewards = jnp.arange(6.0)
        loss = lambda x, m: learner(x, modulator=m).sum()
        grads = learner.etrace_grad(xs, rewards, step_fn=loss)
        assert type(learner) is braintrace.Learner and name in str(learner)
        assert np.abs(grads["cell", "W", "weight"]["weight"]).max() > 0
        with pytest.raises(RuntimeError, match=f"{name}.*modulator"):
            learner(xs[0])


def test_what_fits_no_unit_is_refused():
    with pytest.raises(TypeError, match="post has type str"):
        r_stdp("spikes")
    with pytest.raises(ValueError, match=r"post=\(2, 1.0\).*2 state"):
        gradient(r_stdp((2, 1.0)), LATE)
    with pytest.raises(ValueError, match=r"post.*\(6, 1\)"):
        gradient(r_stdp(lambda state: state[..., :1]), LATE)
    with pytest.raises(ValueError, match=r"decay=0\."):
        reward_eprop(0.0)
    with pytest.raises(ValueError, match="no windows"):
        braintrace.online(step, reward_eprop(), window=4)
    with pytest.raises(ValueError, match="no windows"):
        braintrace.online(step, r_stdp(jnp.sum), window=4)


def test_an_operator_without_pairs_is_refused():
    def table(params, h, i):
        h = 0.9 * h + params["table"][i] * params["gain"]
        return h, h

    net = braintrace.online(table, r_stdp(lambda state: state[..., 0] > 1.0))
    params = {"table": jnp.ones((5, N)), "gain": jnp.ones(N)}
    with pytest.raises(braintrace.NotSupportedError, match="pairs"):
        net.init(params, jnp.zeros(N), jnp.asarray(0))
