"""A rule per parameter: every parameter is learned as if its rule were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace import rules
from braintrace.engine import shared_passes
from thinned import ALL

N, B, T, I = 2, 2, 9, 2


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def drawn(seed, *shape):
    return jnp.asarray(0.6 * np.random.default_rng(seed).normal(size=shape))


def step(p, h, x):
    """A layer whose input is that of a gate and of the new state, with a weight for each rule."""
    a = sum(jnp.concatenate([x, h], -1) @ w for w in p["cell"].values())
    h = jax.nn.sigmoid(a) * h + jnp.tanh(a)
    return h, h @ p["out"]


def weights(names):
    cell = {name: drawn(i, I + N, N) for i, name in enumerate(names)}
    return {"cell": cell, "out": drawn(99, N, 1)}


STATE = jnp.zeros((B, N))
XS, YS = drawn(100, T, B, I), drawn(101, T, B, 1)


def loss(out, y):
    return jnp.mean((out - y) ** 2)


def gradient(rule, params, mask=None, keep=True, **options):
    net = bt.online(step, rule, **options)
    carry = net.init(params, STATE, XS[0])
    f = net.grad(loss, block_size=4, keep_traces=keep)
    return f(params, carry, XS, YS, mask=mask)[0], net


SINGLE = {
    "d_rtrl": ("d_rtrl", {}),
    "snap": (rules.snap(2), {}),
    "pp_prop": ("pp_prop", {"decay_or_rank": 0.9}),
    "rtrl": ("rtrl", {}),
    "no_trace": ("no_trace", {}),
    "rflo": ("rflo", {}),
    "eprop": ("eprop", {"kappa_filter_decay": 0.5}),
    "ottt": ("ottt", {"leak": 0.9}),
    "otpe": ("otpe", {"leak": 0.9}),
    "ostl": ("ostl_recurrent", {}),
}
FEW = ("d_rtrl", "snap", "eprop", "rflo")
WINDOWS = {
    "d_rtrl": ("d_rtrl", {"window": 3}),
    "snap": (rules.snap(2), {"window": 3}),
    "no_trace": ("no_trace", {"window": 3}),
    "single": ("d_rtrl", {}),
    "rtrl": ("rtrl", {}),
}
BACKWARD = {name: SINGLE[name] for name in ("d_rtrl", "snap", "no_trace")}
BACKWARD_WINDOWS = {name: WINDOWS[name] for name in ("d_rtrl", "snap", "no_trace", "single")}
FORWARD = {"kf_rtrl": ("kf_rtrl", {"key": 1}), "d_rtrl": ("d_rtrl", {})}
# How many reverse passes their programs have.
SETS = {"windows": (WINDOWS, 3), "forward": (FORWARD, 2)}
SETS["single"] = (SINGLE, 6) if ALL else ({name: SINGLE[name] for name in FEW}, 4)


@pytest.mark.parametrize("rules_by_name, passes", SETS.values(), ids=SETS)
def test_all_rules_at_once_are_what_each_is_alone(rules_by_name, passes):
    params = weights(rules_by_name)
    chosen = {f"*.{name}": rule for name, rule in rules_by_name.items()}
    mask = np.arange(T) != 4
    found, net = gradient({**chosen, "*": "no_trace"}, params, mask)
    record = net.rule.record
    assert len(shared_passes(net._last.graph, record, net.window is not None)) == passes
    for name, (rule, options) in rules_by_name.items():
        alone, other = gradient(rule, params, mask, **options)
        truth = alone["cell"][name]
        assert np.abs(found["cell"][name] - truth).max() <= 1e-12 * np.abs(truth).max(), name
        reports = [n.report.parameters["cell", name] for n in (net, other)]
        mine, theirs = ((p.how, p.exact, p.dropped, p.trace_shapes) for p in reports)
        assert mine == theirs and reports[0].rule.startswith(str(other.rule)[:4])


def _from_traces(rule, params, keep, **options):
    """The gradient where traces are not zero, in several blocks, and the traces by weight."""
    net = bt.online(step, rule, **options)
    carry = net.init(params, STATE, XS[0])
    first, second = (net.grad(loss, block_size=3, keep_traces=k) for k in (True, keep))
    _, (carry, _) = first(params, carry, XS, YS)
    grads, (carry, _) = second(params, carry, XS, YS, mask=np.arange(T) != 4)
    graph = net._last.graph
    relations = [r for part in graph.parts or (graph,) for r in part.relations]
    paths = [r.weight_path for r in relations]
    return grads["cell"], dict(zip(paths, carry.traces, strict=True)), net


@pytest.mark.parametrize(
    "rules_by_name, keep", [(BACKWARD, True), (BACKWARD_WINDOWS, False)], ids=["single", "windows"]
)
def test_blocks_taken_backward_are_those_of_each_rule(rules_by_name, keep):
    params = weights(rules_by_name)
    chosen = {f"*.{name}": rule for name, rule in rules_by_name.items()}
    found, traces, net = _from_traces({**chosen, "*": "no_trace"}, params, keep)
    assert net.rule.record.backward is not None
    for name, (rule, options) in rules_by_name.items():
        truth, own, _ = _from_traces(rule, params, keep, **options)
        assert np.abs(found[name] - truth[name]).max() <= 1e-12 * np.abs(truth[name]).max(), name
        pairs = zip(*(map(jax.tree.leaves, (t["cell", name] for t in (traces, own)))), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_uoro_estimates_its_own_parameters_together():
    params, rule = weights("abc"), rules.uoro(3)
    found, _ = gradient({"*.a": rule, "cell.b": rule, "*": "d_rtrl"}, params)

    def others_constant(p, h, x):
        return step({**params, "cell": {**params["cell"], **p["cell"]}}, h, x)

    own = {"cell": {name: params["cell"][name] for name in "ab"}}
    alone = bt.online(others_constant, rule)
    carry = alone.init(own, STATE, XS[0])
    truth = alone.grad(loss)(own, carry, XS, YS)[0]
    for name in "ab":
        np.testing.assert_allclose(found["cell"][name], truth["cell"][name], rtol=1e-10)


def test_updates_between_steps_are_those_of_one_gradient_after_another():
    params = weights("abc")
    rule = {"*.a": "d_rtrl", "*.b": rules.snap(2), "*": "no_trace"}
    net, sgd = bt.online(step, rule), optax.sgd(0.1)
    start = net.init(params, STATE, XS[0])
    trained, *_ = net.train(loss, sgd)(params, sgd.init(params), start, XS, YS)
    each, f, carry = params, net.grad(loss), start
    for x, y in zip(XS, YS, strict=True):
        grads, (carry, _) = f(each, carry, x[None], y[None])
        each = jax.tree.map(lambda p, g: p - 0.1 * g, each, grads)
    for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(each), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_an_operator_with_parameters_of_two_rules():
    def cell(p, h, x):
        h = jnp.tanh(0.5 * h + bt.matmul(jnp.concatenate([x, h], -1), p["w"], p["b"]))
        return h, h

    params = {"w": drawn(0, I + N, N), "b": drawn(1, N)}
    f = lambda rule: _grad(cell, rule, params)
    found = f({"w": rules.snap(2), "b": "d_rtrl"})
    np.testing.assert_allclose(found["w"], f(rules.snap(2))["w"], rtol=1e-12)
    np.testing.assert_allclose(found["b"], f("d_rtrl")["b"], rtol=1e-12)


def _grad(cell, rule, params):
    net = bt.online(cell, rule)
    carry = net.init(params, jnp.zeros((B, N)), XS[0])
    return net.grad(lambda h: (h**3).sum(), block_size=2)(params, carry, XS)[0]


REFUSED = {
    "unused": ({"*.a": "d_rtrl", "layers": "snap", "*": "rtrl"}, "no parameter is named 'layers'"),
    "overlap": ({"*.a": "d_rtrl", "cell": "snap", "*": "rtrl"}, r"cell.a by '\*.a' and 'cell'"),
    "left": ({"*.a": "d_rtrl"}, "no rule for cell.b, out"),
    "windows": (
        {"cell": ("d_rtrl", {"window": 4}), "*": ("no_trace", {"window": 8})},
        "windows of 4 steps for cell and of 8 for",
    ),
    "estimate": (
        {"cell.a": ("uoro", {"projection_key": 0}), "*": ("d_rtrl", {"window": 8})},
        r"uoro.* for cell.a in single steps and windows of 8 for \*",
    ),
    "no windows": ({"*": ("three_factor", {"window": 4})}, r"three_factor for \* has no windows"),
    "empty": ({}, "the rule is an empty dict"),
}


@pytest.mark.parametrize("rule, words", REFUSED.values(), ids=REFUSED)
def test_patterns_that_do_not_fit_are_refused(rule, words):
    with pytest.raises(ValueError, match=words) as e:
        bt.online(step, rule).init(weights("ab"), STATE, XS[0])
    assert "why:" in str(e.value) and "do:" in str(e.value)


TYPES = {
    "pair": ({"*": ("snap", 2)}, "the rule of '\\*' is"),
    "pattern": ({0: "snap"}, "the pattern 0 has type int"),
    "nested": ({"*": {"*": "snap"}}, "is a mixture"),
}


@pytest.mark.parametrize("rule, words", TYPES.values(), ids=TYPES)
def test_what_is_no_assignment_is_refused(rule, words):
    with pytest.raises(TypeError, match=words) as error:
        bt.online(step, rule)
    assert "why:" in str(error.value) and "do:" in str(error.value)


def test_options_beside_a_mixture_are_refused():
    with pytest.raises(TypeError, match="options n"):
        bt.online(step, {"*": "snap"}, n=2)


def test_a_side_effect_would_happen_once_per_pass():
    def noisy(p, state, x):
        jax.debug.print("{}", x.sum())
        return step(p, state, x)

    net = bt.online(noisy, {"cell.a": "d_rtrl", "*": rules.snap(2)})
    with pytest.raises(bt.NotSupportedError, match=r"side effects, with d_rtrl for .* and snap"):
        net.init(weights("ab"), STATE, XS[0])


def test_default_windows_are_for_rules_that_state_none():
    net = bt.online(step, {"cell": ("d_rtrl", {"window": None}), "*": "no_trace"}, window=3)
    assert net.window == 3 and [s.window for s in net.rule.shares] == [None, 3]


def test_report_names_the_rule_of_each_parameter():
    _, net = gradient({"cell.a": "d_rtrl", "*": rules.snap(2)}, weights("ab"))
    report, page = net.report, net.report.to_html()
    assert "cell.a: trace by d_rtrl" in str(report) and "by snap(n=2)" in str(report)
    assert report.picture.rules == ("d_rtrl", "snap(n=2)") and page.count('class="rule"') == 6
    present, *_ = net.report.advice.rules
    assert present.call == "{cell.a: d_rtrl, *: snap(n=2)}" and present.bytes == net.memory


@pytest.mark.parametrize("window", [None, 3])
def test_a_compiled_module_learns_and_is_saved(window, tmp_path):
    rule = {"Wz": rules.snap(2), "*": ("d_rtrl", {"window": window})}
    cell, square = bt.nn.GRUCell(I, N), lambda h: (h**2).sum()
    made = lambda rule, **o: bt.compile(cell, rule, XS[0], batch_size=B, seed=0, **o)
    learner = made(rule)
    assert learner.window == window and "mixture" in repr(learner)
    grads, _ = learner.grad(square)(XS)
    for one, where, size in ((rules.snap(2), "Wz", None), ("d_rtrl", "Wr", window)):
        want = made(one, window=size).grad(square)(XS)[0][where, "weight"]
        for a, b in zip(*map(jax.tree.leaves, (grads[where, "weight"], want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)
    learner.save(tmp_path / "run")
    made(rule).load(tmp_path / "run")
    with pytest.raises(ValueError, match="rule"):
        made({"Wz": rules.snap(3), "*": ("d_rtrl", {"window": window})}).load(tmp_path / "run")
    learner.reset()
    assert not any(a.any() for t in learner.etraces.values() for a in jax.tree.leaves(t.value))
