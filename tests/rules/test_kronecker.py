"""KF-RTRL finds samples in the step, so a learner and a plain function have the same factors."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

XS = jax.random.normal(jax.random.PRNGKey(0), (4, 2, 3), "float64")
W = 0.5 * jax.random.normal(jax.random.PRNGKey(1), (3, 3), "float64")
R = 0.5 * jax.random.normal(jax.random.PRNGKey(2), (3, 3), "float64")


def step(params, h, x):
    y = braintrace.matmul(x, params["w"]) + braintrace.matmul(h, params["r"])
    h = jnp.tanh(0.5 * h + y)
    return h, h


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.r = brainstate.ParamState(W), brainstate.ParamState(R)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.h.value, out = step({"w": self.w.value, "r": self.r.value}, self.h.value, x)
        return out


def test_online_and_the_learner_have_a_factor_per_sample_and_the_same_gradient():
    params = {"w": W, "r": R}
    net = braintrace.online(step, "kf_rtrl")
    carry = net.init(params, jnp.zeros((2, 3)), XS[0])
    assert {t["one"].shape for t in carry.traces} == {(2,)}
    grads = net.grad(lambda out: (out**2).sum())(params, carry, (XS,))[0]
    learner = braintrace.compile(Net(), "kf_rtrl", XS[0], batch_size=2)
    loss = lambda x: (learner(x) ** 2).sum()
    want = learner.etrace_grad(XS, step_fn=loss, reduction="sum")
    for k in params:
        np.testing.assert_allclose(grads[k], want[k,], rtol=1e-12)
