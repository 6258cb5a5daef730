"""The references of the rules, against loops written by hand and against each other."""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from models import EXACT, Draw, Net, T, bptt, different, matmul, seen, sigmoid, step_fn

from braintrace.verify import bptt_grad
from oracle import (
    Structure,
    definition,
    dense,
    kf_step,
    reference_grad,
    rule_name,
    rule_on,
    sharing,
    uoro_step,
)

assert_equal = partial(models.assert_equal, tolerance=1e-10)
I, N = 3, 4
XS = np.asarray(Draw("rules by hand")(T, I, scale=1.0))
TARGETS = np.asarray(Draw("targets by hand")(T, N))
A, B, K = 0.7, 0.6, 0.5  # leaks and filters


def assert_different(found, truth):
    assert different(found, truth)


# ------------------------------------------------------------------- steps differentiated by hand


class Step:
    """What a layer of N units with k states each has at one step, everything per unit.

    x (I,); D (k, k, N); f, l, mu, lam, h (k, N); ybar (N,): the letters of docs/rules.md.
    """

    def __init__(self, x, D, f, l, mu, lam, ybar, h):
        self.x, self.D, self.f, self.ybar, self.h = x, np.asarray(D), np.asarray(f), ybar, h
        self.l, self.mu, self.lam = np.asarray(l), np.asarray(mu), np.asarray(lam)

    @property
    def fx(self):
        return self.f[:, None, :] * self.x[:, None]

    @property
    def g(self):
        return self.x[:, None] * self.ybar


def meet(c, eps):
    return np.einsum("kn,kin->in", c, eps)


def pull(x, c):
    return x[:, None] * c


def by_hand(rule, steps):
    """The single-step gradient of the weight, by a loop over the steps."""
    k = len(steps[0].f)
    eps, bar, leaky = (np.zeros((k, I, N)) for _ in range(3))
    X, e, post = np.zeros(I), np.zeros((k, N)), np.zeros((k, N))
    total = np.zeros((I, N))
    for s in steps:
        now = np.einsum("jkn,kin->jin", s.D, eps) + s.fx
        match rule:
            case "d_rtrl":
                total += s.g + meet(s.lam, eps)
            case "eprop":
                total += s.g + meet(s.lam, eps) + K * meet(s.l, bar)
            case "otpe":
                total += s.g + A * meet(s.l, leaky) + meet(s.mu, leaky)
            case "otpe approx":
                c = ((A * s.l + s.mu) * e).sum(0) + s.ybar
                total += pull(A * X + s.x, c)
            case "ottt":
                total += pull(A * X + s.x, s.ybar)
            case "stllr":
                total += 1.5 * pull(A * X + s.x, s.ybar) - 0.8 * pull(s.x, (B * s.l * post).sum(0))
        eps, bar, leaky = now, K * bar + now, A * leaky + s.fx
        X, e, post = A * X + s.x, A * e + s.f, B * post + s.f
    return total


OPTIONS = {
    "d_rtrl": ("d_rtrl", {}),
    "eprop": ("eprop", {"kappa_filter_decay": K}),
    "otpe": ("otpe", {"leak": A}),
    "otpe approx": ("otpe", {"leak": A, "mode": "approx"}),
    "ottt": ("ottt", {"leak": A}),
    "stllr": ("stllr", {"leak_pre": A, "leak_post": B, "alpha_pre": 1.5, "alpha_post": -0.8}),
}


def leaky(target=TARGETS):
    """h = tanh(0.8 h + x w), loss |h - target|² / 2."""

    def update(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return m.h.value

    draw = Draw("leaky by hand")
    net = Net(update, {"w": draw(I, N)}, {"h": draw(N)})
    w, h, steps = np.asarray(net.w.value), np.asarray(net.h.value), []
    for x, y in zip(XS, target, strict=True):
        h = np.tanh(0.8 * h + x @ w)
        slope, c = 1 - h**2, h - y
        lam = [c * 0.8 * slope]
        none = [np.zeros(N)]
        steps.append(Step(x, [[0.8 * slope]], [slope], [c], none, lam, c * slope, [h]))
    return net, step_fn, steps


def adaptive():
    """A voltage and its adaptation; the loss reads the spike, which is not stored, and both."""

    def update(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = sigmoid(v - 0.5 * m.a.value)
        m.v.value = v - 0.3 * z
        m.a.value = 0.8 * m.a.value + z
        return z + 0.1 * m.v.value + 0.2 * m.a.value

    draw = Draw("adaptive by hand")
    net = Net(update, {"w": draw(I, N)}, {"v": draw(N), "a": draw(N)})
    w, v, a = (np.asarray(s.value) for s in (net.w, net.v, net.a))
    steps, one = [], np.ones(N)
    for x, y in zip(XS, TARGETS, strict=True):
        u = 0.9 * v + x @ w
        z = 1 / (1 + np.exp(0.5 * a - u))
        dz = z * (1 - z)
        v, a = u - 0.3 * z, 0.8 * a + z
        r = z + 0.1 * v + 0.2 * a - y
        D = [[0.9 * (1 - 0.3 * dz), 0.15 * dz], [0.9 * dz, 0.8 - 0.5 * dz]]
        f = [1 - 0.3 * dz, dz]
        l = np.asarray([0.1 * r, 0.2 * r])
        mu = np.asarray([0.9 * dz * r, -0.5 * dz * r])
        lam = np.einsum("jn,jkn->kn", l, D) + mu
        ybar = r * dz + l[0] * f[0] + l[1] * f[1]
        steps.append(Step(x, D, f, l, mu, lam, ybar, [v, a] * one))
    return net, step_fn, steps


def memory_cell():
    """c is stored, h is made of the stored c, and feeds back through an operator."""

    def update(m, x):
        back = matmul(m.h.value, m.r.value)
        m.c.value = 0.7 * m.c.value + jnp.tanh(matmul(x, m.w.value) + back)
        m.h.value = 0.9 * jnp.tanh(m.c.value) + 0.1 * m.h.value
        return m.h.value

    def loss(net, x, target):
        return 0.5 * jnp.sum((net(x) - target) ** 2)

    draw = Draw("cell by hand")
    net = Net(update, {"w": draw(I, N), "r": draw(N, N)}, {"c": draw(N), "h": draw(N)})
    w, r, c, h = (np.asarray(s.value) for s in (net.w, net.r, net.c, net.h))
    steps, zero = [], np.zeros(N)
    for x, y in zip(XS, TARGETS, strict=True):
        t = np.tanh(x @ w + h @ r)
        dt = 1 - t**2
        c = 0.7 * c + t
        q = 0.9 * (1 - np.tanh(c) ** 2)
        h = 0.9 * np.tanh(c) + 0.1 * h
        e = h - y
        D = [[0.7 + zero, zero], [0.7 * q, 0.1 + zero]]
        # c reaches the loss through h only, and h is an input of its own: l_c = 0.
        l, lam = [zero, e], [0.7 * q * e, 0.1 * e]
        steps.append(Step(x, D, [dt, q * dt], l, [zero, zero], lam, e * q * dt, [c, h]))
    return net, loss, steps


def two_layers(late):
    """The weight of layer 1; layer 2 reads its state of this step, or (late) of the last one."""

    def update(m, x):
        old = m.a.value
        m.a.value = 0.5 * old + jnp.tanh(matmul(x, m.w.value))
        read = old if late else m.a.value
        m.b.value = 0.6 * m.b.value + jnp.tanh(matmul(read, m.u.value))
        return m.b.value

    draw = Draw("layers by hand")
    net = Net(update, {"w": draw(I, N), "u": draw(N, N)}, {"a": draw(N), "b": draw(N)})
    w, u, a, b = (np.asarray(s.value) for s in (net.w, net.u, net.a, net.b))
    steps, zero = [], np.zeros(N)
    for x, y in zip(XS, TARGETS, strict=True):
        t, old = np.tanh(x @ w), a
        a = 0.5 * old + t
        s = np.tanh((old if late else a) @ u)
        b = 0.6 * b + s
        down = ((b - y) * (1 - s**2)) @ u.T
        l, mu = (zero, down) if late else (down, zero)
        lam, D = 0.5 * l + mu, 0.5 + zero
        steps.append(Step(x, [[D]], [1 - t**2], [l], [mu], [lam], l * (1 - t**2), [a]))
    return net, step_fn, steps


HAND = {
    "leaky": leaky,
    "adaptive": adaptive,
    "memory cell": memory_cell,
    "two layers": lambda: two_layers(late=False),
    "two layers, late": lambda: two_layers(late=True),
}
hand = cache(lambda name: HAND[name]())


@cache
def seen_by_hand(name):
    net, loss, _ = hand(name)
    return dense(net, loss, XS, TARGETS)


def reference(name, rule, window=None, **options):
    """The reference on recorded steps; options as `reference_grad` takes them."""
    kind, chosen = definition(rule, options)
    return rule_on(seen_by_hand(name), kind, window, **chosen)


@pytest.mark.parametrize("name", HAND)
@pytest.mark.parametrize("case", OPTIONS)
def test_rule_by_hand(name, case):
    rule, options = OPTIONS[case]
    found = reference(name, rule, **options)["w",]
    np.testing.assert_allclose(found, by_hand(case, hand(name)[2]), rtol=1e-9)


def test_hands_tell_the_rules_apart():
    for name in set(HAND) - {"two layers, late"}:  # there l = 0
        found = [by_hand(case, hand(name)[2]) for case in OPTIONS]
        for i, one in enumerate(found):
            for other in found[:i]:
                assert abs(one - other).max() > 1e-3 * abs(one).max()


@pytest.mark.parametrize("case", OPTIONS)
def test_the_door_is_the_same(case):
    net, loss, _ = hand("adaptive")
    rule, options = OPTIONS[case]
    found = reference_grad(rule, net, loss, XS, TARGETS, **options)
    assert_equal(found, reference("adaptive", rule, **options))


KNOBS = [
    ("eprop", {"kappa_filter_decay": K}, {"kappa_filter_decay": 0.4}),
    ("otpe", {"leak": A}, {"leak": 0.6}),
    ("otpe", {"leak": A}, {"leak": A, "mode": "approx"}),
    ("otpe", {"leak": A}, {"leak": A, "trace_clip_abs": 0.5}),
    ("ottt", {"leak": A}, {"leak": 0.6}),
    ("ottt", {"leak": A}, {"leak": A, "mode": "O"}),
    ("rflo", {}, {"leak": A}),
    ("ostl_feedforward", {}, {"decay_or_rank": 0.5}),
    *[
        ("stllr", base := {k: 0.5 for k in ("leak_pre", "leak_post", "alpha_pre", "alpha_post")},
         {**base, k: 0.7})
        for k in ("leak_pre", "leak_post", "alpha_pre", "alpha_post")
    ],
]  # fmt: skip


@pytest.mark.parametrize("rule, one, other", KNOBS)
def test_knobs_matter(rule, one, other):
    found = [reference("adaptive", rule, **options) for options in (one, other)]
    assert_different(*found)


def test_clipped_trace_by_hand():
    _, _, steps = hand("leaky")
    eps, total = np.zeros((1, I, N)), np.zeros((I, N))
    for s in steps:
        total += s.g + A * meet(s.l, eps)
        eps = np.clip(A * eps + s.fx, -0.4, 0.4)
    assert (abs(eps) == 0.4).any() and (abs(eps) < 0.4).any()
    found = reference("leaky", "otpe", leak=A, trace_clip_abs=0.4)["w",]
    np.testing.assert_allclose(found, total, rtol=1e-9)


def test_clipping_needs_the_weight_itself():
    steps = seen("learnable_decay")
    with pytest.raises(ValueError, match="function of parameters"):
        rule_on(steps, "otpe", leak=A, clip=0.4)
    rule_on(steps, "otpe", leak=A)


def test_osttp_follows_the_weights_that_lead_back_to_a_unit():
    # h = tanh(x w + h r): the trace of SnAp(1) decays with the diagonal of r.
    def update(m, x):
        m.h.value = jnp.tanh(matmul(x, m.w.value) + matmul(m.h.value, m.r.value))
        return m.h.value @ m.out.value

    draw = Draw("osttp")
    net = Net(update, {"w": draw(I, N), "r": draw(N, N), "out": draw(N, 2)}, {"h": draw(N)})
    y, Bs = np.asarray(draw(T, 2)), np.asarray(draw(2, N))
    w, r, out, h = (np.asarray(s.value) for s in (net.w, net.r, net.out, net.h))
    E, R = np.zeros((I, N)), np.zeros((N, N))
    total = {("w",): 0 * E, ("r",): 0 * R, ("out",): 0 * out}
    for x, target in zip(XS, y, strict=True):
        old, h = h, np.tanh(x @ w + h @ r)
        slope = 1 - h**2
        E = slope * np.diag(r) * E + slope * x[:, None]
        R = slope * np.diag(r) * R + slope * old[:, None]
        total["w",] += target @ Bs * E
        total["r",] += target @ Bs * R
        total["out",] += np.outer(h, h @ out - target)
    found = reference_grad("osttp", net, step_fn, XS, y, B_list=[Bs], y_target=y)
    assert_equal(found, total)
    other = reference_grad("osttp", net, step_fn, XS, y, B_list=[Bs], y_target=y[::-1])
    assert_different(other, total)


# -------------------------------------------------------------- signals that are no derivatives


def test_three_factors_by_hand():
    _, _, steps = hand("adaptive")
    numbers, arrays = np.asarray(Draw("factors")(T)), np.asarray(Draw("more factors")(T, N))
    eps, total, per_unit = np.zeros((2, I, N)), np.zeros((I, N)), np.zeros((I, N))
    for s, m, c in zip(steps, numbers, arrays, strict=True):
        eps = np.einsum("jkn,kin->jin", s.D, eps) + s.fx
        total += m * eps.sum(0)
        per_unit += c * eps.sum(0)  # the same at both states of the group
    found = reference("adaptive", "three_factor", modulator=numbers)["w",]
    np.testing.assert_allclose(found, total, rtol=1e-9)
    for modulator in (arrays, {0: arrays}, np.stack([arrays] * 2, -1)):
        found = reference("adaptive", "three_factor", modulator=modulator)["w",]
        np.testing.assert_allclose(found, per_unit, rtol=1e-9)
    found = reference("adaptive", "three_factor", modulator=np.stack([arrays, 0 * arrays], -1))
    assert abs(found["w",] - per_unit).max() > 1e-3


def test_decolle_by_hand():
    _, _, steps = hand("adaptive")
    draw = Draw("decolle")
    R, y = np.asarray(draw(N, 2)), np.asarray(draw(T, 2))
    eps, first, both = np.zeros((2, I, N)), np.zeros((I, N)), np.zeros((I, N))
    for s, target in zip(steps, y, strict=True):
        eps = np.einsum("jkn,kin->jin", s.D, eps) + s.fx
        first += (s.h[0] @ R - target) @ R.T * eps[0]
        read = np.sign((s.h[0] * s.h[1]) @ R - target) @ R.T
        both += read * (s.h[1] * eps[0] + s.h[0] * eps[1])
    options = {"readouts": [R], "y_target": y}
    found = reference("adaptive", "decolle", **options)["w",]
    np.testing.assert_allclose(found, first, rtol=1e-9)
    own = {
        "local_loss": lambda a, b: jnp.abs(a - b).sum(),
        "observe": lambda h: h[..., 0] * h[..., 1],
    }
    found = reference("adaptive", "decolle", **options, **own)["w",]
    np.testing.assert_allclose(found, both, rtol=1e-9)


def test_weights_without_a_trace_listen_to_the_loss():
    exact = rule_on(seen("operator_readout"), "d_rtrl")
    found = rule_on(seen("operator_readout"), "three_factor", modulator=np.zeros(T))
    assert not found["w",].any()
    np.testing.assert_allclose(found["out",], exact["out",])


def test_what_the_loss_says_beside_the_operators_stays():
    steps = seen("weight_also_used_plainly")
    beside = steps.by_path(sum(s.rest for s in steps.steps))
    assert_equal(rule_on(steps, "three_factor", modulator=np.zeros(T)), beside)
    assert all(abs(g).max() > 1e-3 for g in beside.values())


@pytest.mark.parametrize("rule", ["stllr", "three_factor", "osttp", "decolle"])
def test_signals_have_no_windows(rule):
    options = {
        "stllr": OPTIONS["stllr"][1],
        "three_factor": {"modulator": np.ones(T)},
        "osttp": {"B_list": [np.ones((2, N))], "y_target": np.ones((T, 2))},
        "decolle": {"readouts": [np.ones((N, 2))], "y_target": np.ones((T, 2))},
    }[rule]
    with pytest.raises(ValueError, match="no windows"):
        reference("leaky", rule, 2, **options)


# ------------------------------------------------------------------------------------- windows


def windows(length):
    return [slice(i, i + length) for i in range(0, T, length)]


@pytest.mark.parametrize("length", [1, 2, 3, T])
@pytest.mark.parametrize("case", ["d_rtrl", "eprop", "otpe", "otpe approx", "ottt", "no_trace"])
def test_windows_by_hand(case, length):
    _, _, steps = hand("leaky")
    eps, bar, leak = (np.zeros((I, N)) for _ in range(3))
    X, e, f, total = np.zeros(I), np.zeros(N), np.zeros(N), np.zeros((I, N))
    for part in windows(length):
        S, J, lam = np.zeros((I, N)), np.ones(N), np.zeros(N)
        for s in steps[part]:
            S, J = s.D[0, 0] * S + s.fx[0], s.D[0, 0] * J
            total += s.l[0] * S
            lam += s.l[0] * J
        total += {
            "d_rtrl": lam * eps,
            "eprop": lam * bar,
            "otpe": lam * leak,
            "otpe approx": pull(X, lam * e),
            "ottt": pull(X, lam * f),
            "no_trace": 0.0,
        }[case]
        for s in steps[part]:
            eps = s.D[0, 0] * eps + s.fx[0]
            bar, leak = K * bar + eps, A * leak + s.fx[0]
            X, e, f = A * X + s.x, A * e + s.f[0], s.f[0]
    rule, options = OPTIONS.get(case, ("no_trace", {}))
    found = reference("leaky", rule, length, **options)["w",]
    np.testing.assert_allclose(found, total, rtol=1e-9)


@pytest.mark.parametrize("length", [1, 2, T])
def test_synthetic_gradients_by_hand(length):
    def update(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value) + x @ m.p.value)
        return m.h.value

    draw = Draw("dni")
    net = Net(update, {"w": draw(I, N), "p": draw(I, N)}, {"h": draw(N)})
    M = np.asarray(draw(N, N))
    w, p, h = (np.asarray(s.value) for s in (net.w, net.p, net.h))
    E, total = np.zeros((I, N)), {("w",): np.zeros((I, N)), ("p",): np.zeros((I, N))}
    for part in windows(length):
        S = np.zeros((I, N))
        for x, y in zip(XS[part], TARGETS[part], strict=True):
            h = np.tanh(0.8 * h + x @ (w + p))
            slope = 1 - h**2
            E, S = (slope * (0.8 * trace + x[:, None]) for trace in (E, S))
            total["w",] += (h - y) * E
            total["p",] += (h - y) * S
        total["p",] += h @ M * S
    args = net, step_fn, XS, TARGETS
    how = {"vjp_method": "multi-step", "chunk_size": length}
    guess = lambda groups: [(h[..., 0] @ M)[..., None] for h in groups]
    assert_equal(reference_grad("dni", *args, **how, synthesizer=guess), total)
    silent = reference_grad("dni", *args, **how, synthesizer=lambda groups: jax.tree.map(
        jnp.zeros_like, groups))  # fmt: skip
    assert_equal(silent, reference_grad("d_rtrl", *args, **how))
    assert_different(silent, total)
    if length == 1:  # nothing is cut here, so a single step is a window of one
        assert_equal(reference_grad("dni", *args, synthesizer=guess), total)


# ----------------------------------------------------------------------------- random feedback


def with_readout(draw):
    def update(m, x):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value))
        return matmul(m.h.value, m.out.value)

    return Net(update, {"w": draw(I, N), "out": draw(N, 2)}, {"h": draw(N)})


@pytest.mark.parametrize("window", [None, 2])
def test_random_operand_of_a_readout_by_hand(window):
    draw = Draw("random readout")
    net, R, y = with_readout(draw), np.asarray(draw(N, 2)), np.asarray(draw(T, 2))
    w, out, h = (np.asarray(s.value) for s in (net.w, net.out, net.h))
    E, bar, total = np.zeros((I, N)), np.zeros((I, N)), {("w",): 0 * w, ("out",): 0 * out}
    for t in range(T):
        if window and t % window == 0:
            # what the filter holds when a window begins meets the cotangent of its entry
            total["w",] += entry_signal(net, R, y, h, slice(t, t + window)) * (bar - E)
        h = np.tanh(0.8 * h + XS[t] @ w)
        slope, error = 1 - h**2, h @ out - y[t]
        E = slope * (0.8 * E + XS[t][:, None])
        total["w",] += error @ R.T * (E if window else E + K * bar)
        total["out",] += np.outer(h, error)
        bar = K * bar + E
    how = {"vjp_method": "multi-step", "chunk_size": window} if window else {}
    for key in (("out",), 1):
        options = {"kappa_filter_decay": K, "feedback": {key: R}}
        assert_equal(reference_grad("eprop", net, step_fn, XS, y, **how, **options), total)
    own = reference_grad("eprop", net, step_fn, XS, y, **how, kappa_filter_decay=K)
    assert_different(own, total)
    same = {"kappa_filter_decay": K, "feedback": {("out",): out}}
    assert_equal(reference_grad("eprop", net, step_fn, XS, y, **how, **same), own)


def entry_signal(net, R, y, h, part):
    """The cotangent of the states where a window begins, random feedback at every step."""
    w, out = np.asarray(net.w.value), np.asarray(net.out.value)
    J, lam = np.ones(N), np.zeros(N)
    for x, target in zip(XS[part], y[part], strict=True):
        h = np.tanh(0.8 * h + x @ w)
        J = 0.8 * (1 - h**2) * J
        lam += (h @ out - target) @ R.T * J
    return lam


def test_random_operand_of_the_next_layer_by_hand():
    net, _, _ = hand("two layers")
    R = np.asarray(Draw("next layer")(N, N))
    w, u, a, b = (np.asarray(s.value) for s in (net.w, net.u, net.a, net.b))
    E, U = np.zeros((I, N)), np.zeros((N, N))
    total = {("w",): 0 * w, ("u",): 0 * u}
    for x, y in zip(XS, TARGETS, strict=True):
        t = np.tanh(x @ w)
        a = 0.5 * a + t
        s = np.tanh(a @ u)
        b = 0.6 * b + s
        E, U = 0.5 * E + (1 - t**2) * x[:, None], 0.6 * U + (1 - s**2) * a[:, None]
        total["w",] += ((b - y) * (1 - s**2)) @ R.T * E
        total["u",] += (b - y) * U
    found = reference_grad("rflo", net, step_fn, XS, TARGETS, feedback={("u",): R})
    assert_equal(found, total)
    assert_different(reference("two layers", "rflo"), total)


def test_feedback_names_an_operator():
    with pytest.raises(ValueError, match="no such operator"):
        reference_grad("rflo", hand("leaky")[0], step_fn, XS, TARGETS, feedback={("v",): XS})


@pytest.mark.parametrize("leak", [None, A])
def test_square_feedback_by_hand(leak):
    _, _, steps = hand("adaptive")
    M = np.asarray(Draw("square")(N, N))
    eps, total = np.zeros((2, I, N)), np.zeros((I, N))
    for s in steps:
        eps = (leak * eps if leak else np.einsum("jkn,kin->jin", s.D, eps)) + s.fx
        mixed = s.l / (np.linalg.norm(s.l, axis=-1, keepdims=True) + 1e-8) @ M
        total += meet(mixed, eps)
    found = reference("adaptive", "rflo", leak=leak, group_feedback=[M])["w",]
    np.testing.assert_allclose(found, total, rtol=1e-9)
    window = reference("adaptive", "rflo", 2, leak=leak, group_feedback=[M])
    assert_different(window, reference("adaptive", "rflo", 2, leak=leak))


def test_square_feedback_of_every_group():
    M = np.asarray(Draw("square")(2, N, N))
    own = reference("two layers", "eprop", kappa_filter_decay=K)
    found = reference("two layers", "eprop", kappa_filter_decay=K, group_feedback=list(M))
    other = reference("two layers", "eprop", kappa_filter_decay=K, group_feedback=[M[0], M[0]])
    np.testing.assert_allclose(found["w",], other["w",])
    for one in (own, other):
        assert abs(found["u",] - one["u",]).max() > 1e-3


# ------------------------------------------------------------------------------ who shares a trace


def sets(net, x=I):
    step = Structure(net, lambda net, x: jnp.sum(net(x)), (jnp.ones(x),))
    names = [s.path[0] for s in step.hidden]
    return {names[k]: {names[i] for i in found} for k, found in enumerate(sharing(step))}


def test_states_that_share_a_trace():
    assert sets(hand("adaptive")[0]) == {"v": {"v", "a"}, "a": {"v", "a"}}
    assert sets(hand("memory cell")[0]) == {"c": {"c", "h"}, "h": {"c", "h"}}
    assert sets(hand("two layers")[0]) == {"a": {"a"}, "b": {"b"}}
    delay = {"line", "v"}
    assert sets(EXACT["delay_line"]().model) == {"line": delay, "v": delay}


def test_sharing_a_trace_is_not_transitive():
    # w reaches a and b, u reaches b and c; no operator reaches a and c.
    def update(m, x):
        y, z = matmul(x, m.w.value), matmul(x, m.u.value)
        m.a.value = 0.5 * m.a.value + y
        m.c.value = 0.6 * m.c.value + z
        m.b.value = 0.7 * m.b.value + y * z + m.a.value * m.c.value
        return m.b.value

    draw = Draw("not transitive")
    params, states = {"w": draw(I, N), "u": draw(I, N)}, {k: draw(N) for k in "abc"}
    net = Net(update, params, states)
    found = sets(net)
    assert (found["a"], found["c"]) == ({"a", "b"}, {"b", "c"})
    assert found["b"] == {"a", "b", "c"}
    assert not dense(net, step_fn, XS, TARGETS).steps[0].l_set[: 2 * N].any()


def test_one_operator_for_two_layers_shares_its_trace():
    def update(m, x):
        y = matmul(x, m.w.value)
        m.a.value = 0.5 * m.a.value + y[:2]
        m.b.value = 0.6 * m.b.value + y[2:] + matmul(m.a.value, m.u.value)
        return m.b.value

    draw = Draw("one for two")
    net = Net(update, {"w": draw(I, N), "u": draw(2, 2)}, {"a": draw(2), "b": draw(2)})
    assert sets(net) == {"a": {"a", "b"}, "b": {"a", "b"}}
    assert not dense(net, step_fn, XS, TARGETS[:, :2]).steps[0].l_set[:2].any()


# ------------------------------------------------------------------------- equal rules, all models

ALIVE = ["gru", "lstm", "stacked_layers", "spiking_recurrent", "excitation_inhibition"]


@pytest.mark.parametrize("name", ALIVE)
def test_equal_rules(name):
    steps = seen(name)
    for window in (None, 2):
        exact = rule_on(steps, "d_rtrl", window)
        for rule in ("eprop", "rflo"):
            assert_equal(rule_on(steps, rule, window), exact)
        assert_different(rule_on(steps, "eprop", window, kappa=0.5), exact)
        factored = rule_on(steps, "pp_prop", window, decays=(0.7, 0.0))
        assert_equal(rule_on(steps, "ottt", window, leak=0.7), factored)
        leaky = rule_on(steps, "rflo", window, leak=0.7)
        assert_equal(rule_on(steps, "otpe", window, leak=0.7), leaky)


@pytest.mark.parametrize("name", ALIVE)
def test_one_window_is_bptt(name):
    steps, truth = seen(name), bptt(name)
    rules = [
        ("d_rtrl", {}),
        ("eprop", {"kappa": 0.5}),
        ("otpe", {"leak": 0.7}),
        ("otpe", {"leak": 0.7, "mode": "approx"}),
        ("ottt", {"leak": 0.7}),
        ("no_trace", {}),
        ("dni", {"synthesizer": lambda groups: jax.tree.map(jnp.zeros_like, groups)}),
        ("kf_rtrl", {}),
    ]
    for rule, options in rules:
        assert_equal(rule_on(steps, rule, T, **options), truth)
        if rule != "kf_rtrl":
            assert_different(rule_on(steps, rule, 2, **options), truth)


def test_names_of_one_rule():
    steps = seen("gru")
    same = [
        (("ostl_recurrent", {}), ("snap", {"n": 1})),
        (("ostl_feedforward", {}), ("pp_prop", {"decay_or_rank": 1e-6})),
        (("uoro", {}), ("rtrl", {})),
        (("no_trace", {}), ("NoTrace", {})),
    ]
    for (one, a), (other, b) in same:
        assert definition(rule_name(one), a) == definition(rule_name(other), b)
    assert_equal(rule_on(steps, "kf_rtrl"), rule_on(steps, "rtrl"))
    assert_different(rule_on(steps, "snap", n=1), rule_on(steps, "d_rtrl"))


def test_the_derivative_as_a_third_factor_is_d_rtrl():
    net, loss, steps = hand("leaky")
    error = np.stack([s.l[0] for s in steps])
    found = reference("leaky", "three_factor", modulator={0: error})
    assert_equal(found, reference("leaky", "d_rtrl"))
    assert_equal(found, bptt_grad(net, loss, XS, TARGETS))


def test_otpe_where_the_leak_is_the_dynamics_is_d_rtrl():
    steps = seen("leaky")  # h = 0.9 h + x w
    for window in (None, 2):
        exact = rule_on(steps, "d_rtrl", window)
        assert_equal(rule_on(steps, "otpe", window, leak=0.9), exact)
        assert_different(rule_on(steps, "otpe", window, leak=0.8), exact)


def test_kf_rtrl_has_the_weights_of_operators():
    steps, truth = seen("plain_input_weight"), bptt("plain_input_weight")
    found = rule_on(steps, "kf_rtrl")
    np.testing.assert_allclose(found["r",], truth["r",], rtol=1e-9)
    assert abs(found["w",] - truth["w",]).max() > 1e-3


# --------------------------------------------------------------------------- unbiased estimates


def tiny(plain=False):
    def update(m, x):
        into = x @ m.w.value if plain else matmul(x, m.w.value)
        m.h.value = jnp.tanh(0.5 * m.h.value + into + matmul(m.h.value, m.r.value))
        return m.h.value

    draw = Draw("tiny")
    net = Net(update, {"w": draw(2, 2), "r": draw(2, 2)}, {"h": draw(2)})
    return net, (draw(3, 2), draw(3, 2))


def test_uoro_averages_to_rtrl_over_all_signs():
    net, sequences = tiny(plain=True)
    seen = dense(net, step_fn, *sequences)
    signs = np.array(list(product([-1.0, 1.0], repeat=2)))
    runs = list(product(signs, repeat=2))  # those of the last step meet no loss
    total = np.zeros_like(seen.steps[0].g)
    single = []
    for nus in runs:
        s, w, found = np.zeros(2), np.zeros_like(total), np.zeros_like(total)
        for t, step in enumerate(seen.steps):
            found += step.g + (step.l @ s) * w
            if t < 2:
                s, w = uoro_step(s, w, nus[t], step.A, step.B)
        total += found / len(runs)
        single.append(found)
    truth = bptt_grad(net, step_fn, *sequences)
    assert_equal(seen.by_path(total), truth)
    assert_different(seen.by_path(single[0]), truth)
    assert abs(np.std(single, 0)).max() > 1e-3


def test_kf_rtrl_averages_to_rtrl_over_all_signs():
    net, sequences = tiny()
    seen = dense(net, step_fn, *sequences)
    truth = bptt_grad(net, step_fn, *sequences)
    runs = list(product([-1.0, 1.0], repeat=2))
    # in the reference dy/dθ is written out, here y = x w with x of the step
    inputs = {"w": np.asarray(sequences[0]), "r": [np.asarray(net.h.value)]}
    inputs["r"] += [s.h for s in seen.steps[:-1]]
    order = [o.equation.inputs[1] for o in seen.structure.steady]
    names = {s.entry: s.path[0] for s in seen.structure.params}
    for i, operand in enumerate(order):
        name = names[operand]
        total, single = np.zeros((2, 2)), []
        for signs in runs:
            u, K = np.zeros(2), np.zeros((2, 2))
            found = np.zeros((2, 2))
            for t, step in enumerate(seen.steps):
                now = np.outer(inputs[name][t], step.ct[i])
                found += now + np.outer(u, step.l @ K)
                if t < 2:
                    u, K = kf_step(u, K, signs[t], inputs[name][t], step.A, step.F[i])
            total += found / len(runs)
            single.append(found)
        np.testing.assert_allclose(total, truth[name,], rtol=1e-9)
        assert abs(single[0] - truth[name,]).max() > 1e-3


def test_estimates_keep_their_norms_apart():
    # the two factors of a product share its size: |s| = |w|, |u| = |K|, but for the mixed term
    draw = Draw("norms")
    J, Bm, s = (np.asarray(draw(*shape)) for shape in ((3, 3), (3, 5), (3,)))
    w = 100.0 * np.asarray(draw(5))
    new, back = uoro_step(s, w, np.zeros(3), J, 0 * Bm, eps=0.0 + 1e-12)
    assert np.linalg.norm(new) == pytest.approx(np.linalg.norm(back), rel=1e-6)
    np.testing.assert_allclose(np.outer(new, back), np.outer(J @ s, w))
