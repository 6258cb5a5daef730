"""A block of steps under the protocol of rules, on explicit arrays."""

from dataclasses import replace

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.engine import TimeAxes, Values, map_steps, run_block, run_with_exits
from braintrace.rules import d_rtrl, kf_rtrl, pp_prop, rtrl, stllr, uoro

N, T = 3, 6
W, R, OUT = (jnp.asarray(np.random.RandomState(i).randn(N, N)) * 0.5 for i in range(3))
XS = jnp.asarray(np.random.RandomState(3).randn(T, 2, N))
H = jnp.asarray(np.random.RandomState(4).randn(2, N))


class Net(brainstate.nn.Module):
    def __init__(self, mixed=False):
        super().__init__()
        self.w, self.r = brainstate.ParamState(W), brainstate.ParamState(R)
        self.out, self.h = brainstate.ParamState(OUT), brainstate.HiddenState(H)
        self.mixed = mixed

    def update(self, x):
        h = self.h.value
        if self.mixed:
            h = h + 0.1 * h[::-1]
        y = braintrace.matmul(x, self.w.value) + braintrace.matmul(h, self.r.value)
        self.h.value = jnp.tanh(0.5 * h + y)
        return self.h.value @ self.out.value


COMPILED = braintrace.compile_etrace_graph(Net(), XS[0])
GRAPH, CONSTS = COMPILED.analysis, COMPILED.module_info.consts
NAMES = [leaf.path[0] for leaf in GRAPH.step.params]
PARAMS = tuple({"w": W, "r": R, "out": OUT}[n] for n in NAMES)


def axes(length, window=None):
    return TimeAxes(length, tuple(False for _ in GRAPH.step.program.consts), (True,), window)


def values(params, xs=XS, h=H):
    return Values(CONSTS, (xs,), params, (h,), ())


def gradient(rule, window=None, size=T):
    """Summed over blocks of `size` steps."""

    def total(params):
        at, h, out = rule.init(GRAPH, values(params)), H, 0.0
        for i in range(0, T, size):
            ran = run_block(
                GRAPH, rule, values(params, XS[i : i + size], h), at, axes(size, window)
            )
            out = out + (ran.outs[0] ** 2).sum()
            at, h = ran.traces, jax.lax.stop_gradient(ran.after.hidden[0][-1])
        return out

    return jax.jit(jax.grad(total))(PARAMS)


def bptt(params):
    def body(h, x):
        h = jnp.tanh(0.5 * h + x @ params[NAMES.index("w")] + h @ params[NAMES.index("r")])
        return h, ((h @ params[NAMES.index("out")]) ** 2).sum()

    return jax.lax.scan(body, H, XS)[1].sum()


def assert_close(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


RULES = {
    "d_rtrl": d_rtrl(),
    "pp_prop": pp_prop(0.7),
    "stllr": stllr(),
    "rtrl": rtrl(),
    "uoro": uoro(),
    "kf_rtrl": kf_rtrl(),
}


@pytest.mark.parametrize("name", RULES)
def test_blocks_of_any_size_have_the_same_gradient(name):
    rule = RULES[name].record
    assert_close(gradient(rule), gradient(rule, size=1))
    assert_close(gradient(rule, size=3), gradient(rule, size=1))


@pytest.mark.parametrize("name", ["d_rtrl", "pp_prop", "uoro", "kf_rtrl"])
def test_windows_of_one_block_are_windows_of_several(name):
    rule = RULES[name].record
    assert_close(gradient(rule, window=2), gradient(rule, window=2, size=2))


def test_full_influence_is_backpropagation():
    assert_close(gradient(RULES["rtrl"].record), jax.grad(bptt)(PARAMS))


@pytest.mark.parametrize("name", RULES)
def test_traces_are_named_and_reset_by_their_rule(name):
    rule = RULES[name].record
    start = rule.init(GRAPH, values(PARAMS))
    assert len(rule.traced(GRAPH)) == len(start)
    after = run_block(GRAPH, rule, values(PARAMS), start, axes(T)).traces
    again = rule.reset(after)
    assert jax.tree.structure(again) == jax.tree.structure(start)
    drawn = [k for t in again for k, v in t.items() if k == "draws" and int(v) == T]
    kept = {"uoro": 1, "kf_rtrl": len(GRAPH.relations)}.get(name, 0)
    assert len(drawn) == kept  # random signs are not drawn again
    assert sum(bool(np.any(a)) for a in jax.tree.leaves(again)) == kept


def test_traces_that_are_not_wanted_are_not_computed():
    rule = RULES["d_rtrl"].record
    start = rule.init(GRAPH, values(PARAMS))
    ran = run_block(GRAPH, rule, values(PARAMS), start, axes(T), keep=False)
    assert not any(np.any(a) for a in jax.tree.leaves(ran.traces))


def test_samples_are_found_where_they_are_independent():
    assert GRAPH.samples_are_apart(CONSTS)
    mixed, one = Net(mixed=True), Net()
    one.h.value = H[0]
    for net, x in ((mixed, XS[0]), (one, XS[0, 0])):
        graph = braintrace.compile_etrace_graph(net, x)
        assert not graph.analysis.samples_are_apart(graph.module_info.consts)


def test_zeros_at_the_exits_get_the_learning_signal():
    rule = RULES["d_rtrl"].record
    step = values(PARAMS, XS[0])

    def loss(zero):
        outs = run_with_exits(GRAPH, rule, step, [zero], (), None)[0]
        return (outs[0] ** 2).sum()

    h = jnp.tanh(0.5 * H + XS[0] @ W + H @ R)
    want = jax.grad(lambda h: ((h @ OUT) ** 2).sum())(h)
    np.testing.assert_allclose(jax.grad(loss)(jnp.zeros_like(H)), want, rtol=1e-12)


def test_steps_are_mapped_or_scanned():
    double = lambda a: 2 * a
    for mapped in (True, False):
        np.testing.assert_array_equal(map_steps(T, double, XS, mapped=mapped), 2 * XS)
    with jax.disable_jit():
        np.testing.assert_array_equal(map_steps(T, double, XS), 2 * XS)


def test_axes_take_the_arrays_of_a_step_from_those_of_a_block():
    layout = replace(axes(T), consts=(), args=(True, False))
    block = Values((), (XS, W), PARAMS, (H,), ())
    now = layout.at(block, jax.tree.map(lambda a: a[2], layout.slices(block)), (H,), ())
    np.testing.assert_array_equal(now.args[0], XS[2])
    assert now.args[1] is W


TWO_CALLS = [
    ("rtrl", {}),
    ("rtrl", {"window": 3}),
    ("d_rtrl", {"window": 3}),
    ("snap", {"window": 2}),
    ("uoro", {}),
    ("kf_rtrl", {}),
]


@pytest.mark.parametrize("second", ["scan", "call"])
@pytest.mark.parametrize("rule, options", TWO_CALLS)
def test_two_sequences_in_one_derivative_are_the_sum_of_their_gradients(rule, options, second):
    xs = jax.random.normal(jax.random.key(0), (6, 3))
    params = jax.random.normal(jax.random.key(1), (3, 4))

    def step(w, h, x):
        h = jnp.tanh(0.9 * h + x @ w)
        return h, h * h

    net = braintrace.online(step, rule, **options)
    start = net.init(params, jnp.zeros(4), xs[0])
    later = (net.scan, xs[3:]) if second == "scan" else (net, xs[3])

    def first_loss(w):
        return net.scan(w, start, xs[:3])[1].sum()

    def second_loss(w, carry):
        return later[0](w, carry, later[1])[1].sum()

    def both(w):
        carry, out = net.scan(w, start, xs[:3])
        return out.sum() + second_loss(w, carry)

    middle = net.scan(params, start, xs[:3])[0]
    apart = jax.grad(first_loss)(params) + jax.grad(second_loss)(params, middle)
    np.testing.assert_allclose(jax.grad(both)(params), apart, rtol=1e-9)
