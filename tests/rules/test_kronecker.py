"""KF-RTRL finds samples in the step, so a learner and a plain function have the same factors."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import conv, einsum, lora_matmul, matmul, online
from braintrace.rules import kf_rtrl, pp_prop

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


FORMS = {
    "einsum": lambda x, w: einsum("bi,io->bo", x, w),
    "conv": lambda x, w: conv(x[..., None], w.T[..., None], padding="VALID")[..., 0],
    "lora_matmul": lambda x, w: lora_matmul(x, w, jnp.eye(w.shape[1])),
}


@pytest.mark.parametrize("rule", [kf_rtrl(3), pp_prop(0.9)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_operator_that_writes_a_product_makes_no_difference(rule, form):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)), "u": 0.3 * rng.normal(size=(4, 4))}
    xs = jnp.asarray(rng.normal(size=(5, 2, 3)))

    def grads(product):
        def step(p, h, x):
            h = 0.6 * h + jnp.tanh(product(x, p["w"]) + product(h, p["u"]))
            return h, h

        net = online(step, rule, marked_only=True)
        carry = net.init(params, jnp.zeros((2, 4)), xs[0])
        return jax.grad(lambda p: (net.scan(p, carry, xs)[1] ** 2).sum())(params)

    for a, b in zip(*map(jax.tree.leaves, (grads(FORMS[form]), grads(matmul))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.parametrize(
    ("rule", "options"),
    [("kf_rtrl", {}), ("pp_prop", {"decay_or_rank": 0.9}), ("ottt", {"leak": 0.9})],
)
def test_spikes_of_any_type_have_the_gradient_of_floating_ones(rule, options):
    params, spikes = {"w": W, "r": R}, XS > 0

    def plain(params, h, x):
        h = 0.5 * h + jnp.tanh(x @ params["w"] + h @ params["r"])
        return h, h

    def gradient(xs):
        net = online(plain, rule, **options)
        carry = net.init(params, jnp.zeros((2, 3)), xs[0])
        return net.grad(lambda out: (out**2).sum())(params, carry, (xs,))[0]

    want = gradient(spikes.astype("float64"))
    for dtype in ("bool", "int32"):
        got = gradient(spikes.astype(dtype))
        for k in params:
            np.testing.assert_allclose(got[k], want[k], rtol=1e-12)
