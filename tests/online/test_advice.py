"""The advice of a report is true: the rule it names is exact, and stores the bytes it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace as bt
from interpret import computed

T, B, N, I = 5, 2, 4, 2


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def drawn(seed, *shape):
    return 0.5 * np.random.default_rng(seed).normal(size=shape)


def mixed(p, state, x):
    """A filter, units that meet in pairs, and an operator whose weight a state changes."""
    h, v, f = state
    pairs = jnp.einsum("bki,kij->bkj", h.reshape(B, 2, 2), p["pairs"]).reshape(h.shape)
    new = jnp.tanh(x @ p["w"] + pairs)
    v = 0.8 * v + jnp.tanh(x @ p["filter"])
    f = 0.5 * f + bt.matmul(x, p["fast"] * jnp.cos(f[0]))
    return (new, v, f), (new + v + f) @ p["out"]


def layers(p, state, x):
    """Two recurrent layers."""
    h, g = state
    h = jnp.tanh(x @ p[0]["w"] + h @ p[0]["r"] + p[0]["b"])
    g = jnp.tanh(h @ p[1]["w"] + g @ p[1]["r"])
    return (h, g), g


def gru(p, h, x):
    z = jax.nn.sigmoid(x @ p["z"] + h @ p["hz"])
    h = z * h + (1 - z) * jnp.tanh(x @ p["c"] + (jax.nn.sigmoid(x @ p["r"]) * h) @ p["hc"])
    return h, h


W, R, H = drawn(1, I, N), drawn(2, N, N), np.zeros((B, N))
MIXED = {"w": W, "pairs": drawn(3, 2, 2, 2), "filter": W, "fast": W + 0.3, "out": drawn(4, N, 2)}
CASES = {
    "mixed": (mixed, MIXED, (H, H, H)),
    "layers": (layers, [{"w": W, "r": R, "b": drawn(5, N)}, {"w": -R, "r": R.T}], (H, H)),
    "gru": (gru, {"z": W, "hz": R, "c": W, "hc": R, "r": W}, H),
}
XS = drawn(0, T, B, I)


def gradient(net, params, state, block=2):
    carry = net.init(params, state, XS[0])
    loss = lambda out: jnp.sum(out**2)
    return computed(lambda: net.grad(loss, block_size=block)(params, carry, XS)[0])


def bptt(step, params, state):
    def total(params):
        def body(state, x):
            state, out = step(params, state, x)
            return state, jnp.sum(out**2)

        return lax.scan(body, state, XS)[1].sum()

    return computed(lambda: jax.grad(total)(params))


@pytest.mark.parametrize("name", CASES)
def test_the_advised_rule_is_exact_and_stores_what_it_says(name):
    step, params, state = jax.tree.map(lambda a: a if callable(a) else jnp.asarray(a), CASES[name])
    net = bt.online(step)
    now, truth = gradient(net, params, state), bptt(step, params, state)
    report = net.report
    advice = report.advice
    assert advice.rules[0].rule is net.rule and advice.rules[0].bytes == net.memory
    assert advice.inexact == tuple(k for k, p in report.parameters.items() if not p.exact)
    close = lambda a, b: np.allclose(a, b, rtol=1e-9, atol=1e-9)
    leaf = lambda tree, path: leaf(tree[path[0]], path[1:]) if path else tree
    gradients = {}
    for s in advice.parameters:
        rule = s.cost.rule
        if rule not in gradients:
            other = bt.online(step, rule)
            gradients[rule] = gradient(other, params, state)
            assert other.memory == s.cost.bytes
        assert not close(leaf(now, s.parameter), leaf(truth, s.parameter))
        assert close(leaf(gradients[rule], s.parameter), leaf(truth, s.parameter))
    if name == "mixed":
        calls = {s.parameter: s.cost.call for s in advice.parameters}
        assert calls == {("w",): "snap(n=2)", ("pairs",): "snap(n=2)", ("fast",): "rtrl"}
        (fast,) = (s for s in advice.parameters if s.parameter == ("fast",))
        assert str(fast).endswith("(nothing but rtrl: it follows every path)")


@pytest.fixture(scope="module")
def advice():
    with jax.enable_x64(True):
        net = bt.online(mixed, "pp_prop", decay_or_rank=0.9)
        net.init(*jax.tree.map(jnp.asarray, CASES["mixed"][1:]), XS[0])
        return net.report.advice


def test_advice_respects_a_limit(advice):
    d_rtrl, snap, rtrl = advice.rules[1:]
    assert [c.call for c in advice.rules] == [
        "pp_prop(decay_or_rank=0.9)",
        "d_rtrl",
        "snap(n=2)",
        "rtrl",
    ]
    assert advice.rules[0].time == 1 < d_rtrl.time < snap.time < rtrl.time
    assert d_rtrl.bytes < snap.bytes < rtrl.bytes
    assert len(d_rtrl.exact) < len(snap.exact) < len(rtrl.exact) == advice.total
    assert advice.best is rtrl and advice.within(rtrl.bytes - 1).best is snap
    some = {s.parameter: s for s in advice.within(snap.bytes).parameters}
    assert some["fast",].cost is None and "rtrl takes" in str(some["fast",])
    assert some["w",].cost is snap and some["filter",].cost is d_rtrl


def test_a_window_over_a_short_sequence_is_cheap(advice):
    step, params, state = CASES["mixed"]
    params, state = jax.tree.map(jnp.asarray, (params, state))
    window = advice.over(T).rules[-1]
    assert window.call == f"no_trace, window={T}" and window.bytes == T * advice.window.bytes
    grads = gradient(bt.online(step, window.rule, window=T), params, state, T)
    for a, b in zip(*map(jax.tree.leaves, (grads, bptt(step, params, state))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    rtrl = advice.rules[-1]
    assert window.exact == rtrl.exact and window.time < rtrl.time
    least = rtrl.bytes // advice.window.bytes + 1  # so many steps take more memory than RTRL
    assert advice.over(least).best.call == f"no_trace, window={least}"  # faster
    assert advice.over(least).within(rtrl.bytes).best is rtrl


def test_advice_prints_as_a_table(advice):
    limited = str(advice.within(advice.rules[2].bytes)).splitlines()
    assert limited[0].split() == ["rule", "memory", "time", "exact"]
    assert limited[4].startswith("rtrl") and limited[4].endswith("5 of 5  over the limit")
    assert [line.split()[:2] for line in limited[7:11]] == [
        ["fast", "none"],
        ["filter", "d_rtrl"],
        ["pairs", "snap(n=2)"],
        ["w", "snap(n=2)"],
    ]
    few = str(advice.within(3 * advice.window.bytes)).splitlines()
    assert few[-1].endswith(" per step: less than the limit up to 3 steps.")


def test_nothing_is_allocated_and_large_steps_are_not_followed():
    wide = 1024
    shape = jax.ShapeDtypeStruct((wide, wide), jnp.float32)
    step = lambda w, h, x: (jnp.tanh(x + h @ w),) * 2
    rows = jax.ShapeDtypeStruct((64, wide), jnp.float32)
    net = bt.online(step)
    jax.eval_shape(net.init, shape, rows, rows)
    _, snap, rtrl = net.report.advice.rules
    assert snap.exact is None and "operations" in snap.why
    leaky = bt.online(lambda w, h, x: (jnp.tanh(0.9 * h + x @ w),) * 2)
    jax.eval_shape(leaky.init, shape, rows, rows)
    assert [c.call for c in leaky.report.advice.rules] == ["d_rtrl", "rtrl"]  # none is missing
    assert rtrl.bytes == wide**2 * 64 * wide * 4 > 2**37 and len(rtrl.exact) == 1


def test_a_device_that_counts_only_compiled_programs_has_advice(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", lambda self: None)
    net = bt.online(lambda w, h, x: ((h := jnp.tanh(h @ w + x)), h), "d_rtrl")
    net.init(jnp.eye(3), jnp.zeros((2, 3)), jnp.zeros((2, 3)))
    assert net.report.advice.rules[-1].time > 1


def test_a_learner_has_advice_too():
    cell = bt.nn.GRUCell(I, 3)
    learner = bt.compile(cell, "d_rtrl", jnp.zeros((B, I)), batch_size=B)
    advised = learner.report.advice.parameters
    assert [s.parameter for s in advised] == list(learner.report.parameters)
    other = bt.compile(cell, advised[0].cost.rule, jnp.zeros((B, I)), batch_size=B)
    assert all(p.exact for p in other.report.parameters.values())
    stored = jax.tree.leaves([t.value for t in other.etraces.values()])
    assert sum(a.nbytes for a in stored) == advised[0].cost.bytes
    with pytest.raises(ValueError, match=r"no advice.\n  why:   .*\n  do: "):
        learner.graph.report.advice  # noqa: B018


def test_the_summary_is_one_sentence():
    net = bt.online(mixed)
    net.init(*jax.tree.map(jnp.asarray, CASES["mixed"][1:]), XS[0])
    assert net.report.summary == (
        "d_rtrl: 2 of 5 parameters are exact (equal BPTT); fast has the gradient of each step "
        "alone, without what passes through fast; pairs and w leave out the paths to other states "
        "through pairs."
    )
    assert net.report.summary in str(net.report)


def wide(units):
    """Diagonal units that meet in a fixed matrix: every weight reaches all of them."""
    fixed = drawn(9, units, units)

    def step(p, h, x):
        h = jnp.tanh(p["a"] * h + x @ p["w"] + h @ fixed)
        return h, h

    return step, {"a": drawn(8, units), "w": drawn(7, I, units)}, np.zeros((B, units))


def test_the_program_for_many_slots_does_not_grow_with_their_number():
    found = []
    for units in (5, 20):
        step, params, state = wide(units)
        net = bt.online(step, bt.rules.snap(n=2))
        carry = net.init(params, state, XS[0])
        grad = jax.make_jaxpr(net.grad(lambda out: jnp.sum(out**2)))(params, carry, XS)
        found.append(str(grad).count("gather["))
    assert 0 < found[0] == found[1]


def test_many_slots_without_a_loop_over_what_they_share():
    """Every weight of a sample reaches the same units, so one cotangent per sample goes back."""
    step, params, state = wide(6)
    net = bt.online(step, bt.rules.snap(n=2))
    got, want = gradient(net, params, state, block=T), bptt(step, params, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, want)
    kept = gradient(net, params, state, block=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), kept, want)
    for r in net._last.graph.relations:
        assert r.slots.width == 6 and r.slots.at[0].shape[-2] == 1


def test_states_of_many_elements_are_not_followed_in_pairs():
    """Layers of states with a matrix per head: SnAp would follow millions of pairs."""

    def step(p, s, x):
        k, v = x @ p["k"], (x + s.sum(1) @ p["back"]) @ p["v"]
        s = 0.9 * s + k[:, :, None] * v[:, None, :]
        return s, s.sum(1)

    params = {"k": drawn(1, I, 32), "v": drawn(2, I, 70), "back": drawn(3, 70, I)}
    net = bt.online(step)
    net.init(jax.tree.map(jnp.asarray, params), jnp.zeros((B, 32, 70)), jnp.asarray(XS[0]))
    refused = next(c for c in net.report.advice.rules if c.call == "snap")
    assert refused.exact is None and "pairs of 2,240 elements" in refused.why


def test_a_jacobian_that_would_not_compile_is_not_offered(monkeypatch):
    step, params, state = wide(6)
    net = bt.online(step)
    net.init(*jax.tree.map(jnp.asarray, (params, state)), XS[0])
    monkeypatch.setattr("braintrace._online._advice.MOST_ENTRIES", 6 * 6)
    refused = next(c for c in net.report.advice.rules if c.call == "snap(n=2)")
    assert refused.exact is None and refused.why.endswith(" entries.")
    assert net.report.advice.best.call != "snap(n=2)"


def test_times_are_measured_for_the_rules_that_would_be_recommended():
    step, params, state = jax.tree.map(lambda a: a if callable(a) else jnp.asarray(a), CASES["gru"])
    net = bt.online(step)
    net.init(params, state, jnp.asarray(XS[0]))
    advice = net.report.advice
    assert "estimated" not in str(advice) and not any(c.measured for c in advice.rules)
    one = advice.measured(budget=0)  # none but the present rule
    assert [c.measured for c in one.rules] == [True] + [False] * (len(advice.rules) - 1)
    assert one.rules[0].time == 1 and one.rules[1].time == advice.rules[1].time
    assert str(one).count("estimated") == len(advice.rules) - 1
    found = advice.over(T).measured(budget=300)
    assert all(c.measured and 0 < c.time < 1e6 for c in found.rules)
    assert found.rules[-1].window == T and "estimated" not in str(found)
    fast = min((c for c in found.rules if len(c.exact) == found.total), key=lambda c: c.time)
    assert found.best is fast


def test_a_rule_with_inputs_of_its_own_is_not_measured():
    net = bt.online(CASES["gru"][0], "three_factor")
    net.init(*jax.tree.map(jnp.asarray, CASES["gru"][1:]), jnp.asarray(XS[0]))
    advice = net.report.advice
    assert advice.measured().rules == advice.rules
