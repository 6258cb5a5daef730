"""Every rule of the table is the same rule in C."""

import numpy as np
import optax
import pytest
from compiled import build, difference, run
from networks import DRAWING, NETWORKS, RULES, N, O, loss, stream

import braintrace
from braintrace.rules._table import RULES as TABLE

STEPS = 40
OPTIONS = {
    **RULES,
    **DRAWING,
    "snap": {"n": 2},
    "r_stdp": {"post": lambda state: state[..., 0]},
    "osttp": {"B_list": [np.random.default_rng(0).normal(size=(O, N))]},
    "decolle": {"n_target": O},
    "tess": {"n_target": O},
}
MODULATED, AIMED = {"three_factor", "r_stdp", "reward_eprop"}, {"osttp", "decolle", "tess"}


@pytest.mark.parametrize("rule", [rule for rule in TABLE if rule != "rolling"])
def test_rule_in_c_is_that_of_train(rule, tmp_path):
    step, params, state = NETWORKS["mingru"](np.float64)
    xs, ys = stream(np.float64, "mingru", STEPS)
    net, optimizer = braintrace.online(step, rule, **OPTIONS.get(rule, {})), optax.sgd(0.01)
    extra = {"modulator": np.full(STEPS, 0.7)} if rule in MODULATED else {}
    extra |= {"y_target": ys} if rule in AIMED else {}
    first = {name: values[0] for name, values in extra.items()}
    carry = net.init(params, state, xs[0])
    how = dict(loss=loss, optimizer=optimizer, path=tmp_path, extra=first)
    done = net.export_c(params, carry, xs[0], ys[0], **how)
    found = run(done, build(done), {"x": xs, "target": ys, **extra})
    train = net.train(loss, optimizer)
    *_, losses = train(params, optimizer.init(params), carry, xs, ys, **extra)
    assert np.ptp(losses) > 0.01
    assert difference(found.losses, losses) < 1e-12
    assert done.sizes.scratch <= 1.5 * done.sizes.live


def test_a_rule_that_replays_a_window_is_refused(tmp_path):
    step, params, state = NETWORKS["mingru"](np.float64)
    (x, *_), (y, *_) = stream(np.float64, "mingru", 1)
    net = braintrace.online(step, "rolling", window=3)
    how = dict(loss=loss, optimizer=optax.sgd(0.1), path=tmp_path)
    with pytest.raises(braintrace.NotSupportedError, match="a learner with a window"):
        net.export_c(params, net.init(params, state, x), x, y, **how)
