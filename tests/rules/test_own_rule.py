"""A new rule with a new trace is one file and one row: `own_rule.py`."""

import sys
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import rules

sys.path.insert(0, str(Path(__file__).parent))  # for `own_rule`; tests are no package

from own_rule import ROW, one_back

XS = jnp.asarray([0.5, -1.0, 2.0, 0.3])


def step(params, h, x):
    h = jnp.tanh(params["a"] * h + params["b"] * x)
    return h, h


def one_back_gradient(params, h):
    """The gradient of each loss through its own step and the one before, written out."""
    total = {k: 0.0 for k in params}
    before = None
    for x in XS:

        def loss(p, h=h, x=x, before=before):
            if before is not None:
                h = step(p, *before)[0]
            return step(p, h, x)[1] ** 2

        total = jax.tree.map(jnp.add, total, jax.grad(loss)(params))
        before, h = (h, x), step(params, h, x)[0]
    return total


def test_the_rule_runs_on_plain_functions():
    params, h = {"a": jnp.asarray(0.7), "b": jnp.asarray(0.4)}, jnp.asarray(0.1)
    net = braintrace.online(step, one_back())
    carry = net.init(params, h, XS[0])
    grads = net.grad(lambda out: out**2)(params, carry, (XS,))[0]
    want = one_back_gradient(params, h)
    for k in params:
        np.testing.assert_allclose(grads[k], want[k], rtol=1e-12)


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (
            brainstate.ParamState(jnp.asarray(0.7)),
            brainstate.ParamState(jnp.asarray(0.4)),
        )

    def init_state(self, **kwargs):
        self.h = brainstate.HiddenState(jnp.asarray(0.1))

    def update(self, x):
        self.h.value, out = step({"a": self.a.value, "b": self.b.value}, self.h.value, x)
        return out


def test_the_rule_runs_on_modules():
    learner = braintrace.compile(Net(), one_back(), XS[0])
    grads = learner.etrace_grad(XS, step_fn=lambda x: learner(x) ** 2, reduction="sum")
    want = one_back_gradient({"a": jnp.asarray(0.7), "b": jnp.asarray(0.4)}, jnp.asarray(0.1))
    for k in want:
        np.testing.assert_allclose(grads[k,], want[k], rtol=1e-12)
    assert not learner.report.parameters["a",].exact


def test_a_row_gives_the_rule_a_name(monkeypatch):
    monkeypatch.setitem(rules.BY_NAME, ROW.name, ROW)
    assert rules.rule_value("One_Back", {}).name == "one_back"
    with pytest.raises(TypeError, match="its options are none"):
        rules.rule_value("one_back", {"leak": 0.5})
